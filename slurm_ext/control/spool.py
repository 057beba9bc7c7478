"""The spool on the shared file system: plan documents out; progress, attempts and requests in.

Everything that comes in was written by an ordinary user. A file counts only if, after opening it
without following links, it is a regular file of the user whose directory it lies in, with one
name and a bounded size; then its numbers are bounded by the parsers. A user's directory counts
only if that user owns it. What is refused is logged once and is no error of ours.

The shared file system may hang. All access therefore runs in one thread of its own with a limit:
a cycle goes on with what it read last (`SpoolThread`), and never waits behind a dead server.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slurm_ext.control.files import replace_file
from slurm_ext.domain.attempt import MAX_ATTEMPTS_BYTES, Attempts, parse_attempts
from slurm_ext.domain.document import (
    ClusterDocument,
    PlanDocument,
    parse_cluster_document,
    parse_plan_document,
)
from slurm_ext.domain.errors import DataError, ProtocolError, SourceMissingError
from slurm_ext.domain.progress import MAX_BYTES, Progress, parse_progress
from slurm_ext.domain.request import (
    ATTEMPTS_PREFIX,
    MAX_REQUEST_BYTES,
    PLANS,
    PROGRESS_PREFIX,
    REQUEST_PREFIX,
    SUFFIX,
    PinRequest,
    cluster_path,
    parse_pin_request,
    plan_path,
    request_path,
    table_path,
    user_dir,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)

ROOT_MODE = 0o1777  # world-writable and sticky, as /tmp
PLANS_MODE = 0o755
DOCUMENT_MODE = 0o644
# More entries than this in one user's directory are not looked at: nobody may slow the cycle.
MAX_ENTRIES = 20_000
# Prefix of a file's name to the most bytes that are read of it.
_LIMITS = {
    PROGRESS_PREFIX: MAX_BYTES,
    ATTEMPTS_PREFIX: MAX_ATTEMPTS_BYTES,
    REQUEST_PREFIX: MAX_REQUEST_BYTES,
}
_NAME = re.compile(
    rf"^({'|'.join(map(re.escape, _LIMITS))})(\d+(?:_\d+)?){re.escape(SUFFIX)}$", re.ASCII
)
Mark = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inbox:
    """What users have said, by the user who said it and the job it is about.

    Anybody may write about anybody's job, so a caller looks under the uid of the job's owner (or
    under 0) and nowhere else. Requests go by the number of the job or array.
    """

    progress: Mapping[tuple[int, str], Progress] = field(default_factory=dict)
    attempts: Mapping[tuple[int, str], Attempts] = field(default_factory=dict)
    requests: Mapping[tuple[int, int], PinRequest] = field(default_factory=dict)

    def request_about(self, owner: int, base_id: int) -> PinRequest | None:
        """The newest request by the job's owner or by root."""
        found = [self.requests.get((uid, base_id)) for uid in {owner, 0}]
        known = [request for request in found if request is not None]
        return max(known, key=lambda request: request.at_s) if known else None


class Spool:
    """The directory. One instance belongs to one thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._progress: dict[tuple[int, str], tuple[Mark, Progress]] = {}
        self._attempts: dict[tuple[int, str], tuple[Mark, Attempts]] = {}
        self._requests: dict[tuple[int, int], tuple[Mark, PinRequest]] = {}
        self._told: set[tuple[str, str]] = set()

    def prepare(self) -> None:
        """Make the directories, and refuse ones that somebody else owns."""
        for path, mode in ((self.root, ROOT_MODE), (self.root / PLANS, PLANS_MODE)):
            try:
                made = not path.exists()
                path.mkdir(parents=True, exist_ok=True)
                if made:
                    path.chmod(mode)
                found = path.lstat()
            except OSError as exc:
                raise DataError(
                    str(path), f"cannot be made: {exc}", "create it for the daemon's user"
                ) from exc
            if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
                raise DataError(
                    str(path),
                    f"belongs to user {found.st_uid}, the daemon runs as {os.geteuid()}",
                    f"remove it, or give it to the daemon's user with mode {mode:04o}",
                )

    def intact(self) -> bool:
        """Whether the directory of the plans and the document of the whole are where they were."""
        return (self.root / PLANS).is_dir() and Path(cluster_path(self.root)).exists()

    # -- out -------------------------------------------------------------------------------------

    def write_plans(self, documents: Collection[PlanDocument]) -> None:
        """Replace the documents of these jobs."""
        for document in documents:
            path = Path(plan_path(self.root, document.base_id))
            self._replace(path, document.to_json().encode() + b"\n")

    def write_table(self, content: bytes) -> None:
        """Replace the copy of the throughput table that users read."""
        self._replace(Path(table_path(self.root)), content)

    def write_cluster(self, document: ClusterDocument) -> None:
        """Replace the document of the whole."""
        self._replace(Path(cluster_path(self.root)), document.to_json().encode() + b"\n")

    def _replace(self, path: Path, content: bytes) -> None:
        try:
            replace_file(path, content, mode=DOCUMENT_MODE)
        except OSError as exc:
            # Without the file's passing name: what stays the same is told once.
            words = f"nothing can be written there: {exc.strerror}"
            raise SourceMissingError(str(path.parent), words) from exc

    def remove_plans(self, base_ids: Collection[int]) -> None:
        """Remove the documents of jobs that have left the queue."""
        for base_id in base_ids:
            try:
                Path(plan_path(self.root, base_id)).unlink(missing_ok=True)
            except OSError as exc:
                raise SourceMissingError(str(self.root), f"cannot be cleaned: {exc}") from exc

    def read_plans(self) -> dict[int, PlanDocument]:
        """Every readable plan document; damaged ones are logged and left out."""
        found: dict[int, PlanDocument] = {}
        try:
            names = sorted(os.listdir(self.root / PLANS))
        except OSError as exc:
            raise SourceMissingError(str(self.root / PLANS), str(exc)) from exc
        for name in names:
            stem = name.removesuffix(SUFFIX)
            if stem == name or not stem.isdigit():
                continue
            try:
                found[int(stem)] = read_plan(self.root, int(stem))
            except (ProtocolError, SourceMissingError) as exc:
                self._tell(name, str(exc))
        return found

    # -- in --------------------------------------------------------------------------------------

    def read_inbox(self, uids: Collection[int]) -> Inbox:
        """What lies in the directories of these users. Unchanged files cost a stat."""
        progress: dict[tuple[int, str], tuple[Mark, Progress]] = {}
        attempts: dict[tuple[int, str], tuple[Mark, Attempts]] = {}
        requests: dict[tuple[int, int], tuple[Mark, PinRequest]] = {}
        try:
            os.stat(self.root)
        except OSError as exc:
            raise SourceMissingError(str(self.root), str(exc)) from exc
        for uid in sorted(uids):
            for kind, job_id, place, mark, text in self._user_files(uid):
                try:
                    if kind == PROGRESS_PREFIX:
                        known = self._progress.get((uid, job_id))
                        if known is None or known[0] != mark:
                            report = parse_progress(text(), place)
                            _same_job(report.job_id, job_id, place)
                            known = (mark, report)
                        progress[uid, job_id] = known
                    elif kind == ATTEMPTS_PREFIX:
                        told = self._attempts.get((uid, job_id))
                        if told is None or told[0] != mark:
                            history = parse_attempts(text(), place)
                            _same_job(history.job_id, job_id, place)
                            told = (mark, history)
                        attempts[uid, job_id] = told
                    elif job_id.isdigit():
                        key = (uid, int(job_id))
                        seen = self._requests.get(key)
                        if seen is None or seen[0] != mark:
                            request = parse_pin_request(text(), place)
                            _same_job(str(request.job_id), str(key[1]), place)
                            seen = (mark, request)
                        requests[key] = seen
                except (ProtocolError, OSError) as exc:
                    self._tell(place, str(exc))
        self._progress, self._attempts, self._requests = progress, attempts, requests
        return Inbox(
            {key: report for key, (_, report) in progress.items()},
            {key: history for key, (_, history) in attempts.items()},
            {key: request for key, (_, request) in requests.items()},
        )

    def read_about(self, uid: int, wanted: Container[str], since_s: float = 0.0) -> Inbox:
        """What this user's directory holds about the jobs that are wanted; nothing is remembered.

        For jobs that are in the queue no more: `read_inbox` is for those that are. Files that were
        last written before ``since_s`` are not opened.
        """
        progress: dict[tuple[int, str], Progress] = {}
        attempts: dict[tuple[int, str], Attempts] = {}
        for kind, job_id, place, (_, written_ns, _), text in self._user_files(uid):
            if job_id not in wanted or written_ns < since_s * 1e9:
                continue
            try:
                if kind == PROGRESS_PREFIX:
                    report = parse_progress(text(), place)
                    _same_job(report.job_id, job_id, place)
                    progress[uid, job_id] = report
                elif kind == ATTEMPTS_PREFIX:
                    history = parse_attempts(text(), place)
                    _same_job(history.job_id, job_id, place)
                    attempts[uid, job_id] = history
            except (ProtocolError, OSError) as exc:
                self._tell(place, str(exc))
        return Inbox(progress, attempts)

    def _user_files(self, uid: int) -> Iterator[tuple[str, str, str, Mark, Callable[[], str]]]:
        """(prefix, job id, place, mark of the content, reader) of each acceptable file."""
        path = Path(user_dir(self.root, uid))
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as exc:
            self._tell(str(path), f"{path}: {exc.strerror}: not read")
            return
        try:
            if os.fstat(handle).st_uid != uid:
                self._tell(str(path), f"{path}: does not belong to user {uid}: not read")
                return
            names = os.listdir(handle)
            if len(names) > MAX_ENTRIES:
                self._tell(str(path), f"{path}: more than {MAX_ENTRIES} files: the rest not read")
            for name in sorted(names)[:MAX_ENTRIES]:
                match = _NAME.match(name)
                if match is None:
                    continue
                place = str(path / name)
                limit = _LIMITS[match[1]]
                try:
                    found = os.stat(name, dir_fd=handle, follow_symlinks=False)
                except OSError:
                    continue  # replaced or removed this moment: the next cycle sees it
                mark = (found.st_ino, found.st_mtime_ns, found.st_size)

                def read(name: str = name, place: str = place, limit: int = limit) -> str:
                    return read_untrusted(handle, name, uid, limit, place)

                yield match[1], match[2], place, mark, read
        finally:
            os.close(handle)

    def _tell(self, place: str, message: str) -> None:
        if (place, message) not in self._told:
            if len(self._told) > 10_000:
                self._told.clear()
            self._told.add((place, message))
            _log.warning("spool: %s", message)


def _same_job(found: str, wanted: str, place: str) -> None:
    if found != wanted:
        raise ProtocolError(f"{place}: speaks of job {found}")


def read_untrusted(directory: int, name: str, uid: int, limit: int, place: str) -> str:
    """Read a small file of ``uid``, or raise ProtocolError. Nothing it points to is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(name, flags, dir_fd=directory)
    except OSError as exc:
        what = "a link" if exc.errno == errno.ELOOP else str(exc.strerror)
        raise ProtocolError(f"{place}: {what}; not read") from exc
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ProtocolError(f"{place}: not a plain file with one name; not read")
        if found.st_uid != uid:
            raise ProtocolError(f"{place}: belongs to user {found.st_uid}, not {uid}; not read")
        if found.st_size > limit:
            raise ProtocolError(f"{place}: longer than {limit} bytes; not read")
        data = file.read(limit + 1)
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise ProtocolError(f"{place}: not UTF-8; not read") from exc


def read_plan(root: Path, base_id: int) -> PlanDocument:
    """The plan document of a job: for the command line as well as for the daemon.

    Raises SourceMissingError where there is none, ProtocolError where it is damaged.
    """
    path = Path(plan_path(root, base_id))
    return parse_plan_document(_read(path), str(path))


def read_cluster(root: Path) -> ClusterDocument:
    """The document of the whole, or SourceMissingError, or ProtocolError."""
    path = Path(cluster_path(root))
    return parse_cluster_document(_read(path), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SourceMissingError(str(path), str(exc)) from exc


def write_request(root: Path, uid: int, request: PinRequest) -> Path:
    """Write a user's request into the user's own directory, which is made where it is absent."""
    directory = Path(user_dir(root, uid))
    path = Path(request_path(root, uid, request.job_id))
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        if directory.lstat().st_uid != uid or not stat.S_ISDIR(directory.lstat().st_mode):
            raise DataError(str(directory), "is not yours", "ask the administrator to remove it")
        replace_file(path, request.to_json().encode() + b"\n", mode=0o644)
    except OSError as exc:
        raise DataError(
            str(path), f"cannot be written: {exc}", "is the spool mounted here and world-writable?"
        ) from exc
    return path


class SpoolThread:
    """Runs spool access beside the cycle, with a limit for each answer.

    While a call hangs, later ones are refused at once with SourceMissingError: nothing piles up
    behind a dead file server. The threads are daemon threads, so that one that hangs in the
    kernel does not keep the process from ending.
    """

    def __init__(self, spool: Spool, limit_s: float) -> None:
        self._spool = spool
        self._limit_s = limit_s
        self._hanging: threading.Thread | None = None

    def call(self, work: Callable[[Spool], T]) -> T:
        """Run ``work``, or raise SourceMissingError after the limit."""
        root = str(self._spool.root)
        if self._hanging is not None and self._hanging.is_alive():
            raise SourceMissingError(root, "an earlier access still hangs")
        self._hanging = None
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(self._spool))
            except BaseException as exc:  # handed to the caller, who raises it
                future.set_exception(exc)

        thread = threading.Thread(target=run, name="spool", daemon=True)
        thread.start()
        try:
            return future.result(self._limit_s)
        except TimeoutError as exc:
            if future.done():
                raise  # the work's own time-out, not ours
            self._hanging = thread
            raise SourceMissingError(root, f"no answer within {self._limit_s:g} s") from exc

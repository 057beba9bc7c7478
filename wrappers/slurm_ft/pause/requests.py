"""Asking for a pause from outside the job: small files in, small files out.

Whoever may put a file into the job's own state directory (mode 0700) is the job's user or root, so
a file there needs no other proof. The daemon has no access to it and puts its own, and those of
operators, into its part of the spool, with a munge credential over the words of the request. It
counts only when both the file and the credential are by root or by the daemon's user. Everything
that is read is opened without following links, bounded in size, and checked after opening.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_ext.domain.codec import dumps
from slurm_ext.domain.errors import ProtocolError, SourceMissingError
from slurm_ext.domain.pausing import (
    ASK_PREFIX,
    MAX_ASK_BYTES,
    PauseAnswer,
    PauseAsk,
    answer_name,
    is_ask_name,
    parse_answer,
    parse_ask,
)

_UID = re.compile(r"^UID:\s+(?:\S+\s+\()?(\d+)\)?\s*$", re.MULTILINE)
# With --numeric munge 0.5.16 prints the number alone (seen); without it stands in brackets.
_STATUS = re.compile(r"^STATUS:\s+(?:Success \(0\)|0)\s*$", re.MULTILINE)
_MUNGE_S = 10.0
# Clocks of a cluster agree much better: munge asks for it.
_CLOCKS_S = 5.0
# Who asks gives up and withdraws the request much sooner; one that is older than the attempt by
# more than this is of somebody whose terminal has died, and is not wanted any more.
_LEFT_S = 120.0


class UncheckedError(ProtocolError):
    """munge does not answer on this node, or does not know the credential."""


def ask_path(directory: Path, ask: PauseAsk) -> Path:
    """Where the request lies."""
    return directory / ask.name


def answer_path(directory: Path, ask_id: str) -> Path:
    """Where its answer lies."""
    return directory / answer_name(ask_id)


def write_private(path: Path, document: PauseAsk | PauseAnswer, mode: int = 0o600) -> None:
    """Replace the file at once. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(dumps(document) + "\n")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_answer(path: Path) -> PauseAnswer | None:
    """The answer, ``None`` where there is none yet."""
    try:
        text = _read(path)[0]
    except FileNotFoundError:
        return None
    return parse_answer(text, str(path))


def _read(path: Path) -> tuple[str, int]:
    """Text and owner of a regular file. Raises FileNotFoundError or ProtocolError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ProtocolError(f"{path}: cannot be read: {exc.strerror}") from exc
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise ProtocolError(f"{path}: not a plain file with one name; not read")
        try:
            data = file.read(MAX_ASK_BYTES + 1)
        except OSError as exc:
            raise ProtocolError(f"{path}: cannot be read: {exc.strerror}") from exc
    if len(data) > MAX_ASK_BYTES:
        raise ProtocolError(f"{path}: longer than {MAX_ASK_BYTES} bytes; not read")
    return data.decode(errors="replace"), found.st_uid


def vouch(words: str) -> str:
    """A munge credential of this user over these words, or SourceMissingError."""
    return _munge(["munge", "--no-input", f"--string={words}"]).strip()


def vouched_by(credential: str, words: str) -> int:
    """The user who made the credential over exactly these words, or ProtocolError."""
    try:
        text = _munge(["unmunge", "--numeric"], credential)
    except SourceMissingError as exc:
        raise UncheckedError(f"credential: {exc}") from exc
    head, _, payload = text.partition("\n\n")
    uid = _UID.search(head)
    if not _STATUS.search(head) or uid is None:
        raise ProtocolError("credential: munge does not confirm it")
    if payload.rstrip("\n") != words:
        raise ProtocolError("credential: made for another request")
    return int(uid[1])


def _munge(argv: list[str], given: str = "") -> str:
    try:
        done = subprocess.run(
            argv, input=given, capture_output=True, text=True, timeout=_MUNGE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise SourceMissingError("munge", str(exc)) from exc
    if done.returncode:
        raise SourceMissingError("munge", done.stderr.strip()[:300] or f"code {done.returncode}")
    return done.stdout


class Letterbox:
    """Requests for one job, as its own helper process reads them.

    ``state_dir`` is the job's, ``plans`` the daemon's part of the spool (or ``None``). ``told``
    gets a line about each request that was refused here. Requests that are older than ``since_s``
    were meant for an earlier attempt, and are not obeyed; the user's own may be a little older, so
    that a job can be asked while it starts.
    """

    def __init__(
        self,
        job_id: str,
        state_dir: Path,
        plans: Path | None,
        told: Callable[[str], None],
        vouched: Callable[[str, str], int] = vouched_by,
        since_s: float = 0.0,
    ) -> None:
        self._job_id = job_id
        self._state_dir = state_dir
        self._plans = plans
        self._told = told
        self._vouched = vouched
        self._since_s = since_s - _CLOCKS_S
        self._seen: set[str] = set()
        self._told_before: set[str] = set()
        self._unchecked: dict[str, str] = {}

    def take(self) -> Iterator[PauseAsk]:
        """New requests that may be obeyed, the oldest first."""
        found = [*self._own(), *self._daemons()]
        yield from sorted(found, key=lambda ask: (ask.at_s, ask.id))

    def unchecked(self) -> dict[str, str]:
        """Requests that may be right and could not be checked here, by id, with the reason; once.

        Who has left them in the daemon's place waits for an answer.
        """
        found, self._unchecked = self._unchecked, {}
        return found

    def _own(self) -> Iterator[PauseAsk]:
        for path in self._names(self._state_dir):
            if path.name in self._seen:
                continue
            ask = self._accept(path, {os.getuid(), 0}, needs_credential=False)
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                # The helper must not die of it: paused ranks would lose their store.
                self._seen.add(path.name)
                self._told(f"{path}: cannot be removed: {exc.strerror}")
            if ask is not None:
                yield ask

    def _daemons(self) -> Iterator[PauseAsk]:
        if self._plans is None:
            return
        try:
            owner = self._plans.lstat().st_uid
        except OSError:
            return
        for path in self._names(self._plans):
            # Not ours to delete: the name is remembered instead.
            if path.name not in self._seen:
                self._seen.add(path.name)
                ask = self._accept(path, {owner, 0}, needs_credential=True)
                if ask is not None:
                    yield ask

    def _names(self, directory: Path) -> list[Path]:
        prefix = f"{ASK_PREFIX}{self._job_id}-"
        try:
            with os.scandir(directory) as entries:
                return [
                    Path(entry.path)
                    for entry in entries
                    if entry.name.startswith(prefix) and is_ask_name(entry.name)
                ]
        except OSError as exc:
            # Looked at every few seconds: said once.
            words = f"{directory}: requests cannot be read: {exc.strerror}"
            if words not in self._told_before:
                self._told_before.add(words)
                self._told(words)
            return []

    def _accept(self, path: Path, users: set[int], *, needs_credential: bool) -> PauseAsk | None:
        try:
            text, owner = _read(path)
            ask = parse_ask(text, str(path))
            if owner not in users:
                raise ProtocolError(f"{path}: by user {owner}, who may not pause this job")
            if ask.job_id != self._job_id:
                raise ProtocolError(f"{path}: about job {ask.job_id[:40]}, this is {self._job_id}")
            if ask.at_s < self._since_s - (0.0 if needs_credential else _LEFT_S):
                raise ProtocolError(f"{path}: from before this attempt; not obeyed")
            if needs_credential:
                self._check_credential(path, ask, users)
        except FileNotFoundError:
            return None
        except ProtocolError as exc:
            self._told(str(exc))
            return None
        return ask

    def _check_credential(self, path: Path, ask: PauseAsk, users: set[int]) -> None:
        """Raises ProtocolError where the credential is not one of these users'."""
        try:
            uid = self._vouched(ask.credential, ask.words())
        except UncheckedError as exc:
            self._unchecked[ask.id] = f"{socket.gethostname()} cannot check who asks: {exc}"
            raise
        if uid not in users:
            raise ProtocolError(f"{path}: vouched for by user {uid}, who may not pause this job")

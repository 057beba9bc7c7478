"""Requests for pauses that go through the daemon: operators' are passed on, its own are made here.

A job obeys its own user, root and the daemon's user, whom it can tell by their files and their
munge credentials; it cannot know who is an operator of Slurm. So an operator leaves the request in
the own part of the spool, and the daemon, which can ask the accounting, puts it into its part under
a credential of its own. It takes only what an operator's credential covers word for word; files of
other users are not even looked for, so that nobody can slow a cycle by many of them.

Nothing is decided here about pauses. What cannot be read or written is tried again in the next
cycle; a credential lasts for minutes (munge's own limit), and so does a request.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from slurm_ext.control.files import replace_file
from slurm_ext.control.spool import DOCUMENT_MODE, Spool, SpoolThread, read_untrusted
from slurm_ext.domain.codec import dumps
from slurm_ext.domain.errors import ProtocolError, SourceMissingError
from slurm_ext.domain.pausing import (
    ANSWER_PREFIX,
    ASK_PREFIX,
    ENDED_REFUSED,
    MAX_ASK_BYTES,
    PAUSE,
    PauseAnswer,
    PauseAsk,
    Rung,
    answer_name,
    is_ask_name,
    parse_answer,
    parse_ask,
)
from slurm_ext.domain.request import PLANS, user_dir

_log = logging.getLogger(__name__)

# An operator asks about one job at a time; more than so many files are a mistake.
MAX_ASKS = 64
# Longer than any munge credential is good for by default (300 s), so nobody can still obey it.
KEPT_S = 600.0
_OPERATORS_S = 60.0


@dataclass(frozen=True, slots=True)
class Munge:
    """How credentials are made and read; both raise ProtocolError or SourceMissingError."""

    vouch: Callable[[str], str]
    vouched_by: Callable[[str, str], int]


@dataclass(frozen=True, slots=True)
class Passed:
    """One operator's request and what was done with it; ``refusal`` is empty where it went on."""

    ask: PauseAsk
    user: str
    refusal: str = ""


@dataclass(slots=True)
class _Lying:
    """A file of ours in the spool, since when, and the operator's own file behind it."""

    at_s: float
    origin: Path | None = None


@dataclass(slots=True)
class _Operators:
    by_uid: Mapping[int, str] = field(default_factory=dict)
    at_s: float | None = None


class AskDesk:
    """The daemon's side of requests. ``operators`` names the operators, as Slurm tells."""

    def __init__(self, munge: Munge, operators: Callable[[], Collection[str]]) -> None:
        self._munge = munge
        self._ask_operators = operators
        self._operators = _Operators()
        self._done: dict[str, float] = {}
        self._lying: dict[Path, _Lying] = {}
        self._swept: Path | None = None

    # -- operators' requests ---------------------------------------------------------------------

    def pass_on(self, spool: SpoolThread, running: Collection[str], now: float) -> list[Passed]:
        """Hand operators' new requests to their jobs, and clear away what is over.

        ``running`` are the ids of running jobs. Raises SourceMissingError.
        """
        operators = self._known_operators(now)
        found = spool.call(lambda inner: list(_asks(inner.root, operators)))
        passed = []
        for uid, path, ask in found:
            # An old one was left by a command that was killed: its credential is worth nothing any
            # more, and what became of it is forgotten after a while.
            if ask.id in self._done or now - ask.at_s > KEPT_S:
                continue
            refusal = self._refusal(uid, ask, running)
            # Read once: munge takes a credential that is read again for a stolen one.
            self._done[ask.id] = now
            name = operators[uid]
            if not refusal:
                try:
                    self._send(spool, replace(ask, by=f"{name}, an operator"), now, path)
                except SourceMissingError as exc:
                    refusal = f"the daemon cannot pass it on: {exc}"
            if refusal:
                answer = PauseAnswer(ask.id, "refused", end=ENDED_REFUSED, reason=refusal)
                self._put(spool, answer_name(ask.id), dumps(answer), now, path)
            passed.append(Passed(ask, name, refusal))
        self._clear(spool, now)
        return passed

    def _known_operators(self, now: float) -> Mapping[int, str]:
        known = self._operators
        if known.at_s is None or now - known.at_s >= _OPERATORS_S:
            by_uid = {0: "root"}
            for name in sorted(self._ask_operators()):
                try:
                    by_uid[pwd.getpwnam(name).pw_uid] = name
                except KeyError:
                    _log.debug("operator %s has no account on this host", name)
            self._operators = known = _Operators(by_uid, now)
        return known.by_uid

    def _refusal(self, uid: int, ask: PauseAsk, running: Collection[str]) -> str:
        if ask.job_id not in running:
            return f"job {ask.job_id} does not run"
        try:
            by = self._munge.vouched_by(ask.credential, ask.words())
        except ProtocolError as exc:
            return str(exc)
        return "" if by == uid else f"the request is vouched for by user {by}, not by {uid}"

    # -- requests of the daemon itself -----------------------------------------------------------

    def ask_to_leave(
        self, spool: SpoolThread, job_id: str, *, by: str, wait_s: float, now: float
    ) -> PauseAsk:
        """Ask a job to save and to go back to the queue. Raises SourceMissingError."""
        ask = PauseAsk(
            secrets.token_hex(8), PAUSE, job_id, now, Rung.JOB, wait_s, hold_s=0.0, by=by
        )
        return self._send(spool, ask, now, None)

    def answer(self, spool: SpoolThread, uid: int, ask: PauseAsk) -> PauseAnswer | None:
        """What the job of this user has answered so far. Raises SourceMissingError."""
        try:
            return spool.call(lambda inner: _answer(inner.root, uid, ask.id))
        except ProtocolError as exc:
            _log.warning("%s", exc)
            return None

    def withdraw(self, spool: SpoolThread, ask: PauseAsk) -> None:
        """Nobody shall obey it from now on."""
        self._remove(spool, Path(PLANS, ask.name))

    # -- files -----------------------------------------------------------------------------------

    def _send(self, spool: SpoolThread, ask: PauseAsk, now: float, origin: Path | None) -> PauseAsk:
        ask = replace(ask, credential="")
        ask = replace(ask, credential=self._munge.vouch(ask.words()))
        self._put(spool, ask.name, dumps(ask), now, origin)
        return ask

    def _put(
        self, spool: SpoolThread, name: str, text: str, now: float, origin: Path | None
    ) -> None:
        path = Path(PLANS, name)

        def write(inner: Spool) -> None:
            try:
                replace_file(inner.root / path, text.encode() + b"\n", mode=DOCUMENT_MODE)
            except OSError as exc:
                place = str(inner.root / path)
                raise SourceMissingError(place, f"cannot be written: {exc}") from exc

        self._lying[path] = _Lying(now, origin)
        spool.call(write)

    def _remove(self, spool: SpoolThread, path: Path) -> None:
        def unlink(inner: Spool) -> None:
            try:
                (inner.root / path).unlink(missing_ok=True)
            except OSError as exc:
                place = str(inner.root / path)
                raise SourceMissingError(place, f"cannot be removed: {exc}") from exc

        spool.call(unlink)
        self._lying.pop(path, None)

    def _clear(self, spool: SpoolThread, now: float) -> None:
        """Remove files whose operator has taken the request back, and all that are too old."""
        self._done = {i: at for i, at in self._done.items() if now - at < KEPT_S}
        root = spool.call(lambda inner: inner.root)
        if self._swept != root:
            # Left by an earlier daemon, which knew what became of them; nobody does now.
            for path in spool.call(lambda inner: _left_behind(inner.root)):
                self._lying.setdefault(path, _Lying(now))
            self._swept = root
        for path, lying in list(self._lying.items()):
            origin = lying.origin
            gone = origin is not None and not spool.call(partial(_exists, origin))
            if gone or now - lying.at_s > KEPT_S:
                self._remove(spool, path)


def _asks(root: Path, uids: Collection[int]) -> Iterator[tuple[int, Path, PauseAsk]]:
    """Readable requests in the directories of these users."""
    for uid in sorted(uids):
        folder = Path(user_dir(root, uid))
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # an operator who has never asked for anything
        try:
            if os.fstat(handle).st_uid != uid:
                continue
            names = [name for name in os.listdir(handle) if is_ask_name(name)]
            for name in _youngest(handle, names):
                place = str(folder / name)
                try:
                    text = read_untrusted(handle, name, uid, MAX_ASK_BYTES, place)
                    ask = parse_ask(text, place)
                except ProtocolError as exc:
                    _log.warning("spool: %s", exc)
                    continue
                if ask.name == name:
                    yield uid, folder / name, ask
        finally:
            os.close(handle)


def _youngest(handle: int, names: list[str]) -> list[str]:
    """As many as are looked at: those that were left behind must not hide a new one."""
    ages: list[tuple[float, str]] = []
    for name in names:
        try:
            found = os.stat(name, dir_fd=handle, follow_symlinks=False)
        except OSError:
            continue  # withdrawn meanwhile
        ages.append((-found.st_mtime, name))
    return sorted(name for _, name in sorted(ages)[:MAX_ASKS])


def _answer(root: Path, uid: int, ask_id: str) -> PauseAnswer | None:
    folder, name = Path(user_dir(root, uid)), answer_name(ask_id)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if name not in os.listdir(handle):
            return None
        place = str(folder / name)
        return parse_answer(read_untrusted(handle, name, uid, MAX_ASK_BYTES, place), place)
    finally:
        os.close(handle)


def _exists(path: Path, _spool: Spool) -> bool:
    return path.exists()


def _left_behind(root: Path) -> list[Path]:
    try:
        names = os.listdir(root / PLANS)
    except OSError as exc:
        raise SourceMissingError(str(root / PLANS), str(exc)) from exc
    return [Path(PLANS, n) for n in names if n.startswith((ASK_PREFIX, ANSWER_PREFIX))]

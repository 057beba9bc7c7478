"""The small file that a rank's session keeps for its ``ft-run`` (``FT_STATUS_FILE``).

Its presence says that the program has a session, so that a signal is left to it; its content says
how far the rank came and why it left. One file per rank and attempt, replaced atomically: a
reader sees the old one or the new one. Read leniently, because it is read when things have gone
wrong: what cannot be used is as good as no file, and is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError

STATUS_VERSION = 1
MAX_STATUS_BYTES = 16384
_MAX_TEXT = 1000

# Why a rank left (`Status.leaving`). A rank that ended by itself, well or badly, has none.
SIGNALLED = "signalled"  # a signal of FT_SIGNALS, on this rank or another one
ASKED = "asked to leave"  # another part of the product wanted it, see the note
GRACE_OVER = "grace over"  # the time until SIGKILL ran out before all ranks were at a safe point
STUCK = "stuck rank"  # leaving was asked for and this rank came to no safe point
LOST_PEER = "lost peer"  # an exchange between ranks was abandoned
PLAN_DIFFERS = "plan differs"  # ranks read different plans
UNDECIDED = "undecided"  # acknowledged a pause and could not learn the decision

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank says of itself. Times are seconds since the epoch, durations seconds.

    ``pid`` is the process of the session: the one that a signal is meant for, however many
    shells and helpers stand between it and ``ft-run``. ``step`` is the last one that ended,
    ``saved_step`` that of the last complete checkpoint, ``restored_step`` the one that this
    attempt began from (0 = from the start), ``None`` = not known. ``save_s`` is the measured time
    of a whole save, ``stall_s`` the time that training stood still for saves. ``leaving`` is one
    of the words above; ``failed`` the exception with which the program's own code ended.
    ``heard`` is the signal that was heard, ``done`` says that the session ended in order.
    """

    attempt: int
    rank: int
    pid: int
    at_s: float
    step: int | None = None
    saved_step: int | None = None
    restored_step: int | None = None
    first_step_s: float | None = None
    save_s: float | None = None
    stall_s: float = 0.0
    leaving: str | None = None
    failed: str | None = None
    heard: str | None = None
    done: bool = False
    note: str = ""
    version: int = STATUS_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def write(path: Path, status: Status) -> None:
    """Replace the file. Raises OSError where that is not possible."""
    replace_text(path, status.to_json() + "\n")


def read(path: Path) -> Status | None:
    """The status, or ``None`` where there is none or it cannot be used (which is logged)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_STATUS_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        _log.warning("%s: the session's status cannot be read: %s", path, exc)
        return None
    if len(data) > MAX_STATUS_BYTES:
        _log.warning("%s: longer than %d bytes; not read", path, MAX_STATUS_BYTES)
        return None
    try:
        status = loads(Status, data.decode(errors="replace"), str(path))
    except ProtocolError as exc:
        _log.warning("%s", exc)
        return None
    if status.version != STATUS_VERSION:
        _log.warning("%s: version %d, this side knows %d", path, status.version, STATUS_VERSION)
        return None
    return status


def shorten(text: str) -> str:
    """One line of bounded length, for ``failed`` and ``note``."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."


def replace_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file atomically. Not synced: these files are worth nothing after a power cut.

    The temporary name carries process and thread, so that no two writers share one; a half-written
    file does not stay behind where the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise

"""The small file that a rank's session keeps for its ``ft-run`` (``FT_STATUS_FILE``).

Its presence says that the program has a session, so that a signal is left to it; its content says
how far the rank came and why it left. One file per rank and attempt, replaced atomically: a
reader sees the old one or the new one. Read leniently, because it is read when things have gone
wrong: what cannot be used is as good as no file, and is logged.

Where the directory takes no more (a home directory at its quota), the node's own temporary
directory holds the file: rank and ``ft-run`` share the node, and a job that saved its checkpoint
elsewhere would be lost for a few bytes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError

STATUS_VERSION = 1
MAX_STATUS_BYTES = 16384
_MAX_TEXT = 1000
# Full, at its quota, read-only, or a file server that has lost it.
_TAKES_NOTHING = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENODEV),
        # Removed, or not mounted any more.
        errno.ENOENT,
    }
)
# Not TMPDIR, which a script may change between ft-run and the program.
_ON_NODE = Path("/tmp")
# With what `replace_text` puts around it, a file's name ends at 255 bytes.
_LONGEST_NAME = 200

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
    of a whole save, ``stall_s`` the time that training stood still for saves, ``paused_s`` that it
    was paused. ``leaving`` is one
    of the words above; ``failed`` the exception with which the program's own code ended.
    ``heard`` is the signal that was heard, ``done`` says that the session ended in order.
    ``save_error`` is why the last save failed, empty where it succeeded.
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
    paused_s: float = 0.0
    leaving: str | None = None
    failed: str | None = None
    heard: str | None = None
    done: bool = False
    note: str = ""
    save_error: str = ""
    version: int = STATUS_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def write(path: Path, status: Status) -> None:
    """Replace the file, or the one in its stead. Raises OSError where neither can be had."""
    text = status.to_json() + "\n"
    try:
        replace_text(path, text)
    except OSError as exc:
        if exc.errno not in _TAKES_NOTHING:
            raise
        other = stead(path)
        try:
            other.parent.mkdir(0o700, exist_ok=True)
            if not _is_own(other.parent):
                raise exc
            replace_text(other, text)
        except OSError:
            raise exc from None


def stead(path: Path) -> Path:
    """Where a status is kept on this node while its own place takes nothing."""
    name = os.fsencode(path.absolute()).strip(b"/").replace(b"%", b"%%").replace(b"/", b"%")
    return _ON_NODE / f"slurm-ext-{os.getuid()}" / os.fsdecode(name[-_LONGEST_NAME:])


def exists(path: Path) -> bool:
    """Whether a session has written a status."""
    other = stead(path)
    return path.exists() or (_is_own(other.parent) and other.exists())


def forget_stead(path: Path) -> None:
    """Remove what was kept on this node."""
    other = stead(path)
    if _is_own(other.parent):
        with contextlib.suppress(OSError):
            other.unlink()


def read(path: Path) -> Status | None:
    """The status, or ``None`` where there is none or it cannot be used (which is logged)."""
    found = _read_one(path)
    other = stead(path)
    if not _is_own(other.parent):
        return found
    late = _read_one(other)
    if found is None or (late is not None and late.at_s > found.at_s):
        return late
    return found


def _is_own(directory: Path) -> bool:
    """Whether nobody else can have made it or what lies in it."""
    try:
        info = directory.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o077
    return private and info.st_uid == os.getuid()


def _read_one(path: Path) -> Status | None:
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

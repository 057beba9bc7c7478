"""File locks: one daemon per journal and per spool, and nobody acts while another does.

``<journal>.lock`` and ``<spool>/plans/daemon.lock`` are held for a daemon's whole life (see
`slurm_ext.control.tenure`), ``<journal>.acting`` by whoever writes to Slurm at the moment. The
kernel drops them with the process, so a killed daemon leaves no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_ext.control.files import is_there
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.request import PLANS

_POLL_S = 0.02


def life_lock(journal: Path) -> Path:
    """Held by the daemon as long as it lives."""
    return journal.with_name(journal.name + ".lock")


def acting_lock(journal: Path) -> Path:
    """Held while something is written to Slurm."""
    return journal.with_name(journal.name + ".acting")


def spool_lock(spool: Path) -> Path:
    """Held by the daemon whose plan documents lie in this spool, also from another machine."""
    return spool / PLANS / "daemon.lock"


class FileLock:
    """An advisory lock on a file that stays where it is.

    ``mode`` 0600 where other users can reach the file: whoever may open it may lock it.
    """

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._handle: int | None = None

    def acquire(self, limit_s: float = 0.0) -> bool:
        """Take the lock, waiting at most ``limit_s``; whether it is ours now."""
        if self._handle is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, self._mode)
        except OSError as exc:
            raise DataError(
                str(self.path), f"cannot be opened: {exc}", "run as the daemon's user"
            ) from exc
        end = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EACCES):
                    os.close(handle)
                    raise DataError(
                        str(self.path), f"cannot be locked: {exc}", "put it on a local disk"
                    ) from exc
                if time.monotonic() >= end:
                    os.close(handle)
                    return False
                time.sleep(_POLL_S)
            else:
                self._handle = handle
                return True

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    @contextlib.contextmanager
    def held(self, limit_s: float, who: str) -> Iterator[None]:
        """Hold the lock, or raise DataError saying ``who`` is in the way."""
        if not self.acquire(limit_s):
            raise DataError(
                str(self.path), f"{who} holds it for more than {limit_s:g} s", "wait, or stop it"
            )
        try:
            yield
        finally:
            self.release()


def daemon_lives(journal: Path) -> bool:
    """Whether a daemon holds its lock now. Raises DataError where that cannot be told."""
    lock = FileLock(life_lock(journal))
    if not is_there(lock.path):
        return False  # asking must not make files that the daemon could not open later
    if lock.acquire():
        lock.release()
        return False
    return True

"""Keeps a direction of an emulated link at its bandwidth, alone or shared between processes.

Reservation, not refill: whoever moves bytes books the link's next free time and sleeps until its
own booking is over. So the sum over all users never exceeds the rate, whoever they are, and no
burst is saved up while the link lies idle. Sleeping stands for a transfer that another engine does
(PCIe, a NIC): it takes no processor time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import Protocol

from slurm_ext.domain.errors import ConfigError

_FORM = struct.Struct("<d")


class Pace(Protocol):
    """One direction of a link."""

    def book(self, nbytes: int) -> float:
        """Reserve the link for so many bytes; the monotonic time at which they have crossed."""
        ...


class Unlimited:
    """As fast as memory copies."""

    def book(self, nbytes: int) -> float:
        """Now."""
        return time.monotonic()


class OwnPace:
    """A direction that one process has to itself. ``rate`` is in bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate = _checked(rate)
        self._free_at = 0.0
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> float:
        """See `Pace`."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            return self._free_at


class SharedPace:
    """A direction shared by processes of one machine, e.g. ranks behind one PCIe switch.

    The file holds the time at which the link is free, on the machine's monotonic clock; it must
    lie on a local file system and is made when missing.
    """

    def __init__(self, path: Path, rate: float) -> None:
        self._rate = _checked(rate)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Growing only: a second opener must not reset the first one's booking.
        if os.fstat(self._descriptor).st_size < _FORM.size:
            os.posix_fallocate(self._descriptor, 0, _FORM.size)
        self._memory = mmap.mmap(self._descriptor, _FORM.size)
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> float:
        """See `Pace`."""
        # Threads of one process share the descriptor, for which flock excludes nobody.
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                (free_at,) = _FORM.unpack_from(self._memory)
                until: float = max(free_at, time.monotonic()) + nbytes / self._rate
                _FORM.pack_into(self._memory, 0, until)
                return until
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file."""
        self._memory.close()
        os.close(self._descriptor)


def _checked(rate: float) -> float:
    if not rate > 0:
        raise ConfigError(f"link rate {rate!r}", "is not above 0 bytes per second", "give a rate")
    return rate

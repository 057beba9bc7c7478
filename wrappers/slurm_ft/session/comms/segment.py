"""Memory that the ranks of one node share, and the signs of life beside it.

The memory never has a name in any directory: rank 0 makes an anonymous file, and the others open it
through rank 0's entry in /proc. So nothing is left over however a rank ends, no limit of /dev/shm
matters, and no other user can open it. Ranks that see another /proc (another node, a container with
processes of its own) cannot open it either, or find something else there: the file must be
the very one that was announced, of our own user, sealed against truncation (a shrunk file would
end its readers by SIGBUS), and hold a token that only the ranks were told.

A rank holds a POSIX lock on the byte of its number. The kernel drops it when the process ends in
whatever way, and a forked child does not have it: whoever gets hold of a peer's byte knows that the
peer is gone. Such a lock is also dropped when its process closes *any* descriptor of the file;
that of the mapping is closed with the segment, and nothing else in this process opens it again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass

from slurm_ext.domain.errors import SlurmExtError

_NAME = "slurm-ft-ranks"
_TOKEN_BYTES = 32
_HEADER_BYTES = 64  # keeps the rows behind it in cache lines of their own
# Else a word of a board is moved in two halves, and might be read between them.
_WHOLE_WORDS = sys.maxsize > 2**32
# Linux's own numbers, the same on all machines: a Python that was built for an older C library, as
# many distributed ones are, has neither names for them nor the call in `os`.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 0x0001, 0x0002
# Linux 6.3; sites may refuse anonymous files without it (sysctl vm.memfd_noexec).
_MFD_NOEXEC_SEAL = 0x0008
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing


class SegmentError(SlurmExtError):
    """Memory cannot be shared; the ranks agree by messages instead."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Where rank 0's memory is, as told to the other ranks."""

    pid: int
    fd: int
    device: int
    inode: int
    token: str
    bytes_: int


class Segment:
    """One mapping, and the lock that says that this rank is alive. Raises OSError."""

    def __init__(self, fd: int, bytes_: int, rank: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, _HEADER_BYTES + bytes_)
        self._whole = memoryview(self._map)
        self.memory = self._whole[_HEADER_BYTES:]
        # After the mapping, which has a descriptor of its own.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def alive(self, rank: int) -> bool:
        """Whether a peer holds its lock. Not to be asked about this rank itself."""
        try:
            # Shared, so that two ranks which look at the same time do not see each other.
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            # Held; or an error that tells nothing about the peer: the wait has its limit anyway.
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return False

    def close(self) -> None:
        """Unmap, and give up the lock: for the others this rank is gone."""
        self.memory.release()
        self._whole.release()
        self._map.close()
        os.close(self._fd)


def create(bytes_: int) -> tuple[Segment, Offer]:
    """Rank 0's part. Raises SegmentError where this machine has no such memory."""
    if not _WHOLE_WORDS:
        raise SegmentError("no memory to share on rank 0: this is no 64-bit Python")
    fd = _anonymous_file()
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, _HEADER_BYTES + bytes_)
        os.pwrite(fd, token, 0)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        found = os.fstat(fd)
        segment = Segment(fd, bytes_, 0)
    except OSError as exc:
        os.close(fd)
        raise SegmentError(f"no memory to share on rank 0: {exc.strerror}") from exc
    offer = Offer(os.getpid(), fd, found.st_dev, found.st_ino, token.hex(), bytes_)
    return segment, offer


def join(offer: Offer, rank: int) -> Segment:
    """Another rank's part. Raises SegmentError where this is not what rank 0 has made."""
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    try:
        # Looked at before it is opened: under another /proc it may be a device or a pipe.
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{_NAME}"):
            raise SegmentError(f"{path} is {target} here, and not rank 0's memory")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise SegmentError(f"{path}, rank 0's memory: {exc.strerror}") from exc
    try:
        _check(fd, path, offer)
        return Segment(fd, offer.bytes_, rank)
    except OSError as exc:
        os.close(fd)
        raise SegmentError(f"{path}, rank 0's memory: {exc.strerror}") from exc
    except SegmentError:
        os.close(fd)
        raise


def _anonymous_file() -> int:
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    make: Callable[[str, int], int] = getattr(os, "memfd_create", _by_c_library)
    try:
        try:
            return make(_NAME, flags | _MFD_NOEXEC_SEAL)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return make(_NAME, flags)
    except OSError as exc:
        raise SegmentError(f"no memory to share on rank 0: {exc.strerror}") from exc


def _by_c_library(name: str, flags: int) -> int:
    try:
        call = ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError as exc:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from exc
    fd = int(call(name.encode(), flags))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


def _check(fd: int, path: str, offer: Offer) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise SegmentError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if (found.st_dev, found.st_ino) != (offer.device, offer.inode):
        raise SegmentError(f"{path} is another file than the one that rank 0 has made")
    if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        raise SegmentError(f"{path} is not sealed: it could be truncated under its readers")
    if found.st_size != _HEADER_BYTES + offer.bytes_:
        raise SegmentError(f"{path} has {found.st_size} bytes, not the announced number")
    if not secrets.compare_digest(os.pread(fd, _TOKEN_BYTES, 0).hex(), offer.token):
        raise SegmentError(f"{path} does not hold the token that rank 0 has announced")

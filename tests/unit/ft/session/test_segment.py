"""Memory that ranks share: only the very file that was announced, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ft.session.comms import segment
from slurm_ft.session.comms.segment import Offer, Segment, SegmentError, create, join

BYTES = 256
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def made() -> Iterator[tuple[Segment, Offer]]:
    made = create(BYTES)
    yield made
    made[0].close()


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # that of the listing itself
    return [target for target in found if "slurm-ft-ranks" in target]


def in_child(function: Callable[[], object]) -> int:
    """Exit code of a forked process that calls it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_one_rank_writes_the_other_reads(made: tuple[Segment, Offer]) -> None:
    mine, offer = made

    def other() -> None:
        theirs = join(offer, 1)
        assert bytes(theirs.memory) == bytes(BYTES)
        theirs.memory[3] = 42
        theirs.close()

    assert in_child(other) == 0
    assert mine.memory[3] == 42


def test_closed_it_leaves_neither_file_nor_descriptor() -> None:
    mine, offer = create(BYTES)
    theirs = join(offer, 1)
    assert len(open_files()) == 4  # each has its own, and that of the mapping
    assert all(target.startswith("/memfd:") for target in open_files()), "a name in a directory"
    theirs.close()
    mine.close()
    assert open_files() == []


def forged(made: tuple[Segment, Offer], tmp_path: Path, kind: str) -> tuple[Offer, list[int]]:
    """An announcement that leads to something else, and the descriptors to close after it."""
    _, offer = made
    if kind == "token":
        return replace(offer, token="00" * 32), []
    if kind == "bytes":
        return replace(offer, bytes_=2 * BYTES), []
    if kind == "file":
        fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 4096)
    elif kind == "symlink":
        os.symlink(f"/proc/self/fd/{offer.fd}", tmp_path / "link")
        fd = os.open(tmp_path / "link", os.O_PATH | os.O_NOFOLLOW)
    elif kind == "device":
        fd = os.open("/dev/zero", os.O_RDWR)
    else:
        fd = os.memfd_create("slurm-ft-ranks", os.MFD_ALLOW_SEALING)
        os.write(fd, bytes.fromhex(offer.token).ljust(64, b"\0") + bytes(BYTES))
        if kind != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        if kind == "owner":
            os.fchown(fd, 65534, -1)
    found = os.fstat(fd)
    told = replace(offer, fd=fd)
    if kind != "inode":
        told = replace(told, device=found.st_dev, inode=found.st_ino)
    return told, [fd]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("token", "does not hold the token"),
        ("bytes", "not the announced number"),
        ("file", "not rank 0's memory"),
        ("symlink", "not rank 0's memory"),
        ("device", "not rank 0's memory"),
        ("inode", "another file"),
        ("unsealed", "not sealed"),
        ("owner", "belongs to user 65534"),
    ],
)
def test_anything_but_what_was_announced_is_refused(
    made: tuple[Segment, Offer], tmp_path: Path, kind: str, words: str
) -> None:
    if kind == "owner" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    told, fds = forged(made, tmp_path, kind)
    before = len(open_files())
    with pytest.raises(SegmentError, match=words):
        join(told, 1)
    assert len(open_files()) == before
    for fd in fds:
        os.close(fd)


def test_the_forgery_of_these_tests_is_accepted_where_it_is_perfect(
    made: tuple[Segment, Offer], tmp_path: Path
) -> None:
    """Or the refusals above would prove nothing."""
    told, (fd,) = forged(made, tmp_path, "none")
    join(told, 1).close()
    os.close(fd)


def test_a_process_that_is_gone_or_not_seen_is_refused(made: tuple[Segment, Offer]) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(SegmentError, match="No such file"):
        join(replace(made[1], pid=pid), 1)


def test_nobody_can_truncate_it_under_its_readers(made: tuple[Segment, Offer]) -> None:
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/{made[1].pid}/fd/{made[1].fd}", 0)


def test_an_older_kernel_makes_it_without_the_newer_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.memfd_create, []

    def older(name: str, flags: int) -> int:
        asked.append(flags)
        if flags & 0x0008:
            raise OSError(22, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(segment.os, "memfd_create", older)
    create(BYTES)[0].close()
    assert len(asked) == 2


def test_a_python_built_for_an_older_c_library_asks_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(segment.os, "memfd_create")
    mine, offer = create(BYTES)
    theirs = join(offer, 1)
    theirs.memory[5] = 7
    assert mine.memory[5] == 7
    theirs.close()
    mine.close()
    with pytest.raises(OSError, match="Invalid argument"):
        segment._by_c_library("x", 1 << 20)


def test_a_machine_without_such_memory_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(segment.os, "memfd_create", refuse)
    with pytest.raises(SegmentError, match="rank 0: Function not implemented"):
        create(BYTES)


def test_where_words_are_moved_in_halves_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_WHOLE_WORDS", False)
    with pytest.raises(SegmentError, match="no 64-bit Python"):
        create(BYTES)


def test_a_peer_is_alive_until_its_process_ends_and_no_longer(
    made: tuple[Segment, Offer],
) -> None:
    """Whatever its forked children do: a worker that ends does not end the rank, nor keeps it."""
    mine, offer = made
    ready, told = os.pipe()
    gate, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _be_a_peer_with_workers(offer, told, gate, go)
        finally:
            os._exit(99)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    assert mine.alive(1)
    assert mine.alive(1), "looking must not take the lock away"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not mine.alive(1)
    for fd in (ready, gate, go):  # the last ends the worker
        os.close(fd)


def _be_a_peer_with_workers(offer: Offer, told: int, gate: int, go: int) -> None:
    held = join(offer, 1)
    if os.fork() == 0:
        held.close()  # a worker that ends in order
        os._exit(0)
    os.wait()
    if os.fork() == 0:
        os.close(go)
        os.write(told, b"x")
        os.read(gate, 1)  # one that outlives its parent
        os._exit(0)
    os.close(told)
    signal.pause()

"""Handlers: a flag and nothing else, others' handlers called and put back, children left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from slurm_ft.session.signals import SignalWatch


@pytest.fixture
def watched() -> Iterator[tuple[SignalWatch, list[int]]]:
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM)}
    watch = SignalWatch((signal.SIGUSR2, signal.SIGTERM), noted.append)
    yield watch, noted
    watch.restore()
    watch.close()
    for number, handler in before.items():
        signal.signal(number, handler)


Watched = tuple[SignalWatch, list[int]]


def test_a_signal_is_heard_twice_by_two_ways(watched: Watched) -> None:
    watch, noted = watched
    assert watch.install()
    signal.raise_signal(signal.SIGTERM)
    assert noted == [signal.SIGTERM]
    assert watch.take() == [signal.SIGTERM]
    assert watch.take() == []


def test_waking_up_is_no_signal(watched: Watched) -> None:
    watch, _ = watched
    watch.install()
    watch.wake()
    assert watch.take() == []


def test_the_programs_own_handler_is_called_and_put_back(watched: Watched) -> None:
    watch, noted = watched
    own: list[int] = []

    def handler(number: int, frame: object) -> None:
        own.append(number)

    signal.signal(signal.SIGUSR2, handler)
    watch.install()
    signal.raise_signal(signal.SIGUSR2)
    assert (noted, own) == ([signal.SIGUSR2], [signal.SIGUSR2])
    watch.restore()
    assert signal.getsignal(signal.SIGUSR2) is handler
    signal.raise_signal(signal.SIGUSR2)
    assert (noted, own) == ([signal.SIGUSR2], [signal.SIGUSR2] * 2)


def test_a_handler_that_the_program_installs_later_stays(watched: Watched) -> None:
    watch, _ = watched
    watch.install()
    later = signal.SIG_IGN
    signal.signal(signal.SIGUSR2, later)
    watch.restore()
    assert signal.getsignal(signal.SIGUSR2) == later


def test_whoever_listened_before_still_hears(watched: Watched) -> None:
    """An event loop's wake-up descriptor gets its bytes, and gets its place back."""
    watch, _ = watched
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        signal.set_wakeup_fd(theirs.fileno())
        try:
            watch.install()
            signal.raise_signal(signal.SIGUSR2)
            watch.wake()
            assert watch.take() == [signal.SIGUSR2]
            assert ours.recv(16) == bytes([signal.SIGUSR2])
            watch.restore()
            assert signal.set_wakeup_fd(-1) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(-1)


def test_only_the_main_thread_can_install(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watch, _ = watched
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(watch.install()), name="worker-7")
    thread.start()
    thread.join()
    assert installed == [False]
    assert "worker-7" in caplog.text
    assert "main thread" in caplog.text


def child_that_gets(number: int) -> int:
    """Fork a helper as a data loader does, signal it, and tell how it ended."""
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready_write, b"x")
        time.sleep(0.5)  # the signal comes in here, or ends it
        os._exit(0)
    os.close(ready_write)
    os.read(ready_read, 1)
    os.close(ready_read)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_helper_ends_at_term_and_survives_the_others(watched: Watched) -> None:
    """A pool ends its workers by TERM; USR2 to the process group must not kill a data loader."""
    watch, noted = watched
    watch.install()
    assert child_that_gets(signal.SIGTERM) == -signal.SIGTERM
    assert child_that_gets(signal.SIGUSR2) == 0
    assert noted == []
    assert watch.take() == []
    # And this process still listens.
    signal.raise_signal(signal.SIGUSR2)
    assert noted == [signal.SIGUSR2]


def wait_for_word(connection: object) -> None:
    """A worker: says that it runs, and ends well when it is told to."""
    connection.send("here")  # type: ignore[attr-defined]
    connection.recv()  # type: ignore[attr-defined]


def test_a_worker_outlives_a_term_that_is_not_its_parents(watched: Watched) -> None:
    """sig-term-only: Slurm's TERM reaches data loaders too, whose death would fail the trainer."""
    watch, _ = watched
    watch.install()
    context = multiprocessing.get_context("fork")
    workers = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        worker = context.Process(target=wait_for_word, args=(theirs,))
        worker.start()
        assert ours.recv() == "here"
        workers.append((worker, ours))
    (told, tell), (ended, _) = workers
    # From a process that is not the parent, as slurmstepd and ft-run are not.
    stranger = os.fork()
    if stranger == 0:
        for worker, _ in workers:
            os.kill(worker.pid or 0, signal.SIGTERM)
        os._exit(0)
    assert os.waitpid(stranger, 0)[1] == 0
    tell.send("end")
    told.join(5.0)
    assert told.exitcode == 0
    assert ended.is_alive()
    ended.terminate()  # a pool's own way to end it
    ended.join(5.0)
    assert ended.exitcode == -signal.SIGTERM

"""A thread for what all ranks do together beside training, one job after the other.

Every rank gives the same jobs in the same order, so their exchanges meet; they use a communicator
and a process group that training does not. After a job that failed the later ones fail as it did:
what they build on is not there. The thread never keeps the process alive: a rank that
leaves because a peer is gone must not wait here for that peer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """Something that the thread does, and its outcome."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._over = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def result(self, limit_s: float | None = None) -> T:
        """Its outcome; raises what it raised, or TimeoutError past the limit."""
        if not self._over.wait(limit_s):
            raise TimeoutError(f"not over within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def run(self, failed: BaseException | None = None) -> BaseException | None:
        """In the thread; the error it ended with."""
        try:
            if failed is not None:
                raise failed
            self._value = self._work()
        except BaseException as exc:  # handed over to whoever asks for the result
            self._error = exc
        finally:
            self._over.set()
        return self._error


class Beside:
    """The thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._given: list[Job[Any]] = []
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> Job[T]:
        """Give it a job."""
        job = Job(work)
        self._given.append(job)
        self._jobs.put(job)
        return job

    def check(self) -> None:
        """Raise what a job that is over has raised."""
        over = [job for job in self._given if job.done()]
        self._given = [job for job in self._given if job not in over]
        for job in over:
            job.result()

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for all jobs so far, and raise what the first that failed has raised."""
        given, self._given = self._given, []
        for job in given:
            job.result(limit_s)

    def _loop(self) -> None:
        failed: BaseException | None = None
        while (job := self._jobs.get()) is not None:
            failed = job.run(failed)

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

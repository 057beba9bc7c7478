"""A thread for what all ranks do together beside training, one job after the other.

Every rank gives the same jobs in the same order, so their exchanges meet; they use a communicator
and a process group that training does not. After a job that failed the later ones fail as it did:
what they build on is not there. The thread never keeps the process alive: a rank that
leaves because a peer is gone must not wait here for that peer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from slurm_ext.domain.errors import SlurmExtError

T = TypeVar("T")

# A first step, a save of everything: what the thread may wait for, and be waited for, before
# somebody gives up.
LIMIT_S = 1800.0


class LateError(SlurmExtError):
    """Something that is done beside training was not over in time."""

    def __init__(self, what: str, limit_s: float) -> None:
        super().__init__(
            f"{what}: not over within {limit_s:g} s beside training: look for a file system that"
            " does not answer, or for a rank that stands still"
        )


class Job(Generic[T]):
    """Something that the thread does, and its outcome. ``what`` names it in errors."""

    def __init__(self, work: Callable[[], T], what: str) -> None:
        self._work = work
        self.what = what
        self._over = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def well(self) -> bool:
        """Whether it is over and `result` raises nothing."""
        return self._over.is_set() and self._error is None

    def wait(self, limit_s: float) -> bool:
        """Wait until it is over; False past the limit."""
        return self._over.wait(limit_s)

    def result(self, limit_s: float = LIMIT_S) -> T:
        """Its outcome; raises what it raised, or LateError past the limit."""
        if not self._over.wait(limit_s):
            raise LateError(self.what, limit_s)
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
            del self._work
            self._over.set()
        return self._error


class Beside:
    """The thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._given: list[Job[Any]] = []
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T], what: str) -> Job[T]:
        """Give it a job; ``what`` names it in errors."""
        job = Job(work, what)
        # What is over holds a task's memory: it must not pile up over a long chain.
        self._given = [*(each for each in self._given if not each.done()), job]
        self._jobs.put(job)
        return job

    @property
    def failed(self) -> BaseException | None:
        """What the first job that failed has raised. Not for raising at once: the other ranks
        hear of the same failure a moment earlier or later, in the middle of an exchange."""
        return self._failed

    def idle(self, limit_s: float) -> bool:
        """Wait until all jobs so far are over, well or not; False past the limit."""
        until = time.monotonic() + limit_s
        self._given = [job for job in self._given if not job.done()]
        return all(job.wait(max(0.0, until - time.monotonic())) for job in self._given)

    def finish(self, limit_s: float) -> None:
        """Wait for all jobs so far, and raise what the first that failed has raised."""
        if not self.idle(limit_s):
            raise LateError(", ".join(job.what for job in self._given if not job.done()), limit_s)
        if self._failed is not None:
            raise self._failed

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._failed = job.run(self._failed)

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

"""The thread that hears signals while the main thread computes, and that gives up in its place.

It never ends a run that nobody asked to leave, however slow: only after leaving was asked for it
watches two limits. The grace: a little before Slurm would kill the job, what is known is recorded
and the rank ends, so that ft-run can still requeue. The rank itself: one that has come to no safe
point for much longer than its steps take sits in a collective whose peer is gone.

What to do at which moment is decided by `verdict`, a pure function; the thread only looks at the
clock and carries it out.
"""

from __future__ import annotations

import logging
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from slurm_ft import status
from slurm_ft.session.signals import SignalWatch

# srun, slurmstepd and ft-run may each deliver the same signal: within this time they are one.
ONE_WAKE_S = 2.0
# After a second signal SIGKILL follows within Slurm's KillWait, 30 s by default.
SECOND_SIGNAL_S = 20.0
# A rank is stuck after this many of its own steps, or one collective's time-out if that is longer.
STUCK_STEPS = 10
# Time kept from the grace for recording, and for ft-run to ask Slurm.
_RESERVE_SHARE = 0.1
_LONGEST_RESERVE_S = 5.0
_LOOK_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leaving:
    """That leaving was asked for on this rank, and how much time there is. Monotonic seconds."""

    asked_s: float
    why: str
    what: str = ""  # name of the signal, or whatever else asked
    grace_s: float | None = None
    again_s: float | None = None  # when a second signal came

    @property
    def deadline_s(self) -> float | None:
        """When this rank must be gone, ``None`` where nobody said."""
        ends = []
        if self.grace_s is not None:
            reserve_s = min(_LONGEST_RESERVE_S, _RESERVE_SHARE * self.grace_s)
            ends.append(self.asked_s + self.grace_s - reserve_s)
        if self.again_s is not None:
            ends.append(self.again_s + SECOND_SIGNAL_S)
        return min(ends) if ends else None


class Pulse(NamedTuple):
    """The last sign of life of the thread that trains. Monotonic seconds.

    A tuple, and its words put together by those who read them: two are made in every step.
    """

    at_s: float
    where: str
    limit_s: float  # how long it may take until the next one
    step: int | None = None  # the last one that ended

    @property
    def place(self) -> str:
        """Where training was seen last."""
        return self.where if self.step is None else f"{self.where} after step {self.step}"


def stuck_limit_s(median_step_s: float | None, collective_timeout_s: float) -> float:
    """How long a rank may go without a safe point before it is taken to be stuck."""
    return max(STUCK_STEPS * (median_step_s or 0.0), collective_timeout_s)


def verdict(now_s: float, leaving: Leaving | None, pulse: Pulse) -> tuple[str, str] | None:
    """Why this rank must give up now, as the status's word and a sentence; ``None`` = it need not.

    >>> verdict(1e9, None, Pulse(0.0, "step 3", 10.0))
    """
    if leaving is None:
        return None
    deadline_s = leaving.deadline_s
    since_s = now_s - pulse.at_s
    # A long step before anybody asked is the program's own affair.
    waited_s = min(since_s, now_s - leaving.asked_s)
    if deadline_s is not None and now_s >= deadline_s:
        return (
            status.GRACE_OVER,
            f"{leaving.what or leaving.why} came {now_s - leaving.asked_s:.1f} s ago and the time"
            f" to leave is over; last seen {since_s:.1f} s ago in {pulse.place}",
        )
    if waited_s > pulse.limit_s:
        return (
            status.STUCK,
            f"no safe point for {waited_s:.1f} s since leaving was asked for (limit"
            f" {pulse.limit_s:.1f} s); last seen in {pulse.place}",
        )
    return None


def asked_again(leaving: Leaving, now_s: float) -> bool:
    """Whether a signal at this moment is a second one and not an echo of the first."""
    return leaving.again_s is None and now_s - leaving.asked_s > ONE_WAKE_S


class Guard:
    """The listener thread. ``heard`` and ``give_up`` are called in it."""

    def __init__(
        self,
        watch: SignalWatch,
        heard: Callable[[int, float], None],
        give_up: Callable[[str, str], None],
        leaving: Callable[[], Leaving | None],
    ) -> None:
        self._watch = watch
        self._heard = heard
        self._give_up = give_up
        self._leaving = leaving
        self._pulse = Pulse(time.monotonic(), "the session's start", float("inf"))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slurm-ft-guard", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it wakes at once, so this takes no time."""
        self._ended.set()
        self._watch.wake()
        self._thread.join(5.0)

    def alive(self, where: str, limit_s: float, step: int | None = None) -> None:
        """A sign of life from the thread that trains. One assignment: no lock is needed."""
        self._pulse = Pulse(time.monotonic(), where, limit_s, step)

    def _run(self) -> None:
        # Signals are for the main thread: blocked here, they never interrupt this one's calls.
        signal.pthread_sigmask(signal.SIG_BLOCK, {*self._watch.numbers, signal.SIGINT})
        while not self._ended.is_set():
            # Without a request to leave there is no clock to watch, and nothing to wake up for.
            timeout_s = None if self._leaving() is None else _LOOK_S
            select.select([self._watch.read_end], [], [], timeout_s)
            now_s = time.monotonic()
            for number in self._watch.take():
                self._heard(number, now_s)
            if self._ended.is_set():
                return
            why = verdict(now_s, self._leaving(), self._pulse)
            if why is not None:
                self._give_up(*why)
                return

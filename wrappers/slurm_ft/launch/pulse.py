"""Signs of life of the ft-run that leads, and who takes its place when they stop.

Rank 0's ft-run may be killed (by the kernel, out of memory, or by a person), and then nobody would
requeue the job. The ft-runs of the other ranks cannot ask whether it lives: they share a directory,
no process table. So the leader touches a file as long as it runs, also while it waits for a
controller that is away, and a follower that has something to wait for looks whether the file still
changes. When it does not, the lowest rank that is left begins to lead.

The choice a reader would question: times are never compared between nodes, whose clocks differ.
What counts is for how long, by the follower's own clock, nothing has changed, and not even that
while the follower itself was stopped.
"""

from __future__ import annotations

import _thread
import time

from slurm_ft.launch.marks import MOST_TERMS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_ft.launch.marks import Marks

BEAT_S = 5.0
# Five beats: a file server that stumbles, or caches for some seconds, is no death.
SILENCE_S = 25.0
# Between one rank's turn and the next one's, so that most never try.
STAGGER_S = 3.0
# Ranks beyond this have their turn together; only one of them can claim the term.
_MOST_TURNS = 10
# A follower that has not looked for so long was stopped, and so was the leader, perhaps.
_STOPPED_S = 10.0


class Pulse:
    """The leader's side."""

    __slots__ = ("_marks", "_term")

    def __init__(self, marks: Marks, term: int = 0) -> None:
        self._marks = marks
        self._term = term

    def beat(self) -> None:
        """One sign of life."""
        self._marks.beat(self._term)

    def keep(self) -> Callable[[], None]:
        """Beat from a thread while this one waits for Slurm; returns what ends that.

        A signal that somebody waits for must be blocked by now: the thread inherits the mask.
        """
        over = _thread.allocate_lock()
        over.acquire()

        def run() -> None:
            self.beat()
            while not over.acquire(timeout=BEAT_S):
                self.beat()

        _thread.start_new_thread(run, ())
        return over.release


class Watch:
    """A follower's side: to be asked again and again while it waits."""

    __slots__ = ("_clock", "_looked_s", "_marks", "_seen", "_since_s", "_turn_s")

    def __init__(
        self, marks: Marks, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._marks = marks
        self._clock = clock
        self._turn_s = SILENCE_S + STAGGER_S * min(max(0, rank - 1), _MOST_TURNS)
        self._seen: tuple[int, int | None] | None = None
        self._since_s = self._looked_s = clock()

    def turn(self) -> int | None:
        """The term in which this rank is to lead now; ``None`` while it has to wait."""
        seen, now = self._marks.last_beat(), self._clock()
        if seen != self._seen or now - self._looked_s > _STOPPED_S:
            self._seen, self._since_s = seen, now
        self._looked_s = now
        term = seen[0] + 1
        return term if term < MOST_TERMS and now - self._since_s >= self._turn_s else None

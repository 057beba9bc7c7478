"""Runs a machine against a store and a clock: reads, feeds, writes, counts time.

It knows neither threads nor sleeping: `poll` does one round and returns what the caller has to do
(release, restore, step, exit, tell). The same code runs under a real clock and under the virtual
one of the tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

from slurm_ft.pause.limits import Limits
from slurm_ft.pause.protocol import (
    Arm,
    Board,
    Effect,
    Event,
    Lost,
    Read,
    Request,
    S,
    Timer,
    Turn,
    Write,
)
from slurm_ft.pause.table import Store, StoreLostError

_log = logging.getLogger(__name__)

# A store is lost only after so many failures in a row: a process that was stopped for long finds
# its time used up at its first try.
_LEAST_FAILURES = 3


class Drive(Generic[S]):
    """One machine in one epoch."""

    def __init__(
        self,
        state: S,
        rule: Callable[[S, Event], Turn[S]],
        *,
        epoch: int,
        limits: Limits,
        store: Store,
        clock: Callable[[], float],
    ) -> None:
        self.state = state
        self.board = Board()
        self._rule = rule
        self._epoch = epoch
        self._limits = limits
        self._store = store
        self._clock = clock
        self._request: Request | None = None
        self._deadline: float | None = None
        self._failing_since: float | None = None
        self._failures = 0

    def feed(self, event: Event) -> list[Effect]:
        """Let something happen; returns what is left for the caller to do."""
        turn = self._rule(self.state, event)
        self.state = turn.state
        left: list[Effect] = []
        for effect in turn.effects:
            match effect:
                case Write(key, value):
                    if isinstance(value, Request):
                        self._request = value
                    try:
                        self._store.write(self._epoch, key, value)
                    except StoreLostError as exc:
                        # The next reading tells whether it arrived; if not, it is written again.
                        _log.debug("pause %d: %s not written: %s", self._epoch, key, exc)
                case Arm(limit):
                    self._deadline = self._clock() + self._limits.seconds(limit, self._request)
                case _:
                    left.append(effect)
        return left

    def poll(self, wait_s: float = 0.0) -> list[Effect]:
        """One round: read (waiting up to ``wait_s`` for news), then judge the time."""
        began = self._clock()
        try:
            if wait_s > 0:
                self.board = self._store.wait(self._epoch, self.board, self._within(wait_s))
            else:
                self.board = self._store.read(self._epoch)
        except StoreLostError as exc:
            return self._failed(began, exc)
        self._failing_since = None
        self._failures = 0
        self._request = self._request or self.board.request
        late = self._deadline is not None and self._clock() >= self._deadline
        left = self.feed(Read(self.board))
        if late and not left and self._deadline is not None and self._clock() >= self._deadline:
            self._deadline = None
            left = self.feed(Timer())
            # A machine that has no other chance acts on the reading that it has.
            left += self.feed(Read(self.board))
        return left

    @property
    def deadline(self) -> float | None:
        """When time may have something to say."""
        return self._deadline

    def _within(self, wait_s: float) -> float:
        if self._deadline is None:
            return wait_s
        return max(0.0, min(wait_s, self._deadline - self._clock()))

    def _failed(self, began: float, exc: StoreLostError) -> list[Effect]:
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = began
            _log.warning("pause %d: %s", self._epoch, exc)
        lost_s = self._clock() - self._failing_since
        if self._failures < _LEAST_FAILURES or lost_s < self._limits.lost_s:
            return []
        return self.feed(Lost())

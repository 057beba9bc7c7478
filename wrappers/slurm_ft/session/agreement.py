"""What all ranks do at the next safe point, agreed on by one maximum that costs next to nothing.

Every rank says what it wants as one whole number, and the largest holds for all. The maximum is
begun at one safe point and read at the next, so that it travels while the ranks compute; whoever
reads it reads the same number at the same step, and acts on it there. What a rank wanted and did
not get, because something larger was agreed on, it wants again.

How often this is done is agreed on as well: with steps of milliseconds every k-th safe point is
enough; with steps of a second and more, the result is waited for at once, since a round trip is
nothing against such a step and a whole step is much of a short grace.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import IntEnum

from slurm_ft.comm import ExchangeLostError, Maxima, PendingMax

# Bits below the kind, for what goes with it: a pause's epoch, a cadence. With 7 bits for the kind
# a number fits a word of `slurm_ft.session.comms.board`.
_PAYLOAD_BITS = 48
MAX_PAYLOAD = (1 << _PAYLOAD_BITS) - 1
# An exchange this seldom costs nothing whatever the transport, and is soon enough for a signal.
SHORTEST_ROUND_S = 0.025
# From this length of a step on, its result is read in the same step.
_LONG_STEP_S = 0.5
# A loop may begin with steps that do nothing, e.g. to skip data it has seen: not too long blind.
MOST_STEPS_A_ROUND = 10


class Kind(IntEnum):
    """What can be agreed on; the larger number wins."""

    NOTHING = 0
    CADENCE = 1  # payload: 0 = read at once, k = every k-th safe point
    REPORT = 2  # ranks tell rank 0 how long they computed
    SAVE = 3
    PAUSE = 4  # payload: epoch
    FAIL = 5  # what some rank does beside training has failed: all raise at the same step
    LEAVE = 6


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do now."""

    kind: Kind
    payload: int = 0


NOTHING = Agreed(Kind.NOTHING)


def pack(kind: Kind, payload: int = 0) -> int:
    """One number whose order is that of the kinds, then of the payloads."""
    if not 0 <= payload <= MAX_PAYLOAD:
        raise ValueError(f"payload={payload} is outside 0..{MAX_PAYLOAD}")
    return (int(kind) << _PAYLOAD_BITS) | payload


def unpack(value: int) -> Agreed:
    """The other way. Raises ExchangeLostError for what no rank of this release would say."""
    try:
        return Agreed(Kind(value >> _PAYLOAD_BITS), value & MAX_PAYLOAD)
    except ValueError as exc:
        raise ExchangeLostError(
            f"ranks agreed on {value:#x}, which is nothing known here: all ranks must run the same"
            " release of slurm-ext"
        ) from exc


def best_cadence(step_s: float) -> int:
    """Every how many safe points to agree, for steps of this length; 0 = read at once."""
    if step_s >= _LONG_STEP_S:
        return 0
    if step_s >= SHORTEST_ROUND_S:
        return 1
    return min(MOST_STEPS_A_ROUND, max(1, round(SHORTEST_ROUND_S / max(step_s, 1e-9))))


def worth_changing(present: int, wanted: int) -> bool:
    """Whether a cadence is wrong by so much that the ranks should change it."""
    if present == wanted:
        return False
    if 0 in (present, wanted):
        return True
    return max(present, wanted) >= 2 * min(present, wanted)


class Agreement:
    """The wishes of this rank and the maximum under way.

    `want` and `wants` may be called from any thread; everything else belongs to the thread that
    trains.
    """

    def __init__(self, maxima: Maxima) -> None:
        self._maxima = maxima
        self._lock = threading.Lock()
        self._wishes: dict[Kind, int] = {}
        self._pending: PendingMax | None = None
        self._busy: PendingMax | None = None
        self._every = 1
        self._calls = 0
        self._in_round = False

    @property
    def every(self) -> int:
        """The cadence: 0 = each safe point, read at once; k = each k-th, read at the next."""
        return self._every

    def want(self, kind: Kind, payload: int = 0) -> None:
        """Ask for something at the next safe points, until all ranks do it."""
        pack(kind, payload)
        with self._lock:
            self._wishes[kind] = max(payload, self._wishes.get(kind, 0))

    def wants(self, kind: Kind) -> bool:
        """Whether this rank still waits for it."""
        with self._lock:
            return kind in self._wishes

    def forget(self, kind: Kind) -> None:
        """Stop asking; what is under way already may still be agreed on."""
        with self._lock:
            self._wishes.pop(kind, None)

    @property
    def in_round(self) -> bool:
        """Whether the last safe point was one at which ranks exchanged something."""
        return self._in_round

    def close(self) -> None:
        """Free what the maxima are made with; waits for nobody."""
        self._maxima.close()

    def safe_point(self, limit_s: float | None = None) -> Agreed:
        """Called by every rank at the same steps; what all of them do now.

        After an answer other than NOTHING no maximum is under way: the caller does what was
        agreed on, with exchanges of its own, and the next safe point begins anew.
        """
        self._calls += 1
        self._in_round = self._every <= 1 or self._calls % self._every == 0
        if not self._in_round:
            return NOTHING
        if self._every == 0:
            return self._take(self._maxima.start_max(self._wish()), limit_s)
        pending, self._pending = self._pending, None
        if pending is not None:
            agreed = self._take(pending, limit_s)
            if agreed is not NOTHING:
                return agreed
        self._pending = self._maxima.start_max(self._wish())
        return NOTHING

    def all_done(self, done: bool, limit_s: float | None = None) -> bool:
        """Whether every rank said ``done`` at the round before; called by all in the same rounds.

        A second maximum, made only while something is under way that each rank ends by itself:
        one maximum tells that some rank wants something, not that all do.
        """
        busy, self._busy = self._busy, None
        if busy is not None and busy.result(limit_s) == 0:
            return True
        self._busy = self._maxima.start_max(0 if done else 1)
        return False

    def drain(self, limit_s: float | None = None) -> Agreed:
        """End what is under way, if anything: before the ranks part, or do something together."""
        self.drain_done(limit_s)
        pending, self._pending = self._pending, None
        return NOTHING if pending is None else self._take(pending, limit_s)

    def drain_done(self, limit_s: float | None = None) -> None:
        """End what `all_done` has begun: what it asks about was ended in another way."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.result(limit_s)

    def _take(self, pending: PendingMax, limit_s: float | None) -> Agreed:
        value = pending.result(limit_s)
        if value == 0:
            # At nearly every step: what follows would cost more than the exchange.
            return NOTHING
        agreed = unpack(value)
        with self._lock:
            # A wish for more than was agreed on, e.g. a later epoch, stays.
            if self._wishes.get(agreed.kind, -1) <= agreed.payload:
                self._wishes.pop(agreed.kind, None)
        if agreed.kind is Kind.CADENCE:
            self._every = agreed.payload
            # Counted anew from here by every rank, or they would agree at different steps.
            self._calls = 0
        return agreed

    def _wish(self) -> int:
        if not self._wishes:
            # Without the lock: a wish that comes at this moment is told at the next step.
            return 0
        with self._lock:
            if not self._wishes:
                return 0
            kind = max(self._wishes)
            return pack(kind, self._wishes[kind])

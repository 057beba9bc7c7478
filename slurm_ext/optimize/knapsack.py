"""The exact solver: prune by LP price, then dynamic programming over GPUs.

1. The relaxation gives a price p and a bound B, greedy gives a feasible value L (`lp`, `greedy`).
2. Each way to treat an item has a loss: what it gives away against the item's best at price p.
   In any solution the losses, plus p for each idle GPU, add up to B minus its value.  So solutions
   within a slack s of B use no way whose loss exceeds s, and a partial solution whose losses exceed
   s leads to none.  Both are dropped; equality is kept.
3. Items with one way left are settled.  The others are counted from their smallest remaining way,
   and the recurrence runs over the GPUs that are then left, from the last item to the first, so
   that walking back from the first item meets the tie-break of `problem`.

The slack B - L surely holds an optimum, but greedy is often far from it.  So a slack that leaves
few ways is tried first: a solution found within it is optimal, whatever was dropped, and no other
optimum was lost.  If there is none the slack grows, never beyond that of the best solution known.

The recurrence minimises the loss rather than maximising the value: then "too bad to matter" is one
comparison with the slack.  All arithmetic is in 64-bit integers.  `recurrence` holds the plain
recurrence that checks this one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slurm_ext.optimize.columns import Columns, Ints, columns
from slurm_ext.optimize.greedy import IDLE, greedy_rows, row_units, to_chosen
from slurm_ext.optimize.lp import Relaxation, hull_steps, relax
from slurm_ext.optimize.problem import Problem, Solution, value_of

# The loss of "this number of GPUs cannot be reached": above any sum of losses that matters
# (< 2**61), low enough that adding losses to it does not overflow.
_UNREACHABLE = 2**62

# States (8 bytes each) kept for the walk back.  Beyond this only every sqrt(members)-th stage is
# kept and the rest computed a second time; if that is still too much the solver gives up.
_MAX_STATES = 32_000_000

# Looking for the ends of the useful window costs about as much as treating this many states.
_TRIM_FROM = 256

# The first slack tried leaves about this many ways beside each item's best, and grows by this
# factor.  Measured on 320 jobs x 64 GPUs: 20 to 100 ways and factors 3 to 10 hardly differ.
_FIRST_WAYS = 48
_GROWTH = 4


class KnapsackLimitError(Exception):
    """The exact solver gives up: out of time, or the capacity is too large for it."""


class _Way(NamedTuple):
    """One remaining way to treat a member: GPUs above its smallest way, and the loss."""

    row: int
    gpus: int
    loss: int


@dataclass(frozen=True, slots=True)
class _Core:
    """What pruning left undecided.

    ``base`` is the settled or smallest way of every slot (an item that has rows).  ``slots`` are
    the members, in item order; ``ways`` their ways in the order of the tie-break.  ``capacity`` is
    what all bases leave, negative when already they do not fit.
    """

    base: Ints
    slots: list[int]
    ways: list[list[_Way]]
    capacity: int
    slack: int
    price: int


@dataclass(frozen=True, slots=True)
class _Stage:
    """Least loss of the members from one on, per number of GPUs they use, from ``low`` upwards."""

    low: int
    loss: Ints

    def at(self, gpus: int) -> int:
        index = gpus - self.low
        return int(self.loss[index]) if 0 <= index < self.loss.size else _UNREACHABLE


def solve_exact(
    problem: Problem,
    time_limit_s: float = float("inf"),
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """The optimum; raises `KnapsackLimitError` when it cannot be had in time or memory."""
    begin = clock()
    deadline = begin + time_limit_s
    cols = columns(problem)
    steps = hull_steps(cols)
    relaxation = relax(cols, steps)
    chosen = greedy_rows(cols, steps)
    rows, members = _search(cols, relaxation, chosen, deadline, clock)
    picked = to_chosen(problem, cols, rows)
    value = value_of(problem.items, picked)
    return Solution(
        chosen=picked,
        value=value,
        optimal=True,
        gap=0.0,
        bound=value,
        solver="knapsack",
        time_s=clock() - begin,
        note=f"{members} of {len(problem.items)} items left by pruning",
    )


def _search(
    cols: Columns,
    relaxation: Relaxation,
    chosen: Ints,
    deadline: float,
    clock: Callable[[], float],
) -> tuple[Ints, int]:
    """The optimum's rows, and how many items pruning left undecided in the last round."""
    most = relaxation.bound - row_units(cols, chosen)
    slack = min(most, _first_slack(relaxation))
    while True:
        core = _prune(cols, relaxation, slack)
        found = _recur(core, deadline, clock) if core.capacity >= 0 else None
        if found is not None:
            loss = relaxation.bound - row_units(cols, found)
            if loss <= slack:
                return found, len(core.slots)
            most = min(most, loss)
        slack = min(most, max(1, slack * _GROWTH))


def _first_slack(relaxation: Relaxation) -> int:
    losses = np.concatenate((relaxation.loss, relaxation.idle_loss))
    keep = relaxation.idle_loss.size + _FIRST_WAYS
    if keep >= losses.size:
        return int(losses.max(initial=0))
    return int(np.partition(losses, keep)[keep])


def _prune(cols: Columns, relaxation: Relaxation, slack: int) -> _Core:
    idle = relaxation.idle_loss <= slack
    kept = np.flatnonzero(relaxation.loss <= slack)
    slot = np.repeat(np.arange(cols.starts.size), cols.counts)[kept]
    base = np.full(cols.starts.size, IDLE, dtype=np.int64)
    # Backwards, so that the first kept row of a slot (the one with the fewest GPUs) is what stays.
    base[slot[::-1]] = kept[::-1]
    base[idle] = IDLE
    base_gpus = np.where(base == IDLE, 0, cols.gpus[base]) if base.size else base
    left = cols.capacity - int(base_gpus.sum())

    above = (kept != base[slot]) & (cols.gpus[kept] - base_gpus[slot] <= left)
    kept, slot = kept[above], slot[above]
    order = np.lexsort((cols.option[kept], slot))
    kept, slot = kept[order], slot[order]
    ways: dict[int, list[_Way]] = {}
    for at, row, gpus, loss in zip(
        slot.tolist(),
        kept.tolist(),
        (cols.gpus[kept] - base_gpus[slot]).tolist(),
        relaxation.loss[kept].tolist(),
        strict=True,
    ):
        ways.setdefault(at, []).append(_Way(row, gpus, loss))
    for at, above_base in ways.items():
        row = int(base[at])
        if row == IDLE:
            above_base.append(_Way(IDLE, 0, int(relaxation.idle_loss[at])))
        else:
            above_base.append(_Way(row, 0, int(relaxation.loss[row])))
            above_base.sort(key=lambda way: int(cols.option[way.row]))
    return _Core(
        base=base,
        slots=list(ways),
        ways=list(ways.values()),
        capacity=left,
        slack=slack,
        price=relaxation.price,
    )


def _recur(core: _Core, deadline: float, clock: Callable[[], float]) -> Ints | None:
    """Rows of the best solution of the core; ``None`` if pruning left none that fits."""
    rows = core.base.copy()
    if not core.slots:
        return rows
    members, states = len(core.slots), core.capacity + 1
    whole = members * states <= _MAX_STATES
    block = members if whole else math.isqrt(members)
    begins = range(0, members, block)
    if not whole and (len(begins) + block) * states > _MAX_STATES:
        raise KnapsackLimitError(f"{core.capacity} GPUs are too many for the recurrence")

    after = {members: _Stage(0, np.zeros(1, dtype=np.int64))}
    stages: list[_Stage] = []
    for begin in reversed(begins):
        end = min(begin + block, members)
        stages = _stages(core, begin, end, after[end], deadline, clock)
        after[begin] = stages[0]

    first = after[0]
    idle_gpus = core.capacity - first.low - np.arange(first.loss.size)
    best = int((first.loss + core.price * idle_gpus).argmin())
    if first.loss[best] >= _UNREACHABLE:
        return None
    gpus = first.low + best
    for begin in begins:
        end = min(begin + block, members)
        if not whole:
            stages = _stages(core, begin, end, after[end], deadline, clock)
        for k in range(begin, end):
            here = stages[k - begin].at(gpus)
            rest = stages[k - begin + 1]
            way = next(w for w in core.ways[k] if rest.at(gpus - w.gpus) + w.loss == here)
            rows[core.slots[k]] = way.row
            gpus -= way.gpus
    return rows


def _stages(
    core: _Core,
    begin: int,
    end: int,
    after: _Stage,
    deadline: float,
    clock: Callable[[], float],
) -> list[_Stage]:
    """Stages ``begin`` to ``end``, the last being ``after``."""
    stages = [after]
    low, loss = after.low, after.loss
    for k in range(end - 1, begin - 1, -1):
        if clock() > deadline:
            raise KnapsackLimitError("time limit")
        ways = core.ways[k]
        reach = max(way.gpus for way in ways)
        size = min(loss.size + reach, core.capacity + 1 - low)
        best = np.full(size, _UNREACHABLE, dtype=np.int64)
        for way in ways:
            part = best[way.gpus : way.gpus + loss.size]
            np.minimum(part, loss[: part.size] + way.loss, out=part)
        if size >= _TRIM_FROM:
            useful = best <= core.slack
            first = int(useful.argmax())
            low += first
            best = best[first : size - int(useful[::-1].argmax())]
        loss = best
        stages.append(_Stage(low, loss))
    stages.reverse()
    return stages

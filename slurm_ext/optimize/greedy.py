"""Greedy by value per GPU: always feasible, O(n log n), and the start of the exact solver.

Take the hull's steps, best value per GPU first, up to the first that does not fit; then spend the
GPUs left on single changes (a better option of any item), best first.  Against the case where one
big option is worth more than all of that, the best single option is tried as well, which gives the
classic guarantee: at least half of the optimum.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from slurm_ext.optimize.columns import Columns, Ints, columns
from slurm_ext.optimize.lp import Steps, hull_steps, relax
from slurm_ext.optimize.problem import Problem, Solution, relative_gap, value_of

IDLE = -1  # in place of a row: the item is left out


def greedy_rows(cols: Columns, steps: Steps) -> Ints:
    """The chosen row of every item that has rows (in the order of ``starts``), or `IDLE`."""
    chosen = np.full(cols.starts.size, IDLE, dtype=np.int64)
    if cols.rows == 0:
        return chosen
    slot = np.repeat(np.arange(cols.starts.size), cols.counts)
    split = int(np.searchsorted(np.cumsum(steps.gpus), cols.capacity, side="right"))
    prefix = steps.row[:split]
    # Steps of one item come in rising order, so the last write is the item's highest step; numpy
    # assigns in order, and the maximum says so without relying on it.
    np.maximum.at(chosen, slot[prefix], prefix)
    _improve(cols, slot, chosen)
    single = int(cols.units.argmax())
    if cols.units[single] > row_units(cols, chosen):
        chosen[:] = IDLE
        chosen[slot[single]] = single
        _improve(cols, slot, chosen)
    return chosen


def _improve(cols: Columns, slot: Ints, chosen: Ints) -> None:
    """Spend the GPUs left on the best single change until none fits; at most one pass per GPU."""
    served = chosen != IDLE
    has_gpus = np.where(served, cols.gpus[chosen], 0)
    has_units = np.where(served, cols.units[chosen], 0)
    left = cols.capacity - int(has_gpus.sum())
    while left > 0:
        more_units = cols.units - has_units[slot]
        more_units[cols.gpus - has_gpus[slot] > left] = 0
        best = int(more_units.argmax())
        if more_units[best] <= 0:
            break
        at = slot[best]
        left -= int(cols.gpus[best] - has_gpus[at])
        chosen[at], has_gpus[at], has_units[at] = best, cols.gpus[best], cols.units[best]


def row_units(cols: Columns, chosen: Ints) -> int:
    return int(cols.units[chosen[chosen != IDLE]].sum())


def to_chosen(problem: Problem, cols: Columns, chosen: Ints) -> dict[str, int]:
    """Rows back to item keys and option indices."""
    rows = chosen[chosen != IDLE]
    pairs = zip(cols.item[rows].tolist(), cols.option[rows].tolist(), strict=True)
    return {problem.items[item].key: option for item, option in pairs}


def solve_greedy(
    problem: Problem, *, note: str = "", clock: Callable[[], float] = time.perf_counter
) -> Solution:
    begin = clock()
    cols = columns(problem)
    steps = hull_steps(cols)
    chosen_rows = greedy_rows(cols, steps)
    bound_units = relax(cols, steps).bound
    chosen = to_chosen(problem, cols, chosen_rows)
    value = value_of(problem.items, chosen)
    optimal = row_units(cols, chosen_rows) == bound_units
    bound = value if optimal else cols.bound_value(bound_units)
    return Solution(
        chosen=chosen,
        value=value,
        optimal=optimal,
        gap=relative_gap(value, bound),
        bound=bound,
        solver="greedy",
        time_s=clock() - begin,
        note=note,
    )

"""A `Problem` as flat numpy columns, values in exact integers: the form the solvers work on.

Values become 64-bit integers ("units", one power of two for all values) chosen so that the best
options of all items together stay below 2**60.  Sums are then exact: ties are real ties, the
result does not depend on the order of items, and pruning needs no tolerance.  The price is one
rounding of each value, below 2**-59 of the total: finer than what adding the floats would lose.

Only options that can matter are kept: at most ``capacity`` GPUs, worth more than zero, and better
than every option of the same item with as many or fewer GPUs.  What this removes is in no solution
that the tie-break of `problem` would return.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from slurm_ext.optimize.problem import Problem

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# Best options together stay below 2**60; the rest of the 63 bits is head-room for the sum of a
# value and a price times the capacity, and for the "unreachable" mark of the recurrences.
_TOTAL_BITS = 60


@dataclass(frozen=True, slots=True)
class Columns:
    """One row per kept option, sorted by item, then by GPUs (and so by units) ascending.

    ``item`` is the item's index in the problem, ``option`` the option's index in its item;
    ``starts`` lists the row at which each item that has any row begins.  A value is
    ``units * 2**-exponent``.  ``capacity`` is never more than all items together can use.
    """

    capacity: int
    exponent: int
    item: Ints
    option: Ints
    gpus: Ints
    units: Ints
    starts: Ints

    @property
    def rows(self) -> int:
        return int(self.item.size)

    @property
    def counts(self) -> Ints:
        """Rows per item, in the order of ``starts``."""
        return np.diff(self.starts, append=self.rows)

    def bound_value(self, units: int) -> float:
        """An upper bound in units as a float that also covers the rounding of values to units."""
        return math.nextafter(math.ldexp(units + self.starts.size, -self.exponent), math.inf)


def columns(problem: Problem) -> Columns:
    items = problem.items
    counts = np.fromiter((len(item.options) for item in items), np.int64, len(items))
    rows = int(counts.sum())
    flat = list(chain.from_iterable([item.options for item in items]))
    gpus = np.fromiter([option.gpus for option in flat], np.int64, rows)
    value = np.fromiter([option.value for option in flat], np.float64, rows)
    item = np.repeat(np.arange(len(items)), counts)
    option = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)

    keep = (gpus <= problem.capacity) & (value > 0.0)
    if not keep.all():
        item, option, gpus, value = item[keep], option[keep], gpus[keep], value[keep]
    exponent = _unit_exponent(item, value)
    # A value too small for a unit still counts one: a free GPU is better used than left idle.
    units = np.maximum(np.rint(np.ldexp(value, exponent)), 1.0).astype(np.int64)

    if not _is_sorted(item, gpus):
        order = np.lexsort((option, -units, gpus, item))
        item, option, gpus, units = item[order], option[order], gpus[order], units[order]
    keep = units > _best_before(item, units)
    if not keep.all():
        item, option, gpus, units = item[keep], option[keep], gpus[keep], units[keep]

    starts = segment_starts(item)
    most = int(gpus[np.append(starts[1:], item.size) - 1].sum()) if item.size else 0
    return Columns(
        capacity=min(problem.capacity, most),
        exponent=exponent,
        item=item,
        option=option,
        gpus=gpus,
        units=units,
        starts=starts,
    )


def segment_starts(item: Ints) -> Ints:
    """Rows at which a new item begins."""
    if item.size == 0:
        return np.zeros(0, dtype=np.int64)
    return np.append(0, np.flatnonzero(item[1:] != item[:-1]) + 1)


def _unit_exponent(item: Ints, value: Floats) -> int:
    """The power of two by which values are scaled to units."""
    if value.size == 0:
        return 0
    best = np.maximum.reduceat(value, segment_starts(item))
    top_exponent = math.frexp(float(best.max()))[1]
    # Scaled by the largest first, so that the sum neither overflows nor vanishes; fsum, so that
    # the order of items cannot change the result.
    total = math.fsum(np.ldexp(best, -top_exponent).tolist())
    return _TOTAL_BITS - math.frexp(total)[1] - top_exponent


def _is_sorted(item: Ints, gpus: Ints) -> bool:
    """Whether GPUs rise strictly within each item, the order in which counts usually come."""
    return bool(np.all((gpus[1:] > gpus[:-1]) | (item[1:] != item[:-1])))


def _best_before(item: Ints, units: Ints) -> Ints:
    """Per row the most units of an earlier row of its item, 0 if none: a segmented maximum scan."""
    best = np.zeros_like(units)
    best[1:] = np.where(item[1:] == item[:-1], units[:-1], 0)
    step = 1
    while step < item.size:
        same = item[step:] == item[:-step]
        if not same.any():
            break
        best[step:] = np.maximum(best[step:], np.where(same, best[:-step], 0))
        step *= 2
    return best

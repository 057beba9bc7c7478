"""A `Problem` as flat numpy columns, values in exact integers: the form the solvers work on.

Values become 64-bit integers ("units", a power of two per value) chosen so that the best options
of all items together stay below 2**60.  Sums are then exact, so ties are real ties, the result
does not depend on the order of items, and pruning needs no tolerance.  The price is a rounding of
each value by half a unit, 2**-61 of the total: finer than what adding the floats would lose.

Only options that can matter are kept: at most ``capacity`` GPUs, worth at least one unit, and better
than every option of the same item with as many or fewer GPUs.  An option that this removes is in no
solution that the tie-break of `problem` would return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from slurm_ext.optimize.problem import Item, Problem

type Ints = NDArray[np.int64]
type Bools = NDArray[np.bool_]

# Best options together stay below 2**_TOTAL_BITS; the rest of the 63 bits is head-room for sums of
# a value, a price times the capacity, and the "unreachable" mark of the recurrences.
_TOTAL_BITS = 60


@dataclass(frozen=True, slots=True)
class Columns:
    """One row per kept option, sorted by item, then by GPUs (and so by units) ascending.

    ``first[r]`` is the row at which the item of row r begins; ``starts`` lists these rows once per
    item that has any, and ``items`` the item's index in the problem.  ``option`` is the index of
    the row's option in its item.  ``units * 2**-exponent`` is the value.
    """

    capacity: int
    exponent: int
    item_count: int
    item: Ints
    option: Ints
    gpus: Ints
    units: Ints
    starts: Ints

    @property
    def rows(self) -> int:
        return int(self.item.size)

    def to_value(self, units: int) -> float:
        return math.ldexp(units, -self.exponent)

    def bound_value(self, units: int) -> float:
        """An upper bound in units as a float that also covers the rounding of values to units."""
        return math.nextafter(math.ldexp(units + self.item_count, -self.exponent), math.inf)


def unit_exponent(items: Iterable[Item]) -> int:
    """The power of two that scales values to units, from the best option of every item."""
    best = [max((o.value for o in item.options), default=0.0) for item in items]
    top = max(best, default=0.0)
    if top == 0.0:
        return 0
    top_exponent = math.frexp(top)[1]
    # Scaled by the largest first, so that the sum can neither overflow nor vanish.
    total = math.fsum(math.ldexp(value, -top_exponent) for value in best)
    return _TOTAL_BITS - math.frexp(total)[1] - top_exponent


def columns(problem: Problem) -> Columns:
    items = problem.items
    counts = np.fromiter((len(item.options) for item in items), np.int64, len(items))
    rows = int(counts.sum())
    flat = list(chain.from_iterable(item.options for item in items))
    # A count above the capacity may not fit into 64 bits; it is cut off before numpy sees it.
    limit = problem.capacity + 1
    gpus = np.fromiter((o.gpus if o.gpus < limit else limit for o in flat), np.int64, rows)
    value = np.fromiter((o.value for o in flat), np.float64, rows)
    item = np.repeat(np.arange(len(items)), counts)
    option = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)

    exponent = _exponent(value, item, len(items))
    units = np.rint(np.ldexp(value, exponent)).astype(np.int64)
    keep = np.flatnonzero((gpus <= problem.capacity) & (units > 0))
    item, option, gpus, units = item[keep], option[keep], gpus[keep], units[keep]
    if not _is_sorted(item, gpus, units):
        order = np.lexsort((option, -units, gpus, item))
        item, option, gpus, units = item[order], option[order], gpus[order], units[order]

    keep = np.flatnonzero(units > _best_before(item, units))
    item, option, gpus, units = item[keep], option[keep], gpus[keep], units[keep]
    return Columns(
        capacity=problem.capacity,
        exponent=exponent,
        item_count=len(items),
        item=item,
        option=option,
        gpus=gpus,
        units=units,
        starts=segment_starts(item),
    )


def segment_starts(item: Ints) -> Ints:
    """Rows at which a new item begins."""
    if item.size == 0:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate(([0], np.flatnonzero(item[1:] != item[:-1]) + 1))

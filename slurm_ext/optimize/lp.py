"""The linear relaxation: a price per GPU, and the upper bound it proves.

Dropping integrality, the optimum follows each item's upper concave hull: take the hull's steps by
value per GPU, best first, until the GPUs are used up.  The value per GPU of the step that no longer
fits is the price at which demand meets supply.  Any price p gives a bound,

    capacity * p + sum over items of max(0, max over options of units - p * gpus),

and we evaluate exactly this, in integers and over all options: the bound stays valid even if the
hull, which is found in floating point, were off by a rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_ext.optimize.columns import Columns, Floats, Ints, columns
from slurm_ext.optimize.problem import Problem


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps up all hulls, best value per GPU first.

    ``row`` is the row a step leads to, ``gpus`` what the step adds to the row before it on the hull
    (or to leaving the item out).
    """

    row: Ints
    gpus: Ints
    rate: Floats


@dataclass(frozen=True, slots=True)
class Relaxation:
    """``price`` and ``bound`` in units; ``loss`` is what each row gives away against its item's
    best at that price, and ``idle_loss`` the same for leaving the item out (one per item)."""

    price: int
    bound: int
    loss: Ints
    idle_loss: Ints


def hull_steps(cols: Columns) -> Steps:
    """Steps of the upper concave hulls from (0 GPUs, 0 units), in the order greedy takes them."""
    row = np.arange(cols.rows)
    while True:
        gpus, rate = _slopes(cols, row)
        item = cols.item[row]
        # A row whose next step is at least as good as its own lies below the chord around it.
        # Removing all such rows at once is safe: none of them is a corner of the hull.
        below = np.zeros(row.size, dtype=np.bool_)
        below[:-1] = (item[1:] == item[:-1]) & (rate[1:] >= rate[:-1])
        if not below.any():
            break
        row = row[~below]
    order = np.argsort(-rate, kind="stable")
    return Steps(row=row[order], gpus=gpus[order], rate=rate[order])


def _slopes(cols: Columns, row: Ints) -> tuple[Ints, Floats]:
    item, gpus, units = cols.item[row], cols.gpus[row], cols.units[row]
    first = np.ones(row.size, dtype=np.bool_)
    first[1:] = item[1:] != item[:-1]
    more_gpus = gpus - np.where(first, 0, np.roll(gpus, 1))
    more_units = units - np.where(first, 0, np.roll(units, 1))
    with np.errstate(divide="ignore"):  # an option without GPUs has an infinite rate
        return more_gpus, more_units / more_gpus


def relax(cols: Columns, steps: Steps) -> Relaxation:
    used = np.cumsum(steps.gpus)
    split = int(np.searchsorted(used, cols.capacity, side="right"))
    price = int(steps.rate[split]) if split < steps.row.size else 0
    net = cols.units - price * cols.gpus
    if net.size == 0:
        return Relaxation(price, 0, net, net)
    best = np.maximum(np.maximum.reduceat(net, cols.starts), 0)
    return Relaxation(
        price=price,
        bound=cols.capacity * price + int(best.sum()),
        loss=np.repeat(best, cols.counts) - net,
        idle_loss=best,
    )


def lp_bound(problem: Problem) -> float:
    """An upper bound on the value of any choice, at most the rounding above the LP's optimum."""
    cols = columns(problem)
    return cols.bound_value(relax(cols, hull_steps(cols)).bound)

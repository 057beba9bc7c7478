"""The allocation problem and its answer, in plain numbers.

For every item choose at most one option so that the chosen options fit into the free GPUs and the
sum of their values is largest: a multiple-choice knapsack.  An item is usually one job and its
options are the GPU counts it may run on.  A merge candidate ties jobs together; then the whole
group is one item and an option's ``tag`` says what becomes of each of its jobs.  No job object and
no unit other than "GPUs" and "value" may enter here: what a value means is `objective`'s business.

The choice a reader would question: values are finite and not negative, and leaving an item out is
worth exactly zero.  So the empty choice is always feasible and every solver has an answer to fall
back on; a penalty for leaving a job out is written as a bonus for serving it.

Tie-break, the same for every exact solution of a `Problem`: among the choices of largest value
those with the fewest GPUs in total; among these, walking the items in the given order, each is
served rather than left out, and gets the earliest of its options, as far as the value allows.
Options worth nothing are never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from slurm_ext.domain.errors import SolverError

# Far above any cluster; keeps every sum of GPUs within 64 bits.
MAX_GPUS = 2**31 - 1


def _check_count(what: str, value: int) -> None:
    if type(value) is not int or not 0 <= value <= MAX_GPUS:
        _refuse_count(what, value)


def _refuse_count(what: str, value: int) -> NoReturn:
    raise SolverError(f"{what}={value!r} is not a whole number from 0 to {MAX_GPUS}")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve an item: ``gpus`` GPUs of ``pool`` for ``value``.

    ``tag`` is the caller's (a configuration, or one per job of a merged group); it is carried
    through untouched.  ``pool`` is read in a `PoolProblem` only.
    """

    gpus: int
    value: float
    tag: Hashable = None
    pool: str = ""

    def __post_init__(self) -> None:
        if type(self.gpus) is not int or not 0 <= self.gpus <= MAX_GPUS:
            _refuse_count(f"option {self.tag!r}: gpus", self.gpus)
        if not isinstance(self.value, int | float) or not 0.0 <= self.value < math.inf:
            raise SolverError(
                f"option {self.tag!r}: value={self.value!r} is not a finite number of at least 0; "
                "leave an option out rather than giving it a negative or undefined value"
            )


@dataclass(frozen=True, slots=True)
class Item:
    """Something to be served at most once: a job, or a group of jobs that is decided together."""

    key: str
    options: tuple[Option, ...]


def _check_keys(items: tuple[Item, ...]) -> None:
    if len({item.key for item in items}) != len(items):
        seen: set[str] = set()
        for item in items:
            if item.key in seen:
                raise SolverError(f"item {item.key!r} occurs twice; put its options into one item")
            seen.add(item.key)


@dataclass(frozen=True, slots=True)
class Problem:
    """Items that compete for the ``capacity`` free GPUs of one pool."""

    items: tuple[Item, ...]
    capacity: int

    def __post_init__(self) -> None:
        _check_count("capacity", self.capacity)
        _check_keys(self.items)


@dataclass(frozen=True, slots=True)
class Cell:
    """Free GPUs that belong to exactly the same pools; cells do not overlap."""

    key: str
    gpus: int

    def __post_init__(self) -> None:
        _check_count(f"cell {self.key!r}: gpus", self.gpus)


@dataclass(frozen=True, slots=True)
class Pool:
    """The cells an option of this pool may take its GPUs from, in any mixture."""

    key: str
    cells: frozenset[str]


@dataclass(frozen=True, slots=True)
class Limit:
    """The options chosen for ``members`` (item keys) take at most ``gpus`` GPUs together."""

    key: str
    members: frozenset[str]
    gpus: int

    def __post_init__(self) -> None:
        _check_count(f"limit {self.key!r}: gpus", self.gpus)


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """Items over several pools that may overlap, under limits of groups of items.

    A choice is feasible when the GPUs of every chosen option can be drawn from the cells of its
    pool without taking any GPU twice, and every limit is kept.  Which node a job gets is decided by
    placement later; a choice that placement cannot seat is removed there and solved again.
    """

    items: tuple[Item, ...]
    cells: tuple[Cell, ...]
    pools: tuple[Pool, ...]
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        _check_keys(self.items)
        cells = {cell.key for cell in self.cells}
        pools = {pool.key for pool in self.pools}
        if len(cells) != len(self.cells) or len(pools) != len(self.pools):
            raise SolverError("two cells, or two pools, have the same key")
        for pool in self.pools:
            if missing := sorted(pool.cells - cells):
                raise SolverError(f"pool {pool.key!r} names cells that do not exist: {missing}")
        for item in self.items:
            for option in item.options:
                if option.pool not in pools:
                    raise SolverError(
                        f"item {item.key!r}: option {option.tag!r} names pool {option.pool!r}, "
                        f"known are {sorted(pools)}"
                    )
        keys = {item.key for item in self.items}
        for limit in self.limits:
            if missing := sorted(limit.members - keys):
                raise SolverError(f"limit {limit.key!r} names items that do not exist: {missing}")


@dataclass(frozen=True, slots=True)
class Solution:
    """What was chosen, and how sure we are that nothing better exists.

    ``chosen`` maps the key of each served item to the index of its option, in item order.
    ``bound`` is an upper bound on the value of any choice; ``gap`` = (bound - value) / bound, 0
    when ``optimal``.  ``time_s`` is the only field that differs between two runs on equal input,
    and is left out of comparisons.
    """

    chosen: Mapping[str, int]
    value: float
    optimal: bool
    gap: float
    bound: float
    solver: str
    time_s: float = field(compare=False)
    note: str = ""


def selected(items: Collection[Item], chosen: Mapping[str, int]) -> dict[str, Option]:
    """The chosen option of every served item; refuses keys and indices that do not exist."""
    by_key = {item.key: item for item in items}
    result: dict[str, Option] = {}
    for key, index in chosen.items():
        item = by_key.get(key)
        if item is None or not 0 <= index < len(item.options):
            raise SolverError(f"choice {key!r} -> option {index} does not exist in this problem")
        result[key] = item.options[index]
    return result


def gpus_used(items: Collection[Item], chosen: Mapping[str, int]) -> int:
    return sum(option.gpus for option in selected(items, chosen).values())


def value_of(items: Collection[Item], chosen: Mapping[str, int]) -> float:
    """Sum of the chosen values, rounded once, so that it does not depend on the order of items."""
    return math.fsum(option.value for option in selected(items, chosen).values())


def relative_gap(value: float, bound: float) -> float:
    return 0.0 if bound <= value else (bound - value) / bound

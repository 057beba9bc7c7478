"""Pools that overlap: from node lists to cells, and an answer that keeps every constraint.

Two partitions may share nodes, so their free GPUs must not be counted twice.  Nodes that belong to
exactly the same pools form a cell; a pool draws from its cells, and whether a set of demands fits
is a small transport problem, solved here by augmenting paths.

`greedy_pools` is what is left when HiGHS is out of time or not installed.  It never looks for the
best answer, only for a good feasible one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.columns import columns
from slurm_ext.optimize.lp import hull_steps
from slurm_ext.optimize.problem import Cell, Option, Pool, PoolProblem, Problem, selected


def cells_of(
    free: Mapping[str, int], members: Mapping[str, Collection[str]]
) -> tuple[tuple[Cell, ...], tuple[Pool, ...]]:
    """Cells and pools from the free GPUs per node and the nodes of every pool.

    A pool's node without a number of free GPUs is an error: say 0 where none can be used.
    """
    home: dict[str, set[str]] = {}
    for pool, nodes in members.items():
        for node in nodes:
            if node not in free:
                raise SolverError(f"pool {pool!r} has node {node!r}, whose free GPUs are unknown")
            home.setdefault(node, set()).add(pool)
    gpus: dict[tuple[str, ...], int] = {}
    for node, pools in sorted(home.items()):
        shared = tuple(sorted(pools))
        gpus[shared] = gpus.get(shared, 0) + free[node]
    cells = tuple(Cell("&".join(shared), number) for shared, number in sorted(gpus.items()))
    return cells, tuple(
        Pool(pool, frozenset("&".join(shared) for shared in gpus if pool in shared))
        for pool in sorted(members)
    )


class Seats:
    """Which pool holds how many GPUs of which cell; grows by augmenting paths."""

    def __init__(self, problem: PoolProblem) -> None:
        self._cells = {pool.key: sorted(pool.cells) for pool in problem.pools}
        self._free = {cell.key: cell.gpus for cell in problem.cells}
        self._held: dict[str, dict[str, int]] = {
            pool: dict.fromkeys(cells, 0) for pool, cells in self._cells.items()
        }

    def take(self, pool: str, gpus: int) -> bool:
        """Seat ``gpus`` more GPUs of ``pool``, moving other pools between their cells as needed.
        Without a way to do it nothing changes."""
        free, held = dict(self._free), {key: dict(own) for key, own in self._held.items()}
        while gpus > 0:
            moved = self._augment(pool, gpus)
            if moved == 0:
                self._free, self._held = free, held
                return False
            gpus -= moved
        return True

    def give_back(self, pool: str, gpus: int) -> None:
        for cell in self._cells[pool]:
            part = min(gpus, self._held[pool][cell])
            self._held[pool][cell] -= part
            self._free[cell] += part
            gpus -= part

    def _augment(self, pool: str, wanted: int) -> int:
        """GPUs seated along one shortest path pool -> cell (-> pool that moves -> cell)*."""
        came: dict[str, tuple[str, str | None]] = {}  # cell -> (pool that takes it, its old cell)
        queue: list[tuple[str, str | None]] = [(pool, None)]
        for taker, old in queue:
            for cell in self._cells[taker]:
                if cell in came:
                    continue
                came[cell] = (taker, old)
                if self._free[cell] > 0:
                    return self._apply(came, cell, wanted)
                queue.extend(
                    (other, cell) for other, own in self._held.items() if own.get(cell, 0) > 0
                )
        return 0

    def _apply(self, came: Mapping[str, tuple[str, str | None]], end: str, wanted: int) -> int:
        path = [(end, *came[end])]
        while (old := path[-1][2]) is not None:
            path.append((old, *came[old]))
        amount = min([wanted, self._free[end]] + [self._held[p][o] for _, p, o in path if o])
        self._free[end] -= amount
        for cell, taker, old in path:
            self._held[taker][cell] += amount
            if old is not None:
                self._held[taker][old] -= amount
        return amount


@dataclass(slots=True)
class _State:
    """What is chosen so far, and what it uses."""

    seats: Seats
    room: dict[str, int]  # GPUs left under each limit
    chosen: dict[str, int]


def is_feasible(problem: PoolProblem, chosen: Mapping[str, int]) -> bool:
    """Whether pools and limits allow the choice."""
    seats = Seats(problem)
    options = selected(problem.items, chosen)
    return all(
        sum(option.gpus for key, option in options.items() if key in limit.members) <= limit.gpus
        for limit in problem.limits
    ) and all(seats.take(option.pool, option.gpus) for option in options.values())


def greedy_pools(problem: PoolProblem) -> dict[str, int]:
    """A feasible choice: hull steps by value per GPU, then every option that still improves."""
    limits: dict[str, list[str]] = {}
    for limit in problem.limits:
        for key in limit.members:
            limits.setdefault(key, []).append(limit.key)
    state = _State(Seats(problem), {limit.key: limit.gpus for limit in problem.limits}, {})
    cols = columns(pooled(problem))
    rows = hull_steps(cols).row
    for i, j in zip(cols.item[rows].tolist(), cols.option[rows].tolist(), strict=True):
        item = problem.items[i]
        _try(state, item.key, item.options, j, limits.get(item.key, ()))
    rest = [(i, j) for i, item in enumerate(problem.items) for j in range(len(item.options))]
    rest.sort(key=lambda at: -_rate(problem.items[at[0]].options[at[1]]))
    for i, j in rest:
        item = problem.items[i]
        _try(state, item.key, item.options, j, limits.get(item.key, ()))
    return {item.key: state.chosen[item.key] for item in problem.items if item.key in state.chosen}


def pooled(problem: PoolProblem) -> Problem:
    """The relaxation to one pool of all cells without limits: its bounds hold for ``problem``."""
    return Problem(problem.items, sum(cell.gpus for cell in problem.cells))


def _rate(option: Option) -> float:
    return option.value / max(option.gpus, 1)


def _try(
    state: _State, key: str, options: tuple[Option, ...], index: int, limits: Collection[str]
) -> None:
    """Give the item this option if that is better than what it has, and feasible."""
    new = options[index]
    old = options[state.chosen[key]] if key in state.chosen else None
    if new.value <= (old.value if old is not None else 0.0):
        return
    more = new.gpus - (old.gpus if old is not None else 0)
    if any(state.room[limit] < more for limit in limits):
        return
    if old is not None:
        state.seats.give_back(old.pool, old.gpus)
    if not state.seats.take(new.pool, new.gpus):
        if old is not None and not state.seats.take(old.pool, old.gpus):
            raise SolverError(f"item {key!r}: GPUs given back could not be taken again")
        return
    for limit in limits:
        state.room[limit] -= more
    state.chosen[key] = index

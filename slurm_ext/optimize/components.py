"""Cut a `PoolProblem` into parts that do not influence each other.

Pools are tied together by shared cells, by items with options in several of them, and by limits
whose members are in several of them.  A limit that its members cannot exceed ties nothing and is
dropped.  A part with one pool and no limit is a plain knapsack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurm_ext.optimize.problem import Limit, PoolProblem


@dataclass(slots=True)
class _Forest:
    """Union-find over pool keys."""

    parent: dict[str, str]

    def root(self, key: str) -> str:
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def join(self, keys: Iterable[str]) -> None:
        roots = sorted({self.root(key) for key in keys})
        for other in roots[1:]:
            self.parent[other] = roots[0]


def split(problem: PoolProblem) -> list[PoolProblem]:
    """The independent parts, in the order of their first pool; no item without options."""
    limits = [limit for limit in problem.limits if _binds(problem, limit)]
    pools_of = {
        item.key: {option.pool for option in item.options} for item in problem.items if item.options
    }
    forest = _Forest({pool.key: pool.key for pool in problem.pools})
    for cell in problem.cells:
        forest.join(pool.key for pool in problem.pools if cell.key in pool.cells)
    for tied in pools_of.values():
        forest.join(tied)
    for limit in limits:
        forest.join(pool for key in limit.members for pool in pools_of.get(key, ()))

    parts: list[PoolProblem] = []
    for root in dict.fromkeys(forest.root(pool.key) for pool in problem.pools):
        pools = tuple(pool for pool in problem.pools if forest.root(pool.key) == root)
        cells = frozenset[str]().union(*(pool.cells for pool in pools))
        items = tuple(
            item
            for item in problem.items
            if item.key in pools_of and forest.root(item.options[0].pool) == root
        )
        keys = {item.key for item in items}
        parts.append(
            PoolProblem(
                items=items,
                cells=tuple(cell for cell in problem.cells if cell.key in cells),
                pools=pools,
                limits=tuple(
                    Limit(limit.key, limit.members & keys, limit.gpus)
                    for limit in limits
                    if limit.members & keys
                ),
            )
        )
    return parts


def _binds(problem: PoolProblem, limit: Limit) -> bool:
    most = sum(
        max((option.gpus for option in item.options), default=0)
        for item in problem.items
        if item.key in limit.members
    )
    return most > limit.gpus

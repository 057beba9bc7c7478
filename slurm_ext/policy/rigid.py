"""Leaves out of a knapsack what cannot be in its answer, where nobody will ask why it is not.

Of rigid jobs (one candidate each) of equal size, an optimal choice takes the most valuable ones,
and no more than fit into the free GPUs. So of a queue of ten thousand single-GPU jobs beside eight
free GPUs, eight need to be looked at. Ties go to the job that came first in the list, as they do in
the solver. Jobs with more than one candidate, a planned start, a deadline or a weight are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Rigid(Generic[Thing]):
    """A job that has only one way to run: its size, the pool it runs in, and what it is worth."""

    thing: Thing
    gpus: int
    pool: str
    value: float


def worth_solving(
    things: Iterable[Thing], free_gpus: int, rigid: Callable[[Thing], Rigid[Thing] | None]
) -> list[Thing]:
    """The things that could be chosen, in their order; ``rigid`` says None of what must stay."""
    kept: list[tuple[int, Thing]] = []
    groups: dict[tuple[str, int], list[tuple[float, int, Thing]]] = {}
    for place, thing in enumerate(things):
        found = rigid(thing)
        if found is None:
            kept.append((place, thing))
        elif 0 < found.gpus <= free_gpus:
            groups.setdefault((found.pool, found.gpus), []).append((-found.value, place, thing))
    for (_, gpus), members in groups.items():
        best: Sequence[tuple[float, int, Thing]] = heapq.nsmallest(
            free_gpus // gpus, members, key=lambda item: item[:2]
        )
        kept.extend((place, thing) for _, place, thing in best)
    kept.sort(key=lambda item: item[0])
    return [thing for _, thing in kept]

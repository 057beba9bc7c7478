"""Leaves out of a knapsack what cannot be in its answer, where nobody will ask why it is not.

An item can be left out where enough others stay that could take its place for at least its value:

* Of rigid jobs (one way to run) of equal shape, an answer holds no more than fit into the free
  GPUs, or than there are seats for, where that is known (``seats``).
* A job that may run on several counts is in an answer on at most one of them, say on ``c`` of ``F``
  free GPUs. The others of that answer hold at most ``F - c`` GPUs, so they are at most as many
  jobs: if ``F - c + 1`` jobs are worth as much on ``c`` GPUs, one of them is idle and could take
  the place. So a job that is among the ``F - c + 1`` best on none of its counts is not needed.

So of a queue of ten thousand jobs beside eight free GPUs, a few dozen are looked at. Ties go to the
job that came first in the list, as they do in the solver.

The choice a reader would question: only undistinguished jobs are left out. One with a planned
start, a deadline, a weight or a partner to merge with always stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Way:
    """One way in which a job could run: its size, its shape on the nodes of its pool (equal for
    all that need the same seats), and what that is worth."""

    gpus: int
    shape: Hashable
    value: float


def worth_solving(
    things: Iterable[Thing],
    free_gpus: int,
    ways: Callable[[Thing], Sequence[Way] | None],
    seats: Mapping[Hashable, int] | None = None,
) -> list[Thing]:
    """The things that could be chosen, in their order; ``ways`` says None of what must stay."""
    kept: dict[int, Thing] = {}
    seats = seats or {}
    groups: dict[tuple[Hashable, int, bool], list[tuple[float, int, Thing]]] = {}
    for place, thing in enumerate(things):
        found = ways(thing)
        if found is None:
            kept[place] = thing
            continue
        rigid = len(found) == 1
        for way in found:
            if 0 < way.gpus <= free_gpus:
                key = way.shape, way.gpus, rigid
                groups.setdefault(key, []).append((-way.value, place, thing))
    for (shape, gpus, rigid), members in groups.items():
        needed = free_gpus // gpus if rigid else free_gpus - gpus + 1
        room = seats.get(shape, needed)
        if rigid or not room:
            needed = min(needed, room)
        best: Sequence[tuple[float, int, Thing]] = members
        if needed < len(members):
            best = heapq.nsmallest(needed, members, key=lambda item: item[:2])
        kept.update((place, thing) for _, place, thing in best)
    return [kept[place] for place in sorted(kept)]

"""SiteFactors that put our jobs in the wanted order, within the places that they already hold.

Slurm sorts by priority, then by job id. Our jobs of one partition and QOS permute the places that
they hold natively (without SiteFactor) among all jobs that could compete with them; a foreign job
keeps its priority, and so its number of predecessors. Steps, per set of partitions that share nodes
and have one priority tier:

1. The native sequence gives the places; each group's places are filled in the wanted order.
2. Between two foreign jobs there has to be room for the priorities of ours. Where there is none
   (a tie, or adjacent numbers), ours go behind the second one.
3. Of the present priorities as many as possible stay: a longest chain that can be kept while the
   others still fit in between. With D counting the places where the job id falls, a chain can be
   kept if and only if priority + D never rises along it, so it is a longest non-increasing
   subsequence. Only the rest is written, near the native number of its place.

So nothing is written while the real order is right, however age moves the numbers, and a second
application writes nothing. Where even that leaves no room (all priorities at Slurm's minimum), the
whole set stays in native order. No sum goes below 2, because Slurm lifts anything below 1 to 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_ext.control.pools import group_by_nodes
from slurm_ext.domain.job import Job
from slurm_ext.domain.snapshot import Snapshot

MIN_SUM = 2
# Slurm cuts each sum to a whole number, so the difference of two jobs that age alike wavers by one.
# What is written keeps this distance where there is room, so that the order does not waver with it.
SLACK = 8
MAX_FACTOR = 2**31 - 4


@dataclass(frozen=True, slots=True)
class Place:
    """A job in the queue as ordering sees it.

    ``native`` is the priority without SiteFactor, ``present`` with it. ``group`` is empty for jobs
    that are not ours to move; they stay at ``present``.
    """

    job_id: str
    number: int
    native: int
    present: int
    group: str = ""

    @property
    def ours(self) -> bool:
        """Whether the job may be moved."""
        return bool(self.group)


@dataclass(frozen=True, slots=True)
class Ordering:
    """Target sums, and why a set of partitions could not be ordered.

    ``factors`` holds only what has to be written: job id to SiteFactor.
    """

    factors: Mapping[str, int]
    sequence: tuple[str, ...]
    refusal: str = ""


def order_places(places: Iterable[Place], wanted: Sequence[str], head: int) -> Ordering:
    """Factors for one set of jobs that compete.

    ``wanted`` are our jobs, first one first. The first ``head`` get their place; those behind only
    have to stand behind, in the order in which they stand now.
    """
    queue = sorted(places, key=_native_key)
    ours = {p.job_id: p for p in queue if p.ours}
    line = _line(ours, wanted, head)
    sequence = _make_room(_fill(queue, line))
    factors = None if sequence is None else _write(sequence)
    if sequence is None or factors is None:
        return Ordering(
            {p.job_id: 0 for p in queue if p.ours and p.present != p.native},
            tuple(p.job_id for p in queue),
            "priorities leave no room between jobs: raise PriorityWeight* so that they differ",
        )
    return Ordering(factors, tuple(p.job_id for p in sequence))


def _native_key(place: Place) -> tuple[int, int, str]:
    return (-(place.native if place.ours else place.present), place.number, place.job_id)


def _present_key(place: Place) -> tuple[int, int, str]:
    return (-place.present, place.number, place.job_id)


def _line(ours: Mapping[str, Place], wanted: Sequence[str], head: int) -> list[Place]:
    """Our jobs in the order to bring about."""
    first = [ours[job_id] for job_id in wanted if job_id in ours][:head]
    named = {p.job_id for p in first}
    rest = sorted((p for p in ours.values() if p.job_id not in named), key=_present_key)
    return [*first, *rest]


def _fill(queue: Sequence[Place], line: Sequence[Place]) -> list[tuple[Place, int]]:
    """The native sequence with each group's places filled in order: (job, the place's number)."""
    waiting: dict[str, list[Place]] = {}
    for place in reversed(line):
        waiting.setdefault(place.group, []).append(place)
    return [
        (waiting[slot.group].pop(), slot.native) if slot.ours else (slot, slot.present)
        for slot in queue
    ]


@dataclass(frozen=True, slots=True)
class _Seat:
    """A job in the final sequence, and the number that its place would natively have."""

    place: Place
    near: int

    @property
    def job_id(self) -> str:
        return self.place.job_id


def _make_room(filled: Sequence[tuple[Place, int]]) -> list[_Seat] | None:
    """Move ours behind foreign jobs until integers suffice; ``None`` where they never do."""
    result: list[_Seat] = []
    carried: list[_Seat] = []  # ours that found no room before the last foreign job
    last: Place | None = None  # the last foreign job
    for place, near in filled:
        if place.ours:
            carried.append(_Seat(place, near))
            continue
        fitting = _fit(carried, last, place)
        result += carried[:fitting]
        result.append(_Seat(place, near))
        carried = carried[fitting:]
        last = place
    if _fit(carried, last, None) < len(carried):
        return None
    return [*result, *carried]


def _fit(run: Sequence[_Seat], above: Place | None, below: Place | None) -> int:
    """How many of the run, from its beginning, have room between two foreign jobs."""
    if above is None:
        return len(run)  # nothing bounds them from above
    value, number = above.present, above.number
    for index, seat in enumerate(run):
        value -= seat.place.number < number
        number = seat.place.number
        floor = MIN_SUM if below is None else below.present + (below.number < number)
        if value < floor:
            return index
    return len(run)


def _write(sequence: Sequence[_Seat]) -> dict[str, int] | None:
    """The fewest writes that give this sequence; ``None`` where no writes do."""
    drops = _drops(sequence)
    kept = _keep(sequence, drops)
    sums = _sums(sequence, drops, kept)
    levels = [value + drop for value, drop in zip(sums, drops, strict=True)]
    if any(right > left for left, right in pairwise(levels)):
        return None
    return {
        seat.job_id: sums[index] - seat.place.native
        for index, seat in enumerate(sequence)
        if seat.place.ours and index not in kept
    }


def _drops(sequence: Sequence[_Seat]) -> list[int]:
    """For each place, how often the job number has fallen so far: there the sum has to fall too."""
    drops, count = [], 0
    for index, seat in enumerate(sequence):
        if index and seat.place.number < sequence[index - 1].place.number:
            count += 1
        drops.append(count)
    return drops


def _keep(sequence: Sequence[_Seat], drops: Sequence[int]) -> set[int]:
    """Indices whose present sum stays: all foreign ones, and as many of ours as possible."""
    levels = [seat.place.present + drop for seat, drop in zip(sequence, drops, strict=True)]
    kept: set[int] = set()
    start = 0
    ceiling: int | None = None
    for end in [*(i for i, s in enumerate(sequence) if not s.place.ours), len(sequence)]:
        last = end == len(sequence)
        floor = None if last else levels[end]
        kept.update(_keep_run(levels, drops, start, end, ceiling, floor))
        if not last:
            kept.add(end)
            start, ceiling = end + 1, levels[end]
    return kept


def _keep_run(
    levels: Sequence[int],
    drops: Sequence[int],
    start: int,
    end: int,
    ceiling: int | None,
    floor: int | None,
) -> Iterable[int]:
    """The same for the run of ours between two foreign jobs (or an end of the queue).

    What is written has a sum of at least MIN_SUM, while what is kept may stand at Slurm's minimum
    of 1. So the part at the run's end that is right already is tried as a whole as well.
    """
    if start == end:
        return ()
    tail = end
    while tail > start and (
        (tail == end and (floor is None or levels[tail - 1] >= floor))
        or (tail < end and levels[tail - 1] >= levels[tail])
    ):
        tail -= 1
    if tail < end and ceiling is not None and levels[tail] > ceiling:
        # The right end is only right below the ceiling.
        tail = next((i for i in range(tail, end) if levels[i] <= ceiling), end)
    if tail == start:
        return range(start, end)
    with_tail = [
        *_longest(levels, start, tail, ceiling, _above(drops[tail - 1], levels, tail, end, floor)),
        *range(tail, end),
    ]
    least = MIN_SUM + drops[end - 1]
    without = _longest(levels, start, end, ceiling, least if floor is None else max(floor, least))
    return with_tail if len(with_tail) >= len(without) else without


def _above(drop: int, levels: Sequence[int], tail: int, end: int, floor: int | None) -> int:
    """The least level in front of a kept tail (of what follows, where the tail is empty)."""
    behind = levels[tail] if tail < end else floor
    least = MIN_SUM + drop
    return least if behind is None else max(behind, least)


def _longest(
    levels: Sequence[int], start: int, end: int, ceiling: int | None, floor: int
) -> list[int]:
    """Indices of a longest non-increasing run of levels within the bounds."""
    tails: list[int] = []  # negated last value of the best chain of each length
    ends: list[int] = []
    before: dict[int, int] = {}
    for index in range(start, end):
        value = levels[index]
        if value < floor or (ceiling is not None and value > ceiling):
            continue
        at = bisect_right(tails, -value)
        if at == len(tails):
            tails.append(-value)
            ends.append(index)
        else:
            tails[at] = -value
            ends[at] = index
        if at:
            before[index] = ends[at - 1]
    chain: list[int] = []
    index_or_none = ends[-1] if ends else None
    while index_or_none is not None:
        chain.append(index_or_none)
        index_or_none = before.get(index_or_none)
    return chain


def _sums(sequence: Sequence[_Seat], drops: Sequence[int], kept: set[int]) -> list[int]:
    """A sum for every place: as it is where kept, else near the native number of the place.

    Between two kept ones the others keep a distance of up to SLACK from each other and from both.
    """
    levels = [seat.place.present + drop for seat, drop in zip(sequence, drops, strict=True)]
    end = len(sequence)
    start = 0
    while start < end:
        if start in kept:
            start += 1
            continue
        stop = next((i for i in range(start, end) if i in kept), end)
        ceiling = levels[start - 1] if start else None
        # Behind the last one there is no neighbour, only the least sum.
        floor = max(MIN_SUM + drops[stop - 1], levels[stop] if stop < end else 0)
        count = stop - start
        slack = SLACK if ceiling is None else max(0, min(SLACK, (ceiling - floor) // (count + 1)))
        for index in range(start, stop):
            least = floor + slack * (stop - index - (stop == end))
            level = max(sequence[index].near + drops[index], least)
            if ceiling is not None:
                level = min(level, ceiling - slack)
            levels[index] = ceiling = level
        start = stop
    return [level - drop for level, drop in zip(levels, drops, strict=True)]


def competing_sets(snapshot: Snapshot, jobs: Iterable[Job]) -> dict[str, str]:
    """For each partition the name of the set in which its jobs are sorted against each other.

    Partitions compete if they share nodes and have the same priority tier; a job queued in several
    partitions ties them together.
    """
    tiers = {p.name: p.priority_tier for p in snapshot.partitions}
    members: dict[str, set[str]] = {
        p.name: {f"{p.priority_tier}/{name}" for name in p.node_names} for p in snapshot.partitions
    }
    for job in jobs:
        if len(job.partitions) > 1:
            for name in job.partitions:
                if name in members:
                    members[name].add(f"{tiers[name]}//job {job.job_id}")
    return {name: min(group) for group in group_by_nodes(members) for name in group}

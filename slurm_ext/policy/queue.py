"""The part that all policies share: who competes where, in which rank, and the words for it.

Pure. A *field* is a set of pools that share nodes, together with the pending jobs that compete for
them: fields are independent of each other, so each is decided on its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Node
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.policy.placement import Request

# A forecast of far-away starts helps nobody and costs time; jobs behind this place get none.
FORECAST_JOBS = 500


@dataclass(frozen=True, slots=True)
class Field:
    """Pools that overlap, their nodes, and the pending jobs that compete for them.

    ``foreign`` counts pending, eligible jobs of the field that are not ours to plan: they could
    overtake a leased job.
    """

    pools: tuple[str, ...]
    nodes: tuple[Node, ...]
    jobs: Sequence[Job]
    foreign: int
    _free: int = field(default=-1, init=False, repr=False, compare=False)

    @property
    def gpus_free(self) -> int:
        """Free GPUs over all nodes of the field; counted once, since many ask."""
        if self._free < 0:
            object.__setattr__(self, "_free", sum(node.gpus_free for node in self.nodes))
        return self._free

    def less(self, taken: Mapping[str, int]) -> Field:
        """The field after ``taken`` GPUs (by node name) were given out."""
        nodes = tuple(
            replace(n, gpus_alloc=n.gpus_alloc + taken[n.name]) if n.name in taken else n
            for n in self.nodes
        )
        return replace(self, nodes=nodes)


def components(pools: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Pool keys grouped by shared nodes, in the order of first appearance."""
    if len(pools) == 1:
        return [tuple(pools)]
    parent = {key: key for key in pools}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    owner: dict[str, str] = {}
    for key, names in pools.items():
        for name in names:
            first = owner.setdefault(name, key)
            parent[root(key)] = root(first)
    groups: dict[str, list[str]] = {}
    for key in pools:
        groups.setdefault(root(key), []).append(key)
    return [tuple(group) for group in groups.values()]


def fields(view: View) -> list[Field]:
    """The independent parts of the cluster, each with its competitors in queue order."""
    by_name = {node.name: node for node in view.snapshot.nodes}
    result: list[Field] = []
    mine, foreign = _competitors(view)
    for group in components(view.pools):
        names = dict.fromkeys(name for key in group for name in view.pools[key])
        jobs = mine.get(group[0], ())
        if len(group) > 1:
            jobs = tuple(job for key in group for job in mine.get(key, ()))
        result.append(
            Field(
                pools=group,
                nodes=tuple(by_name[name] for name in names if name in by_name),
                jobs=jobs,
                foreign=_touching(foreign, names, view) if foreign else 0,
            )
        )
    return result


def _competitors(view: View) -> tuple[Mapping[str, Sequence[Job]], list[Job]]:
    """Our jobs by pool, and the pending ones that are not ours but could start."""
    if view.queues is not None:
        return view.queues, []
    mine: dict[str, list[Job]] = {}
    foreign: list[Job] = []
    for job in view.snapshot.pending():
        fact = view.facts.get(job.job_id)
        if fact is not None and fact.permit.order and fact.candidates:
            mine.setdefault(fact.pool, []).append(job)
        elif job.competes:
            foreign.append(job)
    return mine, foreign


def _touching(foreign: Iterable[Job], names: Mapping[str, None], view: View) -> int:
    """How many of these jobs could start on one of the nodes."""
    near = {p.name for p in view.snapshot.partitions if any(n in names for n in p.node_names)}
    return sum(1 for job in foreign if not near.isdisjoint(job.partitions))


def request_for(job: Job, candidate: Candidate, pool_nodes: Iterable[str]) -> Request:
    """How many GPUs, CPUs and MiB per node the candidate needs, in the job's own proportions."""
    gpus = max(1, job.gpus)
    return Request(
        job_id=job.job_id,
        placement=candidate.configuration.placement,
        cpus=job.cpus / gpus,
        memory_mib=(job.memory_mib or 0) / gpus,
        allowed=frozenset(pool_nodes),
        excluded=frozenset(job.exc_nodes),
        exclusive=job.exclusive,
    )


Shape = tuple[str, tuple[int, ...], float, float, tuple[str, ...], bool]


def shape_of(job: Job, fact: JobFacts, candidate: Candidate) -> Shape:
    """What decides whether a request finds a seat: of equal ones, one stands for all."""
    gpus = max(1, job.gpus)
    return (
        fact.pool,
        candidate.configuration.placement,
        job.cpus / gpus,
        (job.memory_mib or 0) / gpus,
        job.exc_nodes,
        job.exclusive,
    )


def present_candidate(job: Job, fact: JobFacts) -> Candidate:
    """The candidate of the job's present GPU count; the nearest one where it is not offered."""
    for candidate in fact.candidates:
        if candidate.gpus == job.gpus:
            return candidate
    return min(
        fact.candidates,
        key=lambda c: (abs(c.gpus - job.gpus), c.gpus),
    )


def present_ways(job: Job, fact: JobFacts) -> list[Candidate]:
    """Every placement of the present count, `present_candidate` first: on nodes of several sizes
    one may find room where another does not."""
    first = present_candidate(job, fact)
    if len(fact.candidates) == 1:
        return [first]
    others = (c for c in fact.candidates if c.gpus == first.gpus and c is not first)
    return [first, *(c for c in others if len(c.job_ids) == 1)]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One job that does not start now: its rank order and the candidate it will probably get."""

    job: Job
    candidate: Candidate


def forecast(
    waiting: Sequence[Waiting],
    free_gpus: int,
    releases: Iterable[tuple[float, int]],
    now: float,
) -> dict[str, float]:
    """Expected start of each waiting job if nothing else arrives (epoch seconds).

    ``releases`` are (end, GPUs) of everything that runs or starts now. List scheduling by GPU
    counts: good enough to tell a user "in about two hours", never used to decide anything.
    """
    heap = [(max(end, now), gpus) for end, gpus in releases if gpus > 0]
    heapq.heapify(heap)
    starts: dict[str, float] = {}
    clock = now
    for item in waiting[:FORECAST_JOBS]:
        need = item.candidate.gpus
        while free_gpus < need and heap:
            clock, gpus = heapq.heappop(heap)
            free_gpus += gpus
        if free_gpus < need:
            break
        starts[item.job.job_id] = clock
        free_gpus -= need
        heapq.heappush(heap, (clock + item.candidate.remaining_s.value, need))
    return starts


def running_releases(view: View, node_names: frozenset[str], now: float) -> list[tuple[float, int]]:
    """(expected end, GPUs) of every job that runs on these nodes."""
    result = []
    for job in view.snapshot.running():
        if job.gpus and not node_names.isdisjoint(job.node_names):
            end = view.free_at_s.get(job.job_id, job.end_s)
            result.append((now if end is None else end, job.gpus))
    return result


def held_on(job: Job, nodes: Mapping[str, Node]) -> dict[str, int]:
    """GPUs that a running job holds on each of these nodes: the queue tells the total and the names
    only, so whole nodes are counted first, as they are given out."""
    held: dict[str, int] = {}
    left = job.gpus
    for name in job.node_names:
        node = nodes.get(name)
        if node is None:
            continue
        part = min(left, node.gpus_alloc)
        if part:
            held[name] = part
            left -= part
    return held


def shadow(
    need: int, free_gpus: int, releases: Sequence[tuple[float, int]], now: float
) -> tuple[float, int]:
    """When ``need`` GPUs will be free, and how many GPUs are then left over.

    (infinity, 0) when they never will be: such a job delays nobody and is delayed by nobody.
    """
    if free_gpus >= need:
        return now, free_gpus - need
    for end, gpus in sorted(releases):
        free_gpus += gpus
        if free_gpus >= need:
            return max(end, now), free_gpus - need
    return float("inf"), 0

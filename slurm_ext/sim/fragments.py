"""GPUs that were free but in pieces too small: a sweep over an accounting log.

A GPU is *stranded* while some job of its partition waits that the free GPUs would suffice for, yet
not in the shape that the job takes (so many nodes with so many GPUs each). Waiting in such a time
is waiting for whole nodes, which better placement or moving jobs would shorten; waiting while the
free GPUs do not suffice at all is not.

Accounting does not say how many GPUs a node has or how a job's GPUs lay. A node is taken to have as
many as ever were in use on it at once (or ``gpus_per_node``), and a job to spread evenly, so the
answer errs towards "no fragments"; so does a job whose GPUs do not spread evenly, which counts as
content with the smaller share on each node. The shape that a job takes is the one that it got.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurm_ext.sim.readers.sacctjob import SacctJob, SacctLog

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fragments:
    """What the sweep found.

    ``stranded_share`` is stranded GPU time over all GPU time of the nodes seen; ``wait_share`` the
    waiting of GPU jobs for whole nodes over all their waiting.
    """

    nodes: int
    gpus: int
    stranded_share: float
    wait_share: float


@dataclass(frozen=True, slots=True)
class _Shape:
    """Nodes that a job takes, and the least GPUs on each."""

    partition: str
    nodes: int
    per_node: int
    gpus: int


class _Pool:
    """The nodes of one partition: how many of them have how many GPUs free, and who waits."""

    def __init__(self) -> None:
        self.free: Counter[int] = Counter()
        self.waiting: Counter[_Shape] = Counter()
        self.blocked = 0

    def queue(self, shape: _Shape, jobs: int) -> None:
        """That many more (or fewer) jobs of a shape wait."""
        _add(self.waiting, shape, jobs)

    def change(self, before: int, after: int) -> None:
        """A node has ``after`` GPUs free instead of ``before``."""
        _add(self.free, before, -1)
        _add(self.free, after, 1)

    def look(self) -> None:
        """Bring ``blocked`` up to date: jobs for which the free GPUs suffice in number only."""
        self.blocked = 0
        if not self.waiting:
            return
        total = sum(gpus * nodes for gpus, nodes in self.free.items())
        for shape, jobs in self.waiting.items():
            if shape.gpus <= total and self._fitting(shape.per_node) < shape.nodes:
                self.blocked += jobs

    def _fitting(self, per_node: int) -> int:
        return sum(nodes for gpus, nodes in self.free.items() if gpus >= per_node)


def _add(counts: Counter[_T], key: _T, number: int) -> None:
    """Add to a count; what is zero is forgotten, so that a long log stays quick."""
    counts[key] += number
    if not counts[key]:
        del counts[key]


def fragments(log: SacctLog, gpus_per_node: int | None = None) -> Fragments | None:
    """Stranded GPUs and waiting for whole nodes; ``None`` where the log names no nodes."""
    jobs = [job for job in log.jobs if job.gpus > 0]
    events = _events(jobs, log.horizon_s)
    capacity = _capacity(events, gpus_per_node)
    if not capacity:
        return None
    pools, homes = _pools(jobs, capacity)
    used: Counter[str] = Counter()
    began_s = now_s = events[0][0]
    stranded_s = blocked_s = 0.0
    for time_s, _, kind, job, placed in events:
        if time_s > now_s:
            stranded_s += _stranded(pools, homes, used, capacity) * (time_s - now_s)
            blocked_s += sum(pool.blocked for pool in pools.values()) * (time_s - now_s)
        now_s = time_s
        touched: set[str] = set()
        if kind in (_QUEUED, _UNQUEUED):
            pool = pools.get(job.partition)
            if pool is not None:
                step = job.copies if kind == _QUEUED else -job.copies
                pool.queue(_shape(job), step)
                touched.add(job.partition)
        else:
            for node, gpus in placed:
                before = capacity[node] - used[node]
                used[node] += gpus if kind == _STARTED else -gpus
                for partition in homes[node]:
                    pools[partition].change(before, capacity[node] - used[node])
                    touched.add(partition)
        for partition in touched:
            pools[partition].look()
    gpu_time_s = sum(capacity.values()) * (now_s - began_s)
    waited_s = sum(_waits(job, log.horizon_s) for job in jobs if job.partition in pools)
    return Fragments(
        nodes=len(capacity),
        gpus=sum(capacity.values()),
        stranded_share=stranded_s / gpu_time_s if gpu_time_s else 0.0,
        wait_share=blocked_s / waited_s if waited_s else 0.0,
    )


# At one time, ends come before starts and leaving the queue comes with the start.
_ENDED, _QUEUED, _UNQUEUED, _STARTED = range(4)
_Event = tuple[float, int, int, SacctJob, tuple[tuple[str, int], ...]]


def _events(jobs: Iterable[SacctJob], horizon_s: float) -> list[_Event]:
    events: list[_Event] = []
    for number, job in enumerate(jobs):
        for since, until in _intervals(job, horizon_s):
            if until > since:
                events.append((since, number, _QUEUED, job, ()))
                events.append((until, number, _UNQUEUED, job, ()))
        for span in job.spans:
            placed = _placed(span.nodes, job.gpus)
            until = horizon_s if span.end_s is None else span.end_s
            if until > span.start_s and placed:
                events.append((span.start_s, number, _STARTED, job, placed))
                events.append((until, number, _ENDED, job, placed))
    events.sort(key=lambda event: (event[0], event[2], event[1]))
    return events


def _intervals(job: SacctJob, horizon_s: float) -> list[tuple[float, float]]:
    """From and until of each of its waits, the unfinished one included."""
    waits = list(job.waits)
    if len(waits) == len(job.spans) and (job.waiting or not job.spans):
        since = job.spans[-1].end_s if job.spans else job.ready_s
        until = horizon_s if job.waiting else job.ended_s
        if since is not None and until is not None:
            waits.append((since, max(since, until)))
    return waits


def _waits(job: SacctJob, horizon_s: float) -> float:
    return job.copies * sum(until - since for since, until in _intervals(job, horizon_s))


def _placed(nodes: Sequence[str], gpus: int) -> tuple[tuple[str, int], ...]:
    """GPUs on each node, as even as they go, the first nodes taking the rest."""
    if not nodes:
        return ()
    each, rest = divmod(gpus, len(nodes))
    return tuple((node, each + (i < rest)) for i, node in enumerate(nodes))


def _shape(job: SacctJob) -> _Shape:
    nodes = max(1, min(job.node_count, job.gpus))
    return _Shape(job.partition, nodes, job.gpus // nodes, job.gpus)


def _capacity(events: Iterable[_Event], gpus_per_node: int | None) -> dict[str, int]:
    used: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, _, kind, _, placed in events:
        for node, gpus in placed:
            used[node] += gpus if kind == _STARTED else -gpus
            most[node] = max(most[node], used[node])
    return {node: max(seen, gpus_per_node or 0) for node, seen in most.items() if seen}


def _pools(
    jobs: Iterable[SacctJob], capacity: dict[str, int]
) -> tuple[dict[str, _Pool], dict[str, list[str]]]:
    """A pool per partition on whose nodes GPU jobs ran, and the partitions of each node."""
    members: dict[str, set[str]] = defaultdict(set)
    for job in jobs:
        for span in job.spans:
            members[job.partition].update(node for node in span.nodes if node in capacity)
    homes: dict[str, list[str]] = defaultdict(list)
    pools: dict[str, _Pool] = {}
    for partition in sorted(members):
        pool = pools[partition] = _Pool()
        for node in members[partition]:
            homes[node].append(partition)
            pool.free[capacity[node]] += 1
    return pools, homes


def _stranded(
    pools: dict[str, _Pool],
    homes: dict[str, list[str]],
    used: Counter[str],
    capacity: dict[str, int],
) -> int:
    """Free GPUs of nodes whose partition has a blocked job; a shared node counts once."""
    if not any(pool.blocked for pool in pools.values()):
        return 0
    return sum(
        capacity[node] - used[node]
        for node, partitions in homes.items()
        if any(pools[partition].blocked for partition in partitions)
    )

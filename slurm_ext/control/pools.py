"""Pools: the nodes among which jobs of one kind compete.

A pool follows from partition, features, GPU type, excluded nodes and reservations. A reservation
closes its nodes to everybody else while it lasts, and beforehand to jobs whose time limit reaches
into it, so two jobs of one partition may belong to different pools. That time limit is the one that
the owner gave, never one that we stretched: else a stretched job would find its own pool gone and
be given back, only to be stretched again. Nodes that are down stay in their pool: they count
nothing while they are down, and the pool keeps its name. No decision is made
here, and pools of different partitions may share nodes (`overlaps` says which do).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_ext.control.features import parse_features
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Node, Partition, Pool, Reservation
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.queue import components

_Kind = tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]]


class PoolIndex:
    """Pools of one snapshot, each worked out once. ``ledger`` tells the submitted time limits."""

    def __init__(self, snapshot: Snapshot, ledger: Mapping[str, LedgerEntry] | None = None) -> None:
        self._taken_s = snapshot.taken_s
        self._ledger = ledger if ledger is not None else {}
        self._partitions = {p.name: p for p in snapshot.partitions}
        self._nodes = {n.name: n for n in snapshot.nodes}
        self._reservations = {r.name: r for r in snapshot.reservations}
        self._found: dict[_Kind, Pool | None] = {}

    def pool_of(self, job: Job) -> Pool | None:
        """The job's pool; ``None`` for jobs without GPUs, in several partitions, or without nodes.

        A partition that the snapshot does not know gives ``None`` as well: missing, not empty.
        """
        if job.gpus < 1 or not job.partition:
            return None
        own = job.reservation if job.reservation in self._reservations else ""
        closed = tuple(r.name for r in self._reservations.values() if self._closes(r, job))
        kind = (job.partition, job.features, job.gpu_type, own, tuple(job.exc_nodes), closed)
        if kind not in self._found:
            self._found[kind] = self._build(kind)
        return self._found[kind]

    def partition(self, job: Job) -> Partition | None:
        """The job's only partition."""
        return self._partitions.get(job.partition)

    def _closes(self, reservation: Reservation, job: Job) -> bool:
        if reservation.name == job.reservation or reservation.end_s <= self._taken_s:
            return False
        limit_s = self._limit_s(job)
        if reservation.start_s <= self._taken_s or limit_s is None:
            return True
        return self._taken_s + limit_s > reservation.start_s

    def _limit_s(self, job: Job) -> float | None:
        """The time limit that the owner gave."""
        entry = self._ledger.get(job.job_id)
        if entry is None or entry.written_limit_s is None:
            return job.time_limit_s
        return entry.submitted_limit_s

    def reaches_into(self, job: Job, limit_s: float) -> str:
        """The reservation of nodes of the job's pool that begins within ``limit_s``; or empty."""
        pool = self.pool_of(job) if self._reservations else None
        if pool is None:
            return ""
        names = {node.name for node in pool.nodes}
        for reservation in self._reservations.values():
            if (
                reservation.name != job.reservation
                and self._taken_s < reservation.start_s < self._taken_s + limit_s
                and not names.isdisjoint(reservation.node_names)
            ):
                return reservation.name
        return ""

    def _build(self, kind: _Kind) -> Pool | None:
        partition_name, features, gpu_type, own, excluded, closed = kind
        partition = self._partitions.get(partition_name)
        if partition is None:
            return None
        names = set(partition.node_names)
        if own:
            names &= set(self._reservations[own].node_names)
        names -= set(excluded)
        for name in closed:
            names -= set(self._reservations[name].node_names)
        admits = parse_features(features).admits
        nodes = tuple(
            node
            for name in sorted(names)
            if (node := self._nodes.get(name)) is not None
            and _has_gpus(node, gpu_type)
            and admits(node.features)
        )
        if not nodes:
            return None
        return Pool(_key(kind), partition_name, gpu_type, nodes, features)


def _has_gpus(node: Node, gpu_type: str) -> bool:
    return node.gpus > 0 and (not gpu_type or node.gpu_type == gpu_type)


def _key(kind: _Kind) -> str:
    """A name that people can read: ``main:v100 [nvlink] @own !n3 ~maintenance``."""
    name, features, gpu_type, own, excluded, closed = kind
    parts = [f"{name}:{gpu_type}" if gpu_type else name]
    if features:
        parts.append(f"[{features}]")
    if own:
        parts.append(f"@{own}")
    if excluded:
        parts.append(f"!{fold(excluded)}")
    parts += [f"~{r}" for r in closed]
    return " ".join(parts)


def build_pools(snapshot: Snapshot, index: PoolIndex | None = None) -> Mapping[str, Pool]:
    """Every pool that a pending job of the snapshot belongs to, by key."""
    index = index or PoolIndex(snapshot)
    pools: dict[str, Pool] = {}
    for job in snapshot.pending():
        pool = index.pool_of(job)
        if pool is not None:
            pools.setdefault(pool.key, pool)
    return pools


def pool_of(job: Job, snapshot: Snapshot) -> Pool | None:
    """The pool of one job. For many jobs keep a `PoolIndex`."""
    return PoolIndex(snapshot).pool_of(job)


def overlaps(pools: Mapping[str, Pool]) -> tuple[frozenset[str], ...]:
    """Keys of pools grouped so that pools of different groups share no node."""
    return group_by_nodes({key: [n.name for n in pool.nodes] for key, pool in pools.items()})


def group_by_nodes(sets: Mapping[str, Iterable[str]]) -> tuple[frozenset[str], ...]:
    """Names grouped so that sets of different groups are disjoint, in order of appearance."""
    return tuple(frozenset(group) for group in components(sets))

"""Limits of partition, QOS and association, which we enforce because Slurm stops doing so.

Once an Operator has changed nodes, CPUs, memory or time limit of a job, Slurm takes it as exempt
from those limits for good. So a count is offered, and a changed job let go, only where the limits
hold by our own reckoning. A job that nobody changed is Slurm's to check: its submitted count is
never refused here.

Usage counts running jobs, and jobs that we changed and let go: they may start at any moment.
Associations are looked up as ``assoc:ACCOUNT`` and ``assoc:ACCOUNT:USER``. What Slurm's own
counters say is not consulted: they are known to be wrong after a restart with several QOS.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from slurm_ext.control.shapes import Counts
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits
from slurm_ext.domain.snapshot import Snapshot


@dataclass(slots=True)
class Usage:
    """GPUs and nodes in use per limit holder, and per holder and user."""

    group: dict[str, tuple[int, int]] = field(default_factory=dict)
    user: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def add(self, job: Job, gpus: int, nodes: int) -> None:
        """Count a job as running with this size."""
        for key in holders(job):
            had_gpus, had_nodes = self.group.get(key, (0, 0))
            self.group[key] = (had_gpus + gpus, had_nodes + nodes)
            had_gpus, had_nodes = self.user.get((key, job.user), (0, 0))
            self.user[key, job.user] = (had_gpus + gpus, had_nodes + nodes)


def holders(job: Job) -> tuple[str, ...]:
    """Keys of the limits that bind the job."""
    keys = []
    if job.qos:
        keys.append(f"qos:{job.qos}")
    if job.account:
        keys += [f"assoc:{job.account}", f"assoc:{job.account}:{job.user}"]
    return tuple(keys)


def usage_of(snapshot: Snapshot, let_go: Collection[str] = ()) -> Usage:
    """What runs now, and the pending jobs ``let_go`` (by id) in their present shape."""
    usage = Usage()
    for job in snapshot.jobs:
        if job.running or (job.pending and job.job_id in let_go):
            usage.add(job, job.gpus, job.nodes)
    return usage


def allowed_counts(
    job: Job,
    counts: Iterable[int],
    snapshot: Snapshot,
    gpus_per_node: int,
    *,
    submitted: int | None = None,
    touched: bool = False,
    usage: Usage | None = None,
) -> Counts:
    """Which GPU counts the limits admit for the job now, and for each other one why not.

    ``submitted`` is the count that Slurm itself checks as long as the job was not ``touched``.
    """
    usage = usage_of(snapshot) if usage is None else usage
    ok: list[int] = []
    refused: dict[int, str] = {}
    for count in sorted(set(counts)):
        nodes = -(-count // max(1, gpus_per_node))
        reason = ""
        if touched or count != submitted:
            reason = why_over_limit(job, count, nodes, snapshot, usage)
        if reason:
            refused[count] = reason
        else:
            ok.append(count)
    return Counts(tuple(ok), refused)


def why_over_limit(job: Job, gpus: int, nodes: int, snapshot: Snapshot, usage: Usage) -> str:
    """The limit that the job would break with this size, in words; empty when none."""
    partition = next((p for p in snapshot.partitions if p.name == job.partition), None)
    if partition is not None and partition.max_nodes is not None and nodes > partition.max_nodes:
        return f"partition {partition.name} allows {partition.max_nodes} nodes per job"
    for key, limits in _binding(job, snapshot.limits):
        if reason := _over_own(job, gpus, nodes, limits):
            return reason
        if reason := _over_shared(job, gpus, nodes, key, limits, usage):
            return reason
    return ""


def _binding(job: Job, limits: Mapping[str, Limits]) -> Iterator[tuple[str, Limits]]:
    for key in holders(job):
        found = limits.get(key)
        if found is not None:
            yield key, found


def _over_own(job: Job, gpus: int, nodes: int, limits: Limits) -> str:
    name = limits.name
    if limits.max_gpus_per_job is not None and gpus > limits.max_gpus_per_job:
        return f"{name} allows {limits.max_gpus_per_job} GPUs per job"
    if limits.max_nodes_per_job is not None and nodes > limits.max_nodes_per_job:
        return f"{name} allows {limits.max_nodes_per_job} nodes per job"
    if limits.min_gpus_per_job is not None and gpus < limits.min_gpus_per_job:
        return f"{name} asks for at least {limits.min_gpus_per_job} GPUs per job"
    if limits.max_cpus_per_job is not None:
        cpus = -(-job.cpus * gpus // max(1, job.gpus))
        if cpus > limits.max_cpus_per_job:
            return f"{name} allows {limits.max_cpus_per_job} CPUs per job, it would take {cpus}"
    return ""


def _over_shared(job: Job, gpus: int, nodes: int, key: str, limits: Limits, usage: Usage) -> str:
    name = limits.name
    group_gpus, group_nodes = usage.group.get(key, (0, 0))
    user_gpus, user_nodes = usage.user.get((key, job.user), (0, 0))
    rows = (
        (limits.grp_gpus, group_gpus, gpus, "GPUs at once"),
        (limits.grp_nodes, group_nodes, nodes, "nodes at once"),
        (limits.max_gpus_per_user, user_gpus, gpus, "GPUs per user at once"),
        (limits.max_nodes_per_user, user_nodes, nodes, "nodes per user at once"),
    )
    for limit, used, wanted, words in rows:
        if limit is not None and used + wanted > limit:
            return f"{name} allows {limit} {words}: {used} in use, it would take {wanted}"
    return ""


def longest_s(job: Job, snapshot: Snapshot) -> float | None:
    """The longest time limit that partition, QOS and associations allow; ``None`` = any."""
    found = [limits.max_wall_s for _, limits in _binding(job, snapshot.limits)]
    found += [p.max_time_s for p in snapshot.partitions if p.name == job.partition]
    return min((limit for limit in found if limit is not None), default=None)

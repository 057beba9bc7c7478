"""Jobs that Slurm will not start, whatever becomes free: planned, they would keep GPUs idle.

What Slurm's reasons mean is a fact of the domain (`slurm_ext.domain.reasons`); here it is put into
words for the owner, and foreseen for a job that Slurm has not seen yet. ``sbatch --test-only``
takes such a job all the same, where neither EnforcePartLimits nor a QOS's DenyOnLimit forbids it.

Another size may mend some of them. A job that may be resized is then planned, but never in the
size that was submitted (`slurm_ext.control.decide`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_ext.control.limits import Size, Usage, present_size
from slurm_ext.domain.job import Job
from slurm_ext.domain.reasons import Bar
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.domain.spans import counted, span


def why_barred(job: Job) -> str:
    """Why Slurm will not start the job as it is, with the fix; empty where it may."""
    bar = job.bar
    if bar is None:
        return ""
    where = f" {job.partition}" if job.partition else ""
    return (
        f"Slurm will not start it as it is, whatever becomes free: {bar.why} (reason {job.reason}"
        f" in partition{where}); {_fix(job, bar)}"
    )


def _fix(job: Job, bar: Bar) -> str:
    if bar.opens:
        return "an administrator has to open it, or choose another one"
    change = f"change it (scontrol update JobId={job.job_id} ...)"
    return change if bar.anywhere else f"{change}, or choose another partition or QOS"


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would bar a job: Slurm's ``reason``, in words, and the proviso where one is needed."""

    reason: str
    why: str
    unless: str = ""


def foresee_bar(
    job: Job, snapshot: Snapshot, *, enforced: bool, qos_known: bool, timed: bool = True
) -> Foreseen | None:
    """What would keep Slurm from ever starting the job in each of its partitions.

    ``enforced`` tells whether Slurm enforces limits of QOS and associations; ``qos_known`` whether
    the snapshot has the job's QOS, which may let it go past limits of the partition; ``timed``
    whether the owner gave a time limit: without one Slurm takes one that is allowed.
    """
    usage = Usage(replace(snapshot, jobs=()))
    known = {p.name: p for p in snapshot.partitions}
    limit_s = job.time_limit_s if timed else None
    size = replace(present_size(job), limit_s=limit_s, most_nodes=job.max_nodes)
    found = None
    for name in job.partitions:
        if name not in known:
            return None
        there = replace(job, partitions=(name,))
        if known[name].available:
            found = barred_by_limits(there, size, usage, enforced=enforced, qos_known=qos_known)
        else:
            why = f"partition {name} is down: an administrator has to open it, or choose another"
            found = Foreseen("PartitionDown", why)
        if found is None:
            return None
    return found


def barred_by_limits(
    job: Job, size: Size, usage: Usage, *, enforced: bool, qos_known: bool = True
) -> Foreseen | None:
    """The limit of one job that it would break in that size; see `foresee_bar`."""
    name, bounds = job.partition, usage.bounds(job)
    unless = "" if qos_known else "its QOS, which could not be read, allows more"
    most_s, most, least = bounds.max_time_s, bounds.max_nodes, bounds.min_nodes
    if most_s is not None and size.limit_s is not None and size.limit_s > most_s:
        return Foreseen(
            "PartitionTimeLimit",
            f"its time limit of {span(size.limit_s)} is above the {span(most_s)} of partition"
            f" {name} (PartitionTimeLimit): ask for less --time, or another partition",
            unless,
        )
    if most is not None and size.nodes > most:
        return Foreseen(
            "PartitionNodeLimit",
            f"it asks for {counted(size.nodes, 'node')}, above the {most} of partition {name}"
            " (PartitionNodeLimit): ask for fewer, or another partition",
            unless,
        )
    if least is not None and size.most_nodes is not None and size.most_nodes < least:
        return Foreseen(
            "PartitionNodeLimit",
            f"it asks for at most {counted(size.most_nodes, 'node')}, below the {least} of"
            f" partition {name} (PartitionNodeLimit): ask for more, or another partition",
            unless,
        )
    broken = usage.never(job, size) if enforced else None
    return Foreseen(*broken) if broken is not None else None

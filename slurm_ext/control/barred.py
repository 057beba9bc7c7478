"""Jobs that Slurm will not start, whatever becomes free: planned, they would keep GPUs idle.

Slurm's own reason says so: the request is above what a partition, a QOS or an association allows
one job, or asks for what is not there. Slurm looks at the job again by itself, so a limit that is
lifted or a job that is changed shows in the next reason; nothing is remembered here.

Only for jobs whose size stays as submitted. One that may be resized gets a size, and a time limit,
that the limits allow (`slurm_ext.control.offers`).
"""

from __future__ import annotations

import re

from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Partition
from slurm_ext.domain.spans import counted, span

_FIX = {
    "PartitionTimeLimit": "its time limit is above the partition's: ask for less --time",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition allows one job",
    "PartitionConfig": "the partition does not have what it asks for",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node has what it asks for",
    "AccountNotAllowed": "the partition is closed to its account",
    "InvalidAccount": "its account does not exist",
    "QOSNotAllowed": "the partition or the account is closed to its QOS",
    "InvalidQOS": "its QOS does not exist",
}
_WAITS_FOR_ADMIN = frozenset({"PartitionDown", "PartitionInactive"})
# Limits of one job: QOSMaxCpuPerJobLimit, AssocMaxWallDurationPerJobLimit, QOSMaxGRESPerJob ...
_PER_JOB = re.compile(r"(QOS|Assoc)M(?:ax|in)\w*?(?:PerJob(?:Limit)?|MinutesPerJob\w*)", re.ASCII)
_OWNER = {"QOS": "its QOS", "Assoc": "its account"}


def barred(job: Job) -> str:
    """Why Slurm will not start the job as it is, with the fix; empty where it may."""
    why = _FIX.get(job.reason, "")
    match = _PER_JOB.fullmatch(job.reason)
    if match is not None:
        why = f"it asks for more than {_OWNER[match[1]]} allows one job"
    if not why:
        return ""
    where = f" {job.partition}" if job.partition else ""
    if job.reason in _WAITS_FOR_ADMIN:
        fix = "an administrator has to open it, or choose another one"
    else:
        fix = f"change it (scontrol update JobId={job.job_id} ...), or choose another partition"
    return (
        f"Slurm will not start it as it is, whatever becomes free: {why} (reason {job.reason} in"
        f" partition{where}); {fix}"
    )


def above_partition(job: Job, partitions: tuple[Partition, ...]) -> str:
    """Why the job's request is above what its partitions allow; empty where one takes it.

    For a job that Slurm has not seen yet. ``sbatch --test-only`` takes it all the same where
    EnforcePartLimits is NO; a QOS may override the partition (PartitionTimeLimit flag).
    """
    found = ""
    for partition in partitions:
        if partition.name not in job.partitions:
            continue
        most_s, limit_s = partition.max_time_s, job.time_limit_s
        if most_s is not None and limit_s is not None and limit_s > most_s:
            found = (
                f"its time limit of {span(limit_s)} is above the {span(most_s)} of partition"
                f" {partition.name}: unless its QOS allows more, Slurm keeps it waiting for good"
                " (PartitionTimeLimit); ask for less --time, or another partition"
            )
        elif partition.max_nodes is not None and job.nodes > partition.max_nodes:
            found = (
                f"it asks for {counted(job.nodes, 'node')}, above the {partition.max_nodes} of"
                f" partition {partition.name}: unless its QOS allows more, Slurm keeps it waiting"
                " for good (PartitionNodeLimit); ask for fewer, or another partition"
            )
        else:
            return ""
    return found

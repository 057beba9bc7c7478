"""What a backend would read of the in-memory Slurm: its objects as the product's dataclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node
from tests.fakes.model import FakeJob, FakeNode

if TYPE_CHECKING:
    from tests.fakes.slurm import FakeSlurm


def observed_job(slurm: FakeSlurm, job: FakeJob) -> Job:
    """The row that a backend would read for this job."""
    pending = job.state is JobState.PENDING
    if pending and not slurm.eligible(job):
        slurm.tell_reason(job)
    leased = pending and job.begin_s > slurm.now
    return Job(
        job_id=job.job_id,
        base_id=job.array_id or job.raw_id,
        user=job.user,
        uid=job.uid,
        account=job.account,
        partitions=job.partitions,
        qos=job.qos,
        state=job.state,
        reason=job.reason,
        submit_s=job.submit_s,
        # Slurm shows none while a person or a dependency holds the job, unless one lies ahead.
        eligible_s=None if (job.held or job.dependency) and not leased else job.begin_s,
        start_s=(job.begin_s if leased else job.expected_s) if pending else job.start_s,
        end_s=None
        if pending or job.start_s is None or job.time_limit_s is None
        else job.start_s + job.time_limit_s,
        time_limit_s=job.time_limit_s,
        gpus=job.gpus,
        nodes=job.nodes if pending else len(job.placement),
        max_nodes=job.max_nodes,
        ntasks=job.ntasks,
        cpus=job.cpus,
        gpu_type=job.gpu_type,
        priority=slurm.priority(job),
        site_factor=job.site_factor,
        nice=job.nice,
        eligible=pending and slurm.eligible(job),
        tres_per_job=job.tres_per_job,
        tres_per_node=job.tres_per_node,
        tres_per_task=job.tres_per_task,
        req_nodes=job.req_nodes,
        exc_nodes=job.exc_nodes,
        node_names=tuple(sorted(job.placement)),
        features=job.features,
        licenses=job.licenses,
        dependency=job.dependency,
        reservation=job.reservation,
        exclusive=job.exclusive,
        array=job.array_id is not None,
        array_tasks=max(1, len(job.tasks)),
        het_job_id=job.het_job_id,
        restarts=job.restarts,
        held_by_user=job.held_by_user,
        held_by_admin=job.held_by_admin,
        batch=job.batch,
        priority_set=job.set_priority is not None,
        raw_id=job.raw_id,
    )


def observed_node(node: FakeNode) -> Node:
    """The node as a backend would read it."""
    return Node(
        node.name,
        gpus=node.gpus,
        gpu_type=node.gpu_type,
        gpus_alloc=node.gpus_alloc,
        cpus=node.cpus,
        cpus_alloc=node.cpus_alloc,
        memory_mib=node.memory_mib,
        features=node.features,
        partitions=node.partitions,
        available=node.usable,
        state="MIXED" if node.jobs and node.state == "IDLE" else node.state,
    )

"""The table of shapes on a real Slurm: what is written, what Slurm shows, and what ranks then get.

Every row is submitted with a begin time in the future, resized by the product's own transaction,
read back, let go, and its ranks tell how many they are, where, and which GPUs they see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from ci.cluster import Cluster
from slurm_ext.control.shapes import (
    Fields,
    read_back_matches,
    resize_fields,
    restore_fields,
    shape_for,
)
from slurm_ext.control.submitted import Frame
from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.job import Job, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.slurm.cli_backend import CliBackend
from tests.cluster.runner import ClusterRunner

OUT = "/home/alice"
SCRIPT = f"""#!/bin/bash
#SBATCH -o {OUT}/ranks-%j
srun sh -c 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(nproc)"'
"""
RANK, LAUNCHER, SINGLE, TASKS, FIXED = ShapeKind


@dataclass(frozen=True)
class Row:
    """One submission, the placement that is planned for it, and what its ranks have to see."""

    options: tuple[str, ...]
    frame: Frame
    placement: tuple[int, ...]
    ranks: tuple[int, ...]  # per node, most first
    gpus_per_rank: int


ROWS = {
    "rank-per-gpu 1 to 8": Row(
        ("-n1", "--gpus-per-task=1"), Frame(RANK, 1, 1, 1), (4, 4), (4, 4), 1
    ),
    "rank-per-gpu 8 to 1": Row(("-n8", "--gpus-per-task=1"), Frame(RANK, 8, 1, 8), (1,), (1,), 1),
    "rank-per-gpu 4 to 12": Row(
        ("-n4", "--gpus-per-task=1"), Frame(RANK, 4, 1, 4), (4, 4, 4), (4, 4, 4), 1
    ),
    "rank-per-gpu with CPUs": Row(
        ("-n4", "--gpus-per-task=1", "-c2"), Frame(RANK, 4, 1, 4, cpus_per_task=2), (2,), (2,), 1
    ),
    "two GPUs per rank": Row(
        ("-n4", "--gpus-per-task=2"), Frame(RANK, 8, 1, 4, gpus_per_task=2), (4,), (2,), 2
    ),
    "launcher 2x4 to 1x2": Row(
        ("-N2", "--ntasks-per-node=1", "--gres=gpu:4"),
        Frame(LAUNCHER, 8, 2, 2, gpus_per_node=4),
        (2,),
        (1,),
        2,
    ),
    "launcher 1x1 to 3x4": Row(
        ("-N1", "--ntasks-per-node=1", "--gres=gpu:v100:1"),
        Frame(LAUNCHER, 1, 1, 1, gpus_per_node=1, gpu_type="v100"),
        (4, 4, 4),
        (1, 1, 1),
        4,
    ),
    "single node 4 to 2, with memory": Row(
        ("-N1", "-n4", "--gres=gpu:4", "--mem=8000"),
        Frame(SINGLE, 4, 1, 4, gpus_per_node=4, nodes_max=1, memory_node_mib=8000),
        (2,),
        (2,),
        2,
    ),
    "tasks per node 2x4 to 1x4": Row(
        ("-N2", "--ntasks-per-node=4", "--gres=gpu:4"),
        Frame(TASKS, 8, 2, 8, gpus_per_node=4),
        (4,),
        (4,),
        4,
    ),
    "tasks per node, GPUs per task": Row(
        ("-N1", "--ntasks-per-node=4", "--gpus-per-task=1"),
        Frame(TASKS, 4, 1, 4, gpus_per_node=4, gpus_per_task=1),
        (4, 4),
        (4, 4),
        1,
    ),
}


@pytest.fixture
def backend(cluster: Cluster) -> Iterator[CliBackend]:
    backend = CliBackend(ClusterRunner(cluster))
    yield backend
    backend.close()


def submit(cluster: Cluster, options: Sequence[str]) -> str:
    return str(cluster.sbatch(SCRIPT, *options, "-t", "30", "--begin=now+1hour"))


def write(backend: CliBackend, job_id: str, fields: Fields) -> None:
    (result,) = backend.apply([Action(ActionKind.SHAPE, job_id, fields, "test")])
    assert result.ok, result.message


def seen(backend: CliBackend, job_id: str) -> Job:
    (job,) = backend.jobs([job_id])
    return job


def finish(cluster: Cluster, backend: CliBackend, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """Let the jobs start, and return what their ranks wrote."""
    backend.apply(
        [Action(ActionKind.LIFT, job, (("StartTime", "now"),), "test") for job in job_ids]
    )
    cluster.wait(lambda: not cluster.squeue(), 90, "all jobs to end")
    return {job: cluster.get(f"{OUT}/ranks-{job}").decode().splitlines() for job in job_ids}


def test_every_row_of_the_table(cluster: Cluster, backend: CliBackend) -> None:
    jobs = {name: submit(cluster, row.options) for name, row in ROWS.items()}
    for name, row in ROWS.items():
        shape = shape_for(row.frame, Configuration(sum(row.placement), row.placement))
        assert shape is not None, name
        write(backend, jobs[name], resize_fields(row.frame, shape, limit_s=5400.0))
        assert read_back_matches(seen(backend, jobs[name]), shape, limit_s=5400.0) is None, name
    told = finish(cluster, backend, list(jobs.values()))
    for name, row in ROWS.items():
        lines = [line.split() for line in told[jobs[name]]]
        per_node = Counter(node for node, *_ in lines)
        assert tuple(sorted(per_node.values(), reverse=True)) == row.ranks, (name, lines)
        assert {len(gpus.split(",")) for _, gpus, *_ in lines} == {row.gpus_per_rank}, (name, lines)


def test_what_was_submitted_comes_back(cluster: Cluster, backend: CliBackend) -> None:
    jobs = {name: submit(cluster, row.options) for name, row in ROWS.items()}
    before = {name: seen(backend, job) for name, job in jobs.items()}
    for name, row in ROWS.items():
        shape = shape_for(row.frame, Configuration(sum(row.placement), row.placement))
        assert shape is not None
        nodes = ("n1", "n2", "n3")[: shape.nodes]
        write(backend, jobs[name], resize_fields(row.frame, shape, limit_s=5400.0, nodes=nodes))
        pinned = seen(backend, jobs[name])
        assert read_back_matches(pinned, shape, limit_s=5400.0, nodes=nodes) is None, name
        entry = LedgerEntry(
            jobs[name],
            0.0,
            submitted=row.frame.shape,
            submitted_limit_s=1800.0,
            written=shape,
            written_limit_s=5400.0,
            pinned=True,
        )
        write(backend, jobs[name], restore_fields(row.frame, entry))
        after = seen(backend, jobs[name])
        was = before[name]
        assert (after.gpus, after.ntasks, after.cpus) == (was.gpus, was.ntasks, was.cpus), name
        assert (after.time_limit_s, after.req_nodes) == (1800.0, ()), name
        if row.frame.memory_node_mib:  # else Slurm shows a sum that it mends at the start
            assert after.memory_mib == was.memory_mib, name
        if row.frame.kind is not RANK:  # there Slurm shows a count that it derives
            assert after.nodes == was.nodes, name
    told = finish(cluster, backend, list(jobs.values()))
    for name, row in ROWS.items():
        assert len(told[jobs[name]]) == row.frame.ntasks, name


def test_a_part_of_an_array_keeps_its_node_count(cluster: Cluster, backend: CliBackend) -> None:
    frame = replace(ROWS["single node 4 to 2, with memory"].frame, memory_node_mib=0, array=True)
    submit(cluster, ("-N1", "-n4", "--gres=gpu:4", "--array=1-3,7"))
    (job,) = backend.jobs()
    shape = shape_for(frame, Configuration(2, (2,)))
    assert shape is not None
    write(backend, job.job_id, resize_fields(frame, shape, limit_s=3600.0))
    assert read_back_matches(seen(backend, job.job_id), shape, limit_s=3600.0) is None
    refused = backend.apply(
        [Action(ActionKind.SHAPE, job.job_id, (("NumTasks", "2"), ("NumNodes", "1")), "test")]
    )
    assert not refused[0].ok, "Slurm takes a node count for a part of an array now: use it"


def test_a_changed_task_count_shields_a_running_job(cluster: Cluster, backend: CliBackend) -> None:
    """The lease is what protects a job; this is the second line, and only for nodes and limit."""
    cluster.reconfigure(SchedulerParameters="bf_interval=5,batch_sched_delay=1")
    script = "#!/bin/bash\nsleep 600\n"
    job = str(cluster.sbatch(script, "-n8", "-N2", "--gpus-per-task=1", "-t", "30"))
    cluster.wait_state(int(job), "RUNNING")
    fields = (("NumTasks", "2"), ("NumNodes", "1"), ("TimeLimit", "5"))
    (result,) = backend.apply([Action(ActionKind.SHAPE, job, fields, "test")])
    assert not result.ok
    after = seen(backend, job)
    assert (after.gpus, after.nodes, after.time_limit_s) == (8, 2, 1800.0)


def test_an_operators_factor_leaves_a_hold_and_a_frozen_priority_alone(
    cluster: Cluster, backend: CliBackend
) -> None:
    blocker = cluster.sbatch("#!/bin/bash\nsleep 600\n", "-N4", "--gres=gpu:4", "-t", "30")
    cluster.wait_state(blocker, "RUNNING")
    held = str(cluster.sbatch(SCRIPT, "-H", "-n4", "--gpus-per-task=1", "-t", "30"))
    frozen = str(cluster.sbatch(SCRIPT, "-N4", "--gres=gpu:4", "-t", "30"))
    backend.apply([Action(ActionKind.FACTOR, frozen, (("Priority", "500"),), "an operator")])
    cluster.wait(lambda: seen(backend, frozen).priority_set, 30, "the frozen priority to show")
    backend.apply(
        [
            Action(ActionKind.LEASE, held, (("StartTime", "uts4000000000"),), "test"),
            Action(ActionKind.SHAPE, held, (("NumTasks", "2"), ("NumNodes", "1")), "test"),
            Action(ActionKind.LIFT, held, (("StartTime", "now"),), "test"),
        ]
    )
    job = seen(backend, held)
    assert (job.held_by_user, job.gpus, job.priority) == (True, 2, 0)

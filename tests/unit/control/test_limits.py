"""Limits that Slurm checks no more once we have changed a job, and the guard against growth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.growth import GrowthGuard
from slurm_ext.control.limits import Size, allowed_counts, size_of, usage_of
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.shapes import Counts
from slurm_ext.control.submitted import Frame
from slurm_ext.domain.job import Job, JobState, Shape, ShapeKind
from slurm_ext.domain.node import Limits, Node, Partition
from slurm_ext.domain.snapshot import Snapshot

NOW = 10_000.0
JOB = Job(
    "1",
    1,
    "alice",
    ("main",),
    JobState.PENDING,
    0.0,
    gpus=4,
    ntasks=4,
    cpus=16,
    memory_mib=4000,
    qos="normal",
    account="vision",
    priority=500,
    time_limit_s=3600.0,
)
NODES = tuple(Node(f"n{i}", gpus=4) for i in range(1, 5))
COUNTS = (1, 2, 4, 8, 16)


def running(job_id: str, gpus: int, **more: object) -> Job:
    base = replace(JOB, job_id=job_id, base_id=int(job_id), state=JobState.RUNNING)
    size = {"gpus": gpus, "nodes": -(-gpus // 4), "cpus": 4 * gpus, "memory_mib": 1000 * gpus}
    return replace(base, **{**size, **more})  # type: ignore[arg-type]


def cluster(*jobs: Job, limits: dict[str, Limits] | None = None, **partition: object) -> Snapshot:
    return Snapshot(
        NOW,
        (JOB, *jobs),
        NODES,
        (
            Partition("main", ("n1", "n2", "n3", "n4"), **partition),  # type: ignore[arg-type]
            Partition("far", ("n9",)),
        ),
        limits=limits or {},
    )


FRAME = Frame(ShapeKind.RANK_PER_GPU, 4, 1, 4, cpus_per_task=4)
QOS = "qos:normal"


def allowed(snapshot: Snapshot, job: Job = JOB, **more: object) -> Counts:
    usage = usage_of(snapshot)

    def size(count: int) -> Size:
        shape = Shape(FRAME.kind, count, -(-count // 4), count)
        return size_of(job, FRAME, shape, 3600.0)

    return allowed_counts(job, COUNTS, usage, size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "ok", "words"),
    [
        (Limits("qos normal", max_gpus_per_job=4), (1, 2, 4), "4 GPUs per job"),
        (Limits("qos normal", max_nodes_per_job=2), (1, 2, 4, 8), "2 nodes per job"),
        (Limits("qos normal", min_gpus_per_job=4), (4, 8, 16), "at least 4 GPUs"),
        (Limits("qos normal", max_cpus_per_job=32), (1, 2, 4, 8), "32 CPUs per job"),
        (Limits("qos normal", max_memory_mib_per_job=2000), (1, 2), "MiB of memory per job"),
        (Limits("qos normal", grp_gpus=12), (1, 2, 4), "8 in use"),
        (Limits("qos normal", grp_nodes=4), (1, 2, 4, 8), "2 in use"),
        (Limits("qos normal", grp_cpus=40), (1, 2), "CPUs at once: 32 in use"),
        (Limits("qos normal", grp_memory_mib=10_000), (1, 2), "8000 in use"),
        (Limits("qos normal", max_gpus_per_user=6), (1, 2), "4 in use"),
        (Limits("qos normal", max_nodes_per_user=2), (1, 2, 4), "1 in use"),
        (Limits("qos normal", max_cpus_per_user=24), (1, 2), "CPUs per user"),
        (Limits("qos normal", max_memory_mib_per_user=5000), (1,), "memory per user"),
        (Limits("qos normal", max_gpus_per_account=10), (1, 2), "per account at once: 8 in use"),
        (Limits("qos normal", max_nodes_per_account=2), (), "nodes per account"),
        (Limits("qos normal", max_cpus_per_account=36), (1,), "CPUs per account"),
        (Limits("qos normal", max_memory_mib_per_account=8000), (), "memory per account"),
        (Limits("qos normal", max_gpu_minutes_per_job=240), (1, 2, 4), "240 GPU minutes per job"),
        (Limits("qos normal", max_cpu_minutes_per_job=480), (1, 2), "480 CPU minutes per job"),
        (Limits("qos normal", grp_gpu_run_minutes=480), (1, 2), "running jobs: 320 in use"),
        (Limits("qos normal", grp_cpu_run_minutes=1520), (1,), "running jobs: 1280 in use"),
        (Limits("qos normal", grp_gpu_minutes=500, used_gpu_minutes=300), (1, 2), "300 in use"),
        (Limits("qos normal", grp_cpu_minutes=500, used_cpu_minutes=500), (), "500 in use"),
    ],
)
def test_each_limit(limits, ok, words):
    one = running("2", 4, end_s=NOW + 2400)
    snapshot = cluster(one, running("3", 4, user="bob", end_s=NOW + 2400), limits={QOS: limits})
    found = allowed(snapshot, submitted=4, touched=True)
    assert found.ok == ok
    assert all(words in reason for reason in found.refused.values())
    assert found.refused


@pytest.mark.parametrize("key", ["assoc:vision", "assoc:vision:alice"])
def test_associations_bind_as_well(key):
    snapshot = cluster(limits={key: Limits(key, max_gpus_per_job=2)})
    assert allowed(snapshot).ok == (1, 2)
    assert allowed(snapshot, replace(JOB, account="language")).ok == COUNTS


def test_parent_accounts_bind_over_all_that_runs_below_them():
    limits = {
        "assoc:root": Limits("account root"),
        "assoc:lab": Limits("account lab", grp_gpus=6, max_gpus_per_job=1, parent="assoc:root"),
        "assoc:vision": Limits("account vision", parent="assoc:lab"),
        "assoc:vision:alice": Limits("user alice", parent="assoc:vision"),
        "assoc:sister": Limits("account sister", parent="assoc:lab"),
    }
    snapshot = cluster(running("2", 4, account="sister", user="bob"), limits=limits)
    found = allowed(snapshot)
    assert found.ok == (1, 2)  # limits per job are those of the own association alone
    assert "account lab allows 6 GPUs at once: 4 in use" in found.refused[4]


def test_a_circle_of_parents_ends():
    limits = {
        "assoc:vision": Limits("a", parent="assoc:lab"),
        "assoc:lab": Limits("b", parent="assoc:vision", grp_gpus=2),
    }
    assert allowed(cluster(limits=limits)).ok == (1, 2)


def test_the_qos_of_the_partition_binds_and_counts_whatever_runs_there():
    limits = {"qos:part": Limits("qos part", grp_gpus=8)}
    snapshot = cluster(running("2", 4, qos="other"), limits=limits, qos="part")
    assert allowed(snapshot).ok == (1, 2, 4)


@pytest.mark.parametrize(("over", "ok"), [(False, (1, 2)), (True, (1, 2, 4, 8))])
def test_the_first_qos_that_names_a_limit_counts(over, ok):
    limits = {
        "qos:part": Limits("qos part", max_gpus_per_job=2),
        QOS: Limits("qos normal", max_gpus_per_job=8, over_partition=over),
        "assoc:vision:alice": Limits("user alice", max_gpus_per_job=1),
    }
    assert allowed(cluster(limits=limits, qos="part")).ok == ok


def test_the_partition_binds_as_well():
    assert allowed(cluster(max_nodes=2)).ok == (1, 2, 4, 8)


def test_a_least_number_of_nodes_binds_what_we_would_write():
    """Of the submitted job, which named no number, Slurm makes as many nodes as it has to."""
    found = allowed(cluster(min_nodes=2), submitted=4, touched=True)
    assert found.ok == (4, 8, 16)
    assert found.refused[1] == "partition main asks for at least 2 nodes per job"


@pytest.mark.parametrize(
    ("waives", "partition", "ok"),
    [
        ({"max_nodes"}, {"max_nodes": 1}, COUNTS),
        ({"min_nodes"}, {"min_nodes": 2}, COUNTS),
        ({"max_time_s"}, {"max_nodes": 1}, (1, 2, 4)),
    ],
)
def test_a_qos_may_go_past_the_partition(waives, partition, ok):
    limits = {QOS: Limits("qos normal", waives=frozenset(waives))}
    assert allowed(cluster(limits=limits, **partition), submitted=4).ok == ok
    usage = usage_of(cluster(limits=limits, max_time_s=600.0))
    assert usage.longest_s(JOB) == (None if "max_time_s" in waives else 600.0)


def test_the_submitted_count_is_slurms_to_check_until_the_job_was_touched():
    snapshot = cluster(running("2", 8), limits={QOS: Limits("qos normal", grp_gpus=8)})
    assert 4 in allowed(snapshot, submitted=4).ok
    assert allowed(snapshot, submitted=4, touched=True).ok == ()


def test_jobs_that_were_let_go_count_as_running():
    pending = replace(running("5", 8), state=JobState.PENDING)
    snapshot = cluster(pending, limits={QOS: Limits("qos normal", grp_gpus=12)})
    size = Size(8, 2, 32, 0)
    assert not usage_of(snapshot).why_over(JOB, size)
    assert usage_of(snapshot, {"5"}).why_over(JOB, size)


def test_the_longest_time():
    limits = {
        QOS: Limits("qos normal", max_wall_s=7200.0),
        "assoc:vision": Limits("assoc vision", max_wall_s=5000.0),
    }
    # What the QOS says goes before the association, as in Slurm; the partition binds always.
    assert usage_of(cluster(limits=limits, max_time_s=9000.0)).longest_s(JOB) == 7200.0
    assert usage_of(cluster(limits=limits, max_time_s=6000.0)).longest_s(JOB) == 6000.0
    del limits[QOS]
    assert usage_of(cluster(limits=limits, max_time_s=6000.0)).longest_s(JOB) == 5000.0
    assert usage_of(cluster()).longest_s(JOB) is None


@pytest.mark.parametrize(
    ("kind", "cpus_per_task", "cpus", "wanted", "found"),
    [
        (ShapeKind.RANK_PER_GPU, 4, 16, (8, 2, 8), (32, 8000)),
        (ShapeKind.LAUNCHER_PER_NODE, 8, 8, (16, 4, 4), (32, 16_000)),
        (ShapeKind.LAUNCHER_PER_NODE, 8, 8, (2, 1, 1), (8, 4000)),
        (ShapeKind.RANK_PER_GPU, 1, 4, (8, 2, 8), (8, 8000)),
        (ShapeKind.RANK_PER_GPU, 1, 16, (8, 2, 8), (32, 8000)),  # --cpus-per-gpu
    ],
)
def test_what_a_size_takes(kind, cpus_per_task, cpus, wanted, found):
    tasks = 4 if kind is ShapeKind.RANK_PER_GPU else 1
    job = replace(JOB, ntasks=tasks, cpus=cpus, memory_mib=4000)
    frame = Frame(kind, 4, 1, tasks, gpus_per_node=4, cpus_per_task=cpus_per_task)
    size = size_of(job, frame, Shape(kind, *wanted))
    assert (size.cpus, size.memory_mib) == found


# -- growth --------------------------------------------------------------------------------------

FOUR, EIGHT, TWO = (Shape(ShapeKind.RANK_PER_GPU, g, -(-g // 4), g) for g in (4, 8, 2))


def other(priority: int, start_s: float | None, **more: object) -> Job:
    return replace(  # type: ignore[arg-type]
        JOB, job_id="9", base_id=9, user="bob", priority=priority, start_s=start_s, **more
    )


def refusal(snapshot: Snapshot, wanted: Shape, limit_s: float | None) -> str:
    guard = GrowthGuard(snapshot, {"1"}, PoolIndex(snapshot))
    return guard.refusal(JOB, wanted, limit_s, FOUR, 3600.0)


@pytest.mark.parametrize(
    ("foreign", "wanted", "limit_s", "refused"),
    [
        (other(900, NOW + 1000), EIGHT, 1800.0, True),  # would run into the promise
        (other(900, NOW + 2000), EIGHT, 1800.0, False),  # ends before
        (other(900, None), EIGHT, 60.0, True),  # stands ahead and nothing is promised yet
        (other(100, None), EIGHT, 60.0, False),  # stands behind and nothing is promised
        (other(100, NOW + 1000), EIGHT, 1800.0, True),  # a promise is a promise
        (other(900, NOW + 1000), FOUR, 3600.0, False),  # as submitted
        (other(900, NOW + 1000), TWO, 3600.0, False),  # smaller, not longer
        (other(900, NOW + 5000), TWO, 7200.0, True),  # longer than the promise allows
        (other(100, NOW + 5000), TWO, 7200.0, False),  # longer, in front of one behind
        (other(900, NOW + 1000, partitions=("far",)), EIGHT, 1800.0, False),  # other nodes
        (other(900, NOW + 1000, eligible=False), EIGHT, 1800.0, False),
        (other(900, None, reason="PartitionTimeLimit"), EIGHT, 60.0, False),  # never starts
        # In another of its partitions it may.
        (other(900, None, reason="PartitionTimeLimit", partitions=("main", "far")), EIGHT, 9, True),
    ],
)
def test_growth_and_longer_limits(foreign, wanted, limit_s, refused):
    assert bool(refusal(cluster(foreign), wanted, limit_s)) is refused


def test_among_jobs_that_are_all_planned_nothing_is_refused():
    snapshot = cluster(other(900, NOW + 1000))
    guard = GrowthGuard(snapshot, {"1", "9"}, PoolIndex(snapshot))
    assert guard.refusal(JOB, EIGHT, 7200.0, FOUR, 3600.0) == ""

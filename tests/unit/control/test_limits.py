"""Limits that Slurm checks no more once we have changed a job, and the guard against growth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.growth import GrowthGuard
from slurm_ext.control.limits import allowed_counts, longest_s, usage_of, why_over_limit
from slurm_ext.control.pools import PoolIndex
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
    qos="normal",
    account="vision",
    priority=500,
    time_limit_s=3600.0,
)
NODES = tuple(Node(f"n{i}", gpus=4) for i in range(1, 5))
COUNTS = (1, 2, 4, 8, 16)


def running(job_id: str, gpus: int, **more: object) -> Job:
    base = replace(JOB, job_id=job_id, base_id=int(job_id), state=JobState.RUNNING)
    return replace(base, gpus=gpus, nodes=-(-gpus // 4), **more)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("limits", "ok", "words"),
    [
        (Limits("qos normal", max_gpus_per_job=4), (1, 2, 4), "4 GPUs per job"),
        (Limits("qos normal", max_nodes_per_job=2), (1, 2, 4, 8), "2 nodes per job"),
        (Limits("qos normal", min_gpus_per_job=4), (4, 8, 16), "at least 4 GPUs"),
        (Limits("qos normal", max_cpus_per_job=32), (1, 2, 4, 8), "32 CPUs per job"),
        (Limits("qos normal", grp_gpus=12), (1, 2, 4), "8 in use"),
        (Limits("qos normal", grp_nodes=4), (1, 2, 4, 8), "2 in use"),
        (Limits("qos normal", max_gpus_per_user=6), (1, 2), "4 in use"),
        (Limits("qos normal", max_nodes_per_user=2), (1, 2, 4), "1 in use"),
    ],
)
def test_each_limit(limits, ok, words):
    snapshot = cluster(running("2", 4), running("3", 4, user="bob"), limits={"qos:normal": limits})
    found = allowed_counts(JOB, COUNTS, snapshot, 4, submitted=4, touched=True)
    assert found.ok == ok
    assert all(words in reason for reason in found.refused.values())
    assert found.refused


@pytest.mark.parametrize("key", ["assoc:vision", "assoc:vision:alice"])
def test_associations_bind_as_well(key):
    snapshot = cluster(limits={key: Limits(key, max_gpus_per_job=2)})
    assert allowed_counts(JOB, COUNTS, snapshot, 4).ok == (1, 2)
    other = replace(JOB, account="language")
    assert allowed_counts(other, COUNTS, snapshot, 4).ok == COUNTS


def test_the_partition_binds_as_well():
    assert allowed_counts(JOB, COUNTS, cluster(max_nodes=2), 4).ok == (1, 2, 4, 8)


def test_the_submitted_count_is_slurms_to_check_until_the_job_was_touched():
    snapshot = cluster(running("2", 8), limits={"qos:normal": Limits("qos normal", grp_gpus=8)})
    assert 4 in allowed_counts(JOB, COUNTS, snapshot, 4, submitted=4).ok
    assert allowed_counts(JOB, COUNTS, snapshot, 4, submitted=4, touched=True).ok == ()


def test_jobs_that_were_let_go_count_as_running():
    pending = replace(running("5", 8), state=JobState.PENDING)
    snapshot = cluster(pending, limits={"qos:normal": Limits("qos normal", grp_gpus=12)})
    assert not why_over_limit(JOB, 8, 2, snapshot, usage_of(snapshot))
    assert why_over_limit(JOB, 8, 2, snapshot, usage_of(snapshot, {"5"}))


def test_the_longest_time():
    limits = {
        "qos:normal": Limits("qos normal", max_wall_s=7200.0),
        "assoc:vision": Limits("assoc vision", max_wall_s=5000.0),
    }
    assert longest_s(JOB, cluster(limits=limits, max_time_s=6000.0)) == 5000.0
    assert longest_s(JOB, cluster(max_time_s=6000.0)) == 6000.0
    assert longest_s(JOB, cluster()) is None


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
    ],
)
def test_growth_and_longer_limits(foreign, wanted, limit_s, refused):
    assert bool(refusal(cluster(foreign), wanted, limit_s)) is refused


def test_among_jobs_that_are_all_planned_nothing_is_refused():
    snapshot = cluster(other(900, NOW + 1000))
    guard = GrowthGuard(snapshot, {"1", "9"}, PoolIndex(snapshot))
    assert guard.refusal(JOB, EIGHT, 7200.0, FOUR, 3600.0) == ""

"""Pools: which nodes a job competes for."""

from __future__ import annotations

import pytest

from slurm_ext.control.features import parse_features
from slurm_ext.control.pools import PoolIndex, build_pools, overlaps, pool_of
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node, Partition, Reservation
from slurm_ext.domain.snapshot import Snapshot

NODES = (
    Node("n1", gpus=4, gpu_type="v100", features=frozenset({"nvlink", "old"})),
    Node("n2", gpus=4, gpu_type="v100", features=frozenset({"old"})),
    Node("n3", gpus=8, gpu_type="h100", features=frozenset({"nvlink"})),
    Node("n4", gpus=8, gpu_type="h100", features=frozenset(), available=False),
    Node("n5", gpus=0),
)
PARTITIONS = (
    Partition("main", ("n1", "n2", "n3", "n4", "n5")),
    Partition("small", ("n1",)),
    Partition("far", ("n3",)),
)


def job(partitions: tuple[str, ...] = ("main",), **more: object) -> Job:
    fields = {"gpus": 1, "time_limit_s": 3600.0, **more}
    return Job("1", 1, "alice", partitions, JobState.PENDING, 0.0, **fields)  # type: ignore[arg-type]


def snapshot(*jobs: Job, reservations: tuple[Reservation, ...] = (), now: float = 1000.0):
    return Snapshot(now, jobs, NODES, PARTITIONS, reservations)


def names(found: Job, **more: object) -> tuple[str, ...]:
    pool = pool_of(found, snapshot(found, **more))  # type: ignore[arg-type]
    return tuple(n.name for n in pool.nodes) if pool is not None else ()


def test_a_pool_holds_the_gpu_nodes_of_the_partition_the_down_ones_too():
    assert names(job()) == ("n1", "n2", "n3", "n4")
    pool = pool_of(job(), snapshot(job()))
    assert pool is not None
    assert pool.gpus == 16  # n4 is down


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"gpu_type": "h100"}, ("n3", "n4")),
        ({"features": "nvlink&old"}, ("n1",)),
        ({"features": "nvlink|old"}, ("n1", "n2", "n3")),
        ({"features": "(nvlink|old)&old"}, ("n1", "n2")),
        ({"exc_nodes": ("n1", "n3")}, ("n2", "n4")),
        ({"features": "nvlink", "gpu_type": "v100"}, ("n1",)),
        ({"features": "nowhere"}, ()),
        ({"gpus": 0}, ()),
        ({"partitions": ("main", "small")}, ()),
        ({"partitions": ("unknown",)}, ()),
    ],
)
def test_what_narrows_a_pool(more, expected):
    assert names(job(**more)) == expected


def test_a_reservation_closes_its_nodes_while_it_lasts_and_to_jobs_that_reach_into_it():
    now_running = Reservation("maint", ("n1",), 0.0, 5000.0)
    soon = Reservation("maint", ("n1",), 3000.0, 9000.0)
    over = Reservation("maint", ("n1",), 0.0, 900.0)
    assert "n1" not in names(job(), reservations=(now_running,))
    assert "n1" not in names(job(time_limit_s=3600.0), reservations=(soon,))
    assert "n1" in names(job(time_limit_s=1800.0), reservations=(soon,))
    assert "n1" not in names(job(time_limit_s=None), reservations=(soon,))
    assert "n1" in names(job(), reservations=(over,))
    assert names(job(reservation="maint"), reservations=(now_running,)) == ("n1",)


def test_pools_that_differ_have_different_keys_and_equal_ones_the_same():
    jobs = (job(), job(features="old"), job(gpu_type="h100"), job(exc_nodes=("n1",)), job())
    assert len(build_pools(snapshot(*jobs))) == 4


def test_pools_overlap_through_shared_nodes():
    jobs = (job(), job(("small",)), job(("far",)), job(gpu_type="v100"))
    pools = build_pools(snapshot(*jobs))
    groups = overlaps({k: p for k, p in pools.items() if p.partition != "main"})
    assert len(groups) == 2
    assert len(overlaps(pools)) == 1


def test_a_pool_is_worked_out_once():
    index = PoolIndex(snapshot(job()))
    assert index.pool_of(job()) is index.pool_of(job())


@pytest.mark.parametrize("expression", ["[rack1|rack2]", "nvlink*2&old*1", "a&(b", "a b", "a=b"])
def test_expressions_that_tie_nodes_to_the_size_or_cannot_be_read(expression):
    assert parse_features(expression).tied


def test_a_plain_expression_is_not_tied():
    rule = parse_features("a&b|c")
    assert not rule.tied
    assert rule.admits(frozenset({"c"}))
    assert not rule.admits(frozenset({"a"}))
    assert parse_features("").admits(frozenset())

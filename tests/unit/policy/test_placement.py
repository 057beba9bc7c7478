"""Seats: fewest nodes, whole nodes first, best fit for fragments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.node import Node, Topology
from slurm_ext.policy.placement import Request, TopologyRule, seat
from tests.unit.policy.build import nodes, placement


def test_a_fragment_takes_the_tightest_node() -> None:
    seating = seat([Request("1", (2,))], nodes(3, used=[0, 2, 1]))
    assert seating.seats == {"1": ("n01",)}


def test_whole_nodes_are_seated_before_fragments_whatever_the_queue_order() -> None:
    seating = seat([Request("1", (1,)), Request("2", (4, 4))], nodes(2, used=[0, 0]))
    assert seating.seats == {"2": ("n00", "n01")}
    assert seating.unseated == ("1",)


def test_a_placement_is_kept_exactly() -> None:
    # Eight GPUs are free, but not as two whole nodes: at (4, 4) this was never measured otherwise.
    seating = seat([Request("1", (4, 4))], nodes(3, used=[0, 2, 2]))
    assert seating.unseated == ("1",)


def test_excluded_unavailable_and_full_nodes_are_not_used() -> None:
    machines = (
        Node("a", gpus=4, cpus=8, available=False),
        Node("b", gpus=4, cpus=8),
        Node("c", gpus=4, cpus=8, cpus_alloc=7),
        Node("d", gpus=4, cpus=8),
    )
    request = Request("1", (2,), cpus=2.0, excluded=frozenset({"b"}))
    assert seat([request], machines).seats == {"1": ("d",)}


def test_memory_counts_only_where_the_node_tracks_it() -> None:
    machines = (
        Node("a", gpus=4, cpus=8, memory_mib=1000, memory_alloc_mib=900),
        Node("b", gpus=4, cpus=8, memory_mib=1),
    )
    assert seat([Request("1", (1,), memory_mib=200)], machines).seats == {"1": ("b",)}


def test_an_exclusive_job_wants_an_idle_node() -> None:
    seating = seat([Request("1", (2,), exclusive=True)], nodes(2, used=[1, 0]))
    assert seating.seats == {"1": ("n01",)}


TREE = Topology(leaf_of={"n00": "s1", "n01": "s2", "n02": "s2", "n03": "s1"})


def test_one_leaf_switch_is_preferred() -> None:
    seating = seat([Request("1", (4, 4))], nodes(3), TREE)
    assert seating.seats == {"1": ("n01", "n02")}


def test_a_required_switch_is_not_left() -> None:
    machines = nodes(2)
    assert seat([Request("1", (4, 4))], machines, TREE, TopologyRule.REQUIRED).unseated == ("1",)
    assert seat([Request("1", (4, 4))], machines, TREE, TopologyRule.PREFERRED).seats


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16]), max_size=8),
)
def test_no_gpu_is_given_twice(used: list[int], counts: list[int]) -> None:
    machines = nodes(len(used), used=used)
    requests = [Request(str(i), placement(g)) for i, g in enumerate(counts)]
    seating = seat(requests, machines)
    taken = {n.name: 0 for n in machines}
    for request in requests:
        names = seating.seats.get(request.job_id)
        if names is None:
            assert request.job_id in seating.unseated
            continue
        assert len(set(names)) == len(request.placement)
        for name, share in zip(names, sorted(request.placement, reverse=True), strict=True):
            taken[name] += share
    for node in machines:
        assert taken[node.name] <= node.gpus_free

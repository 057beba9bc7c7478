"""Ordering: our jobs permute the places that they hold, with the fewest writes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.control.order import MIN_SUM, Place, competing_sets, order_places
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Partition
from slurm_ext.domain.snapshot import Snapshot


def slurms_order(places: Sequence[Place], sums: Mapping[str, int]) -> list[str]:
    """Slurm sorts by priority, then by job id."""
    return [p.job_id for p in sorted(places, key=lambda p: (-sums[p.job_id], p.number))]


def native_order(places: Sequence[Place]) -> list[str]:
    return slurms_order(places, {p.job_id: p.native if p.ours else p.present for p in places})


def applied(places: Sequence[Place], factors: Mapping[str, int]) -> dict[str, int]:
    """Sums after the factors were written; Slurm lifts anything below 1."""
    return {
        p.job_id: max(1, p.native + factors[p.job_id]) if p.job_id in factors else p.present
        for p in places
    }


def ours(number: int, native: int, factor: int = 0, group: str = "main|normal") -> Place:
    return Place(str(number), number, native, native + factor, group)


def foreign(number: int, priority: int) -> Place:
    return Place(str(number), number, priority, priority)


def test_two_of_ours_swap_places_around_a_foreign_job_that_keeps_its_own():
    queue = [ours(1, 300), foreign(2, 200), ours(3, 100)]
    result = order_places(queue, ["3", "1"], head=200)
    assert slurms_order(queue, applied(queue, result.factors)) == ["3", "2", "1"]
    assert result.factors == {"3": 200, "1": -200}


def test_nothing_is_written_where_the_order_is_right_whatever_the_numbers():
    queue = [ours(1, 950, factor=990), foreign(2, 900), ours(3, 850, factor=-3)]
    assert order_places(queue, ["1", "3"], head=200).factors == {}


def test_one_job_moves_to_the_front_with_one_write():
    queue = [ours(i, 1000 - i) for i in range(1, 101)]
    wanted = ["100", *(str(i) for i in range(1, 100))]
    result = order_places(queue, wanted, head=200)
    assert set(result.factors) == {"100"}
    assert slurms_order(queue, applied(queue, result.factors))[0] == "100"


def test_equal_priorities_are_split_by_offsets():
    queue = [ours(i, 500) for i in (1, 2, 3)]
    result = order_places(queue, ["3", "2", "1"], head=200)
    assert slurms_order(queue, applied(queue, result.factors)) == ["3", "2", "1"]
    assert len(result.factors) == 2


def test_a_tie_with_a_foreign_job_puts_ours_behind():
    queue = [ours(1, 500), foreign(2, 500), ours(3, 500), foreign(4, 500)]
    result = order_places(queue, ["3", "1"], head=200)
    order = slurms_order(queue, applied(queue, result.factors))
    assert order.index("3") < order.index("1")
    assert order.index("2") <= 1
    assert order.index("4") <= 3
    assert order == ["3", "2", "4", "1"]


def test_only_the_head_is_put_in_order_and_the_rest_stays_behind_as_it_stands():
    queue = [ours(i, 1000 - i) for i in range(1, 11)]
    wanted = [str(i) for i in range(10, 0, -1)]
    order = slurms_order(queue, applied(queue, order_places(queue, wanted, head=2).factors))
    assert order == ["10", "9", "1", "2", "3", "4", "5", "6", "7", "8"]


def test_groups_permute_only_among_themselves():
    queue = [ours(1, 400, group="a"), ours(2, 300, group="b"), ours(3, 200, group="a")]
    order = slurms_order(
        queue, applied(queue, order_places(queue, ["2", "3", "1"], head=200).factors)
    )
    assert order == ["3", "2", "1"]


def test_priorities_at_slurms_minimum_leave_the_native_order_and_say_so():
    queue = [foreign(1, 1), ours(2, 1), foreign(3, 1), ours(4, 1, factor=5)]
    result = order_places(queue, ["4", "2"], head=200)
    assert result.factors == {"4": 0}
    assert "no room" in result.refusal


def test_without_foreign_jobs_even_the_minimum_can_be_ordered():
    queue = [ours(1, 1), ours(2, 1)]
    result = order_places(queue, ["2", "1"], head=200)
    sums = applied(queue, result.factors)
    assert slurms_order(queue, sums) == ["2", "1"]
    assert all(sums[job] >= MIN_SUM for job in result.factors)


def test_what_is_written_keeps_a_distance_so_that_rounding_does_not_turn_the_order():
    queue = [ours(i, 500) for i in range(1, 9)]
    wanted = [str(i) for i in range(8, 0, -1)]
    sums = applied(queue, order_places(queue, wanted, head=200).factors)
    values = [sums[job] for job in wanted]
    assert min(a - b for a, b in itertools.pairwise(values)) >= 2


_row = st.tuples(
    st.sampled_from([1, 2, 3, 5, 10, 11, 12, 1000]),
    st.integers(-12, 12),
    st.sampled_from(["", "", "a", "a", "a", "b"]),
)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(_row, min_size=1, max_size=10), data=st.data())
def test_order_invariants(rows: list[tuple[int, int, str]], data: st.DataObject):
    numbers = data.draw(st.permutations(range(len(rows))))
    places = [
        Place(str(n), n, native, max(1, native + factor) if group else native, group)
        for n, (native, factor, group) in zip(numbers, rows, strict=True)
    ]
    wanted = data.draw(st.permutations([p.job_id for p in places if p.ours]))
    head = data.draw(st.integers(1, len(rows)))
    result = order_places(places, wanted, head)
    sums = applied(places, result.factors)
    got, native = slurms_order(places, sums), native_order(places)

    assert got == list(result.sequence)
    for place in places:
        if not place.ours:
            assert place.job_id not in result.factors
            before = {p.job_id for p in places if p.ours}
            ahead_now = [j for j in got[: got.index(place.job_id)] if j in before]
            ahead_then = [j for j in native[: native.index(place.job_id)] if j in before]
            assert len(ahead_now) <= len(ahead_then)
    assert all(abs(value) <= 2**31 - 4 for value in result.factors.values())
    if result.refusal:
        assert got == native
        return
    for group in "ab":
        members = [p.job_id for p in places if p.group == group]
        first = [job for job in wanted[:head] if job in members]
        assert [job for job in got if job in members][: len(first)] == first
    again = [Place(p.job_id, p.number, p.native, sums[p.job_id], p.group) for p in places]
    assert order_places(again, wanted, head).factors == {}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7, unique=True), st.data())
def test_no_fewer_writes_would_do(natives: list[int], data: st.DataObject):
    """Against trying all subsets to keep: unit gaps are enough where numbers are far apart."""
    places = [ours(i, 100 * n) for i, n in enumerate(natives)]
    wanted = data.draw(st.permutations([p.job_id for p in places]))
    found = len(order_places(places, wanted, head=200).factors)
    by_id = {p.job_id: p for p in places}
    fewest = len(places)
    for mask in range(1 << len(places)):
        kept = [by_id[job] for i, job in enumerate(wanted) if mask >> i & 1]
        if all(a.present > b.present for a, b in itertools.pairwise(kept)):
            fewest = min(fewest, len(places) - len(kept))
    assert found == fewest


def _job(job_id: str, *partitions: str) -> Job:
    return Job(job_id, int(job_id), "alice", partitions, JobState.PENDING, 0.0)


def test_partitions_compete_if_they_share_nodes_and_have_one_tier():
    snapshot = Snapshot(
        0.0,
        (),
        (),
        (
            Partition("a", ("n1", "n2")),
            Partition("b", ("n2", "n3")),
            Partition("c", ("n4",)),
            Partition("high", ("n1",), priority_tier=2),
        ),
    )
    sets = competing_sets(snapshot, [])
    assert sets["a"] == sets["b"]
    assert len({sets["a"], sets["c"], sets["high"]}) == 3
    tied = competing_sets(snapshot, [_job("1", "a", "c")])
    assert tied["a"] == tied["c"]


def test_several_that_find_no_room_go_behind_in_the_wanted_order():
    queue = [foreign(0, 500), *(ours(i, 500) for i in (5, 6, 7, 8)), foreign(9, 500)]
    order = slurms_order(
        queue, applied(queue, order_places(queue, ["8", "7", "6", "5"], head=200).factors)
    )
    assert order == ["0", "8", "9", "7", "6", "5"]

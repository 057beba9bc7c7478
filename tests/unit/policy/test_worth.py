"""What is left out of a knapsack changes nothing in its value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.optimize.problem import Item, Option, Problem
from slurm_ext.optimize.solve import allocate
from slurm_ext.policy.worth import Way, worth_solving


@dataclass(frozen=True)
class Thing:
    """A job: its options, and whether it is one of a kind."""

    key: str
    options: tuple[tuple[int, float], ...]
    special: bool = False

    def ways(self) -> list[Way] | None:
        if self.special:
            return None
        return [Way(gpus, (gpus,), value) for gpus, value in self.options]


# Few different values, so that ties are common.
options = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 8).map(float)),
    min_size=1,
    max_size=3,
    unique_by=lambda option: option[0],
)
things = st.lists(st.tuples(options, st.booleans()), min_size=1, max_size=14).map(
    lambda rows: [
        Thing(f"t{n:02}", tuple(sorted(each)), special and n % 3 == 0)
        for n, (each, special) in enumerate(rows)
    ]
)


def best(every: list[Thing], gpus: int) -> float:
    items = tuple(Item(t.key, tuple(Option(*option) for option in t.options)) for t in every)
    return allocate(Problem(items, gpus)).value


@given(every=things, gpus=st.integers(1, 12))
def test_the_best_value_stays(every: list[Thing], gpus: int) -> None:
    kept = worth_solving(every, gpus, Thing.ways)
    assert best(kept, gpus) == best(every, gpus)
    assert [thing for thing in every if thing in kept] == kept  # in their order
    assert all(thing in kept for thing in every if thing.special)


def rigid(count: int, gpus: int = 1) -> list[Thing]:
    return [Thing(f"r{n:03}", ((gpus, 1.0 + n),)) for n in range(count)]


def test_of_a_long_queue_few_are_left() -> None:
    assert [t.key for t in worth_solving(rigid(500, 2), 8, Thing.ways)] == [
        "r496",
        "r497",
        "r498",
        "r499",
    ]
    elastic = [Thing(f"e{n:03}", ((1, 1.0 + n), (2, 2.0 + n))) for n in range(500)]
    assert len(worth_solving(elastic, 8, Thing.ways)) == 8


def test_jobs_of_equal_worth_are_taken_in_order() -> None:
    same = [Thing(f"s{n}", ((1, 5.0),)) for n in range(9)]
    assert [t.key for t in worth_solving(same, 3, Thing.ways)] == ["s0", "s1", "s2"]


@pytest.mark.parametrize(("seats", "left"), [(2, 2), (0, 0), (9, 4)])
def test_no_more_than_there_are_seats_for(seats: int, left: int) -> None:
    assert len(worth_solving(rigid(9, 2), 8, Thing.ways, {(2,): seats})) == left


def test_a_shape_without_a_seat_is_no_way_to_run() -> None:
    both = Thing("b", ((1, 1.0), (4, 9.0)))
    large = Thing("l", ((2, 1.0), (4, 9.0)))
    assert worth_solving([both, large], 4, Thing.ways, {(4,): 0, (2,): 0}) == [both]

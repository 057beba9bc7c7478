"""A user's habit from past runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.estimate.history import MAX_FACTOR, RUNS_KEPT, Declared, PastRun, habits


def runs(*ratios: float, user: str = "ann") -> list[PastRun]:
    return [PastRun(user, 100.0, 100.0 * r) for r in ratios]


def test_median_of_the_user_alone() -> None:
    found = habits(runs(1.0, 1.4, 3.0) + runs(9.0, user="bob"))
    assert found["ann", Declared.LIMIT].factor == pytest.approx(1.4)
    assert found["ann", Declared.LIMIT].runs == 3
    assert found["bob", Declared.LIMIT].factor == pytest.approx(9.0)


def test_never_below_one() -> None:
    habit = habits(runs(0.2, 0.3, 0.4))["ann", Declared.LIMIT]
    assert habit.factor == 1.0
    assert (habit.low, habit.high) == pytest.approx((0.2, 0.4))


def test_kinds_are_apart() -> None:
    found = habits([PastRun("ann", 10, 30, Declared.WORK), PastRun("ann", 10, 10)])
    assert found["ann", Declared.WORK].factor == 3.0
    assert found["ann", Declared.LIMIT].factor == 1.0


def test_only_the_latest_count() -> None:
    assert habits(runs(*[5.0] * 100, *[2.0] * RUNS_KEPT))["ann", Declared.LIMIT].factor == 2.0


def test_runs_that_say_nothing_are_left_out() -> None:
    assert habits([PastRun("ann", 0.0, 5.0), PastRun("ann", 5.0, 0.0)]) == {}


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=80))
def test_bounded_and_ordered(ratios: list[float]) -> None:
    habit = habits(runs(*ratios))["ann", Declared.LIMIT]
    assert 1.0 <= habit.factor <= MAX_FACTOR
    assert 0 < habit.low <= habit.high <= MAX_FACTOR
    assert habit.runs == min(len(ratios), RUNS_KEPT)

"""The exact solver against enumeration, the plain recurrence, and its own bounds."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.optimize import knapsack
from slurm_ext.optimize.greedy import solve_greedy
from slurm_ext.optimize.knapsack import KnapsackLimitError, solve_exact
from slurm_ext.optimize.lp import lp_bound
from slurm_ext.optimize.problem import Item, Option, Problem, gpus_used, value_of
from slurm_ext.optimize.recurrence import solve_unpruned
from slurm_ext.optimize.solve import allocate
from tests.unit.optimize.problems import (
    by_enumeration,
    exact_value,
    problems,
    stopping_after,
    tie_values,
    wide_values,
)


def correlated(items: int, capacity: int, seed: int) -> Problem:
    """Values close to the GPUs they cost: the price tells options apart badly, so that pruning
    leaves much to the recurrence."""
    draw = random.Random(seed)
    return Problem(
        tuple(
            Item(
                f"job{i}",
                tuple(
                    Option(gpus, gpus + draw.choice([2.0, 3.0, 5.0]))
                    for gpus in sorted(draw.sample(range(3, 60), 6))
                ),
            )
            for i in range(items)
        ),
        capacity,
    )


@settings(max_examples=150, deadline=None)
@given(problems(tie_values))
def test_is_the_optimum_with_the_documented_tie_break(problem: Problem) -> None:
    solution = solve_exact(problem)
    assert dict(solution.chosen) == by_enumeration(problem)
    assert list(solution.chosen) == [i.key for i in problem.items if i.key in solution.chosen]
    assert solution.optimal
    assert solution.gap == 0.0
    assert solution.bound == solution.value == value_of(problem.items, solution.chosen)


@settings(max_examples=100, deadline=None)
@given(problems(wide_values))
def test_is_the_optimum_over_twelve_orders_of_magnitude(problem: Problem) -> None:
    best = float(exact_value(problem.items, by_enumeration(problem)))
    assert solve_exact(problem).value == pytest.approx(best, rel=1e-12, abs=0.0)


@settings(max_examples=80, deadline=None)
@given(problems(st.one_of(tie_values, wide_values), most_items=30))
def test_invariants(problem: Problem) -> None:
    exact, greedy, bound = solve_exact(problem), solve_greedy(problem), lp_bound(problem)
    for solution in (exact, greedy):
        assert gpus_used(problem.items, solution.chosen) <= problem.capacity
        assert all(
            problem.items[int(k[3:])].options[j].value > 0 for k, j in solution.chosen.items()
        )
    assert greedy.value <= exact.value * (1 + 1e-12)
    assert greedy.value >= exact.value / 2 * (1 - 1e-12)
    assert exact.value <= greedy.bound * (1 + 1e-12)
    assert exact.value <= bound
    assert exact.value == pytest.approx(solve_unpruned(problem).value, rel=1e-12, abs=0.0)
    if greedy.optimal:
        assert greedy.value == pytest.approx(exact.value, rel=1e-12, abs=0.0)
        assert greedy.gap == 0.0


@settings(max_examples=50, deadline=None)
@given(problems(st.one_of(tie_values, wide_values), most_items=12), st.randoms())
def test_order_of_items_does_not_change_the_value(problem: Problem, draw: random.Random) -> None:
    shuffled = list(problem.items)
    draw.shuffle(shuffled)
    other = solve_exact(Problem(tuple(shuffled), problem.capacity))
    one = solve_exact(problem)
    assert other.value == pytest.approx(one.value, rel=1e-14, abs=0.0)
    assert gpus_used(problem.items, other.chosen) == gpus_used(problem.items, one.chosen)


@settings(max_examples=50, deadline=None)
@given(problems(wide_values, most_items=12))
def test_more_gpus_are_never_worth_less(problem: Problem) -> None:
    values = [
        solve_exact(Problem(problem.items, capacity)).value
        for capacity in range(problem.capacity + 1)
    ]
    assert all(less <= more * (1 + 1e-12) for less, more in pairwise(values))


@pytest.mark.parametrize("seed", range(4))
def test_where_pruning_finds_little(seed: int) -> None:
    problem = correlated(60, 400, seed)
    solution = solve_exact(problem)
    assert int(solution.note.split()[0]) > 10, "the case is meant to reach the recurrence"
    assert solution.value == solve_unpruned(problem).value


@pytest.mark.parametrize("first_ways", [0, 5, 10**6])
def test_the_first_slack_changes_nothing_but_the_time(
    monkeypatch: pytest.MonkeyPatch, first_ways: int
) -> None:
    cases = [correlated(n, 40 * n // 7, seed) for seed, n in enumerate([1, 2, 7, 30, 50])]
    expected = [solve_exact(problem).chosen for problem in cases]
    monkeypatch.setattr(knapsack, "_FIRST_WAYS", first_ways)
    assert [solve_exact(problem).chosen for problem in cases] == expected


@settings(max_examples=80, deadline=None)
@given(problems(tie_values), st.integers(0, 3))
def test_ties_survive_every_first_slack(problem: Problem, first_ways: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "_FIRST_WAYS", first_ways)
        patch.setattr(knapsack, "_GROWTH", 2)
        assert dict(solve_exact(problem).chosen) == by_enumeration(problem)


@pytest.mark.parametrize("trim_from", [1, 10**9])
@pytest.mark.parametrize("save_memory", [False, True])
def test_saving_memory_and_trimming_change_nothing(
    monkeypatch: pytest.MonkeyPatch, save_memory: bool, trim_from: int
) -> None:
    cases = [correlated(n, 40 * n // 7, seed) for seed, n in enumerate([1, 2, 7, 30, 50])]
    expected = [solve_exact(problem) for problem in cases]
    blocks: list[int] = []

    def counted(core: knapsack._Core, begin: int, *rest: Any) -> list[knapsack._Stage]:
        blocks.append(begin)
        return original(core, begin, *rest)

    original = knapsack._stages
    monkeypatch.setattr(knapsack, "_stages", counted)
    monkeypatch.setattr(knapsack, "_TRIM_FROM", trim_from)
    if save_memory:
        monkeypatch.setattr(knapsack, "_MAX_STATES", 4000)
    assert [solve_exact(problem) for problem in cases] == expected
    assert any(begin > 0 for begin in blocks) == save_memory


def test_a_capacity_too_large_for_the_recurrence_is_answered_by_greedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = correlated(50, 300, 0)
    monkeypatch.setattr(knapsack, "_MAX_STATES", 3)
    solution = allocate(problem)
    assert solution.solver == "greedy"
    assert "too many for the recurrence" in solution.note


def test_time_limit_inside_the_recurrence_falls_back_to_greedy_with_a_gap() -> None:
    problem = correlated(60, 400, 1)
    exact = solve_exact(problem)
    with pytest.raises(KnapsackLimitError, match="time limit"):
        solve_exact(problem, 1.0, clock=stopping_after(5))
    late = allocate(problem, 1.0, clock=stopping_after(5))
    assert late.solver == "greedy"
    assert "time limit" in late.note
    assert not late.optimal
    assert late.value <= exact.value <= late.bound
    assert late.gap == pytest.approx((late.bound - late.value) / late.bound)
    assert 0.0 < late.gap < 0.05
    assert gpus_used(problem.items, late.chosen) <= problem.capacity


@pytest.mark.parametrize("limit_s", [0.0, -1.0])
def test_no_time_at_all_still_gives_an_answer(limit_s: float) -> None:
    solution = allocate(correlated(60, 400, 2), limit_s)
    assert solution.solver == "greedy"
    assert solution.value > 0.0


def test_equal_input_gives_equal_output() -> None:
    assert allocate(correlated(40, 200, 3)) == allocate(correlated(40, 200, 3))


class TestDegenerate:
    def test_nothing(self) -> None:
        for problem in (Problem((), 0), Problem((), 8), Problem((Item("a", ()),), 8)):
            assert allocate(problem).chosen == {}
            assert allocate(problem).value == 0.0
            assert allocate(problem).optimal
            assert lp_bound(problem) == pytest.approx(0.0, abs=1e-300)
            assert solve_greedy(problem).optimal

    def test_no_free_gpus(self) -> None:
        problem = Problem((Item("a", (Option(1, 5.0), Option(0, 1.0))),), 0)
        assert allocate(problem).chosen == {"a": 1}
        assert solve_greedy(problem).chosen == {"a": 1}

    def test_option_larger_than_the_capacity(self) -> None:
        problem = Problem(
            (Item("a", (Option(9, 5.0), Option(2, 1.0))), Item("b", (Option(9, 9.0),))), 8
        )
        assert allocate(problem).chosen == {"a": 1}

    def test_capacity_beyond_all_demand(self) -> None:
        problem = Problem(
            tuple(Item(str(i), (Option(1, 1.0), Option(8, 1.5))) for i in range(5)), 2**31 - 1
        )
        assert allocate(problem).chosen == {str(i): 1 for i in range(5)}

    def test_equal_values_serve_the_first_with_the_fewest_gpus(self) -> None:
        problem = Problem(
            tuple(Item(str(i), (Option(2, 1.0), Option(1, 1.0))) for i in range(5)), 3
        )
        assert allocate(problem).chosen == {"0": 1, "1": 1, "2": 1}

    def test_options_worth_nothing_are_never_chosen(self) -> None:
        problem = Problem((Item("a", (Option(1, 0.0),)), Item("b", (Option(1, 1e-300),))), 8)
        assert allocate(problem).chosen == {"b": 0}

    @pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e3, 1e300])
    def test_the_unit_of_value_does_not_matter(self, scale: float) -> None:
        problem = Problem(
            (
                Item("a", (Option(1, 1.0 * scale), Option(2, 1.9 * scale))),
                Item("b", (Option(1, 0.8 * scale), Option(2, 1.0 * scale))),
                Item("c", (Option(2, 1.6 * scale),)),
            ),
            3,
        )
        assert allocate(problem).chosen == {"a": 1, "b": 0}

    def test_a_trifle_beside_a_giant_is_still_served(self) -> None:
        problem = Problem((Item("a", (Option(1, 1e-30),)), Item("b", (Option(1, 1e3),))), 2)
        assert allocate(problem).chosen == {"a": 0, "b": 0}

    def test_values_whose_sum_overflows(self) -> None:
        problem = Problem(tuple(Item(str(i), (Option(1, 1.7e308),)) for i in range(3)), 1)
        assert allocate(problem).chosen == {"0": 0}

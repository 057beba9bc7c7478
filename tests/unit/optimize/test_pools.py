"""Overlapping pools and group limits: feasibility, optimality, and what is left without HiGHS."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize import solve
from slurm_ext.optimize.components import split
from slurm_ext.optimize.milp import solve_milp
from slurm_ext.optimize.pools import cells_of, greedy_pools, is_feasible
from slurm_ext.optimize.problem import (
    Cell,
    Item,
    Limit,
    Option,
    Pool,
    PoolProblem,
    Solution,
)
from slurm_ext.optimize.solve import allocate_pools
from tests.unit.optimize.problems import (
    best_pool_value,
    choices,
    exact_value,
    pool_problems,
    pools_allow,
    stopping_after,
)


def overlapping(limits: tuple[Limit, ...] = ()) -> PoolProblem:
    """Partition "all" has nodes n1..n4, "fast" only n3 and n4; 4 GPUs each, n2 half used."""
    cells, pools = cells_of(
        {"n1": 4, "n2": 2, "n3": 4, "n4": 4},
        {"all": ["n1", "n2", "n3", "n4"], "fast": ["n3", "n4"]},
    )
    own = (
        Item("a", (Option(8, 5.0, None, "all"), Option(4, 4.0, None, "all"))),
        Item("b", (Option(8, 6.0, None, "fast"), Option(4, 1.0, None, "fast"))),
        Item("c", (Option(4, 1.5, None, "all"),)),
    )
    return PoolProblem(own, cells, pools, limits)


def test_cells_of_counts_no_gpu_twice() -> None:
    problem = overlapping()
    assert problem.cells == (Cell("all", 6), Cell("all&fast", 8))
    assert problem.pools == (
        Pool("all", frozenset({"all", "all&fast"})),
        Pool("fast", frozenset({"all&fast"})),
    )


def test_cells_of_refuses_a_node_of_unknown_state() -> None:
    with pytest.raises(SolverError, match="pool 'p' has node 'n2', whose free GPUs are unknown"):
        cells_of({"n1": 4}, {"p": ["n1", "n2"]})


def test_a_pool_moves_out_of_the_shared_cell() -> None:
    # Greedy search alone could give a shared cell to "all" and leave nothing for "fast".
    problem = overlapping()
    assert is_feasible(problem, {"a": 1, "b": 0})  # 4 + 8 of 14
    assert not is_feasible(problem, {"a": 0, "b": 0})  # 8 of "all" needs 2 of the shared cell
    solution = allocate_pools(problem)
    assert solution.chosen == {"a": 1, "b": 0}
    assert solution.optimal


def test_a_group_limit_binds() -> None:
    solution = allocate_pools(overlapping((Limit("team", frozenset({"a", "b"}), 8),)))
    assert solution.chosen == {"b": 0, "c": 0}  # without the limit a and b: 10.0
    assert solution.value == 7.5
    assert solution.solver == "highs"


def test_a_limit_that_cannot_bind_leaves_it_to_the_knapsack() -> None:
    cells, pools = (Cell("c", 8),), (Pool("p", frozenset({"c"})),)
    own = tuple(Item(str(i), (Option(4, 1.0 + i, None, "p"),)) for i in range(4))
    solution = allocate_pools(
        PoolProblem(own, cells, pools, (Limit("l", frozenset({"0", "1"}), 8),))
    )
    assert solution.chosen == {"2": 0, "3": 0}
    assert solution.solver == "knapsack"


def test_independent_parts_are_split() -> None:
    cells = (Cell("x", 4), Cell("y", 4), Cell("z", 4))
    pools = tuple(Pool(cell.key.upper(), frozenset({cell.key})) for cell in cells)
    own = (
        Item("a", (Option(4, 1.0, None, "X"),)),
        Item("b", (Option(4, 1.0, None, "Y"), Option(2, 1.0, None, "Z"))),
        Item("c", ()),
        Item("d", (Option(4, 1.0, None, "Z"),)),
    )
    parts = split(PoolProblem(own, cells, pools))
    assert [[pool.key for pool in part.pools] for part in parts] == [["X"], ["Y", "Z"]]
    assert [[item.key for item in part.items] for part in parts] == [["a"], ["b", "d"]]
    tied = split(PoolProblem(own, cells, pools, (Limit("l", frozenset({"a", "d"}), 4),)))
    assert len(tied) == 1
    assert tied[0].limits == (Limit("l", frozenset({"a", "d"}), 4),)


@settings(max_examples=60, deadline=None)
@given(pool_problems())
def test_feasibility_is_halls_condition(problem: PoolProblem) -> None:
    for chosen in choices(problem.items):
        assert is_feasible(problem, chosen) == pools_allow(problem, chosen)


@settings(max_examples=60, deadline=None)
@given(pool_problems())
def test_is_the_optimum_and_keeps_every_constraint(problem: PoolProblem) -> None:
    best = best_pool_value(problem)
    solution = allocate_pools(problem, 30.0)
    assert solution.optimal
    assert pools_allow(problem, solution.chosen)
    assert exact_value(problem.items, solution.chosen) == best
    oracle = solve_milp(problem)
    assert pools_allow(problem, oracle.chosen)
    assert exact_value(problem.items, oracle.chosen) == best
    greedy = greedy_pools(problem)
    assert pools_allow(problem, greedy)
    assert exact_value(problem.items, greedy) <= best


def _checked(problem: PoolProblem, solution: Solution, best: Fraction) -> None:
    assert pools_allow(problem, solution.chosen)
    assert solution.value <= float(best) <= solution.bound * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(pool_problems())
def test_out_of_time_is_feasible_with_a_true_bound(problem: PoolProblem) -> None:
    best = best_pool_value(problem)
    for calls in (1, 6, 12):
        _checked(problem, allocate_pools(problem, 1.0, clock=stopping_after(calls)), best)


def test_without_highs_greedy_answers_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    problem = overlapping((Limit("team", frozenset({"a", "b"}), 8),))
    solution = allocate_pools(problem)
    assert solution.solver == "greedy"
    assert not solution.optimal
    assert "highspy is not installed" in solution.note
    _checked(problem, solution, best_pool_value(problem))


def test_an_answer_that_breaks_a_constraint_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = overlapping((Limit("team", frozenset({"a", "b"}), 8),))

    def too_much(problem: PoolProblem, time_limit_s: float) -> Solution:
        chosen: Mapping[str, int] = {"a": 1, "b": 0}
        return Solution(chosen, 10.0, True, 0.0, 10.0, "highs", 0.0)

    monkeypatch.setattr(solve, "solve_milp", too_much)
    solution = allocate_pools(problem)
    assert pools_allow(problem, solution.chosen)
    assert not solution.optimal
    assert "breaks a constraint" in solution.note


def test_an_incumbent_better_than_greedy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = overlapping((Limit("team", frozenset({"a", "b"}), 8),))

    def stopped(problem: PoolProblem, time_limit_s: float) -> Solution:
        return Solution({"b": 0}, 6.0, False, 0.25, 8.0, "highs", 0.0, "time limit")

    monkeypatch.setattr(solve, "solve_milp", stopped)
    monkeypatch.setattr(solve, "greedy_pools", lambda problem: {"c": 0})
    solution = allocate_pools(problem)
    assert (solution.solver, solution.chosen) == ("highs", {"b": 0})
    assert solution.bound == 8.0
    assert solution.gap == 0.25

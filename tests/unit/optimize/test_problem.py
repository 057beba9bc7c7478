"""Malformed input is refused where it is made, with the value in the message."""

from __future__ import annotations

import math

import pytest

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.problem import (
    MAX_GPUS,
    Cell,
    Item,
    Limit,
    Option,
    Pool,
    PoolProblem,
    Problem,
    Solution,
    gpus_used,
    selected,
    value_of,
)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, "1"])
def test_option_refuses_value(value: float) -> None:
    with pytest.raises(SolverError, match=r"option 'vit': value="):
        Option(1, value, "vit")


@pytest.mark.parametrize("gpus", [-1, 1.5, 2.0, True, math.nan, MAX_GPUS + 1])
def test_option_refuses_gpus(gpus: int) -> None:
    with pytest.raises(SolverError, match=r"option 'vit': gpus="):
        Option(gpus, 1.0, "vit")


@pytest.mark.parametrize("capacity", [-1, 0.5, math.nan])
def test_problem_refuses_capacity(capacity: int) -> None:
    with pytest.raises(SolverError, match=r"capacity="):
        Problem((), capacity)


def test_an_item_twice_is_refused() -> None:
    with pytest.raises(SolverError, match="'a' occurs twice"):
        Problem((Item("a", ()), Item("b", ()), Item("a", (Option(1, 1.0),))), 4)


def test_pool_problem_refuses_unknown_names() -> None:
    cells, pools = (Cell("c", 4),), (Pool("p", frozenset({"c"})),)
    with pytest.raises(SolverError, match=r"cells that do not exist: \['d'\]"):
        PoolProblem((), cells, (Pool("p", frozenset({"d"})),))
    with pytest.raises(SolverError, match=r"names pool 'q', known are \['p'\]"):
        PoolProblem((Item("a", (Option(1, 1.0, None, "q"),)),), cells, pools)
    with pytest.raises(SolverError, match=r"items that do not exist: \['b'\]"):
        PoolProblem((Item("a", ()),), cells, pools, (Limit("l", frozenset({"b"}), 1),))
    with pytest.raises(SolverError, match="same key"):
        PoolProblem((), (*cells, Cell("c", 1)), pools)
    with pytest.raises(SolverError, match=r"limit 'l': gpus=-1"):
        Limit("l", frozenset(), -1)
    with pytest.raises(SolverError, match=r"cell 'c': gpus=-1"):
        Cell("c", -1)


def test_accessors() -> None:
    own = (Item("a", (Option(1, 0.1), Option(2, 0.2, "two"))), Item("b", (Option(4, 0.7),)))
    assert selected(own, {"a": 1}) == {"a": Option(2, 0.2, "two")}
    assert gpus_used(own, {"a": 1, "b": 0}) == 6
    assert value_of(own, {"a": 0, "b": 0}) == math.fsum([0.1, 0.7])
    for wrong in ({"c": 0}, {"b": 1}, {"b": -1}):
        with pytest.raises(SolverError, match="does not exist in this problem"):
            selected(own, wrong)


def test_time_does_not_make_two_solutions_differ() -> None:
    one = Solution({"a": 0}, 1.0, True, 0.0, 1.0, "knapsack", time_s=0.1)
    two = Solution({"a": 0}, 1.0, True, 0.0, 1.0, "knapsack", time_s=0.2)
    assert one == two

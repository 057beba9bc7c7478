"""Columns, hulls and greedy one by one: what the exact solver takes for granted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from slurm_ext.optimize.columns import columns
from slurm_ext.optimize.greedy import solve_greedy
from slurm_ext.optimize.lp import hull_steps, lp_bound, relax
from slurm_ext.optimize.problem import Item, Option, Problem
from tests.unit.optimize.problems import problems, tie_values


@settings(deadline=None)
@given(problems(tie_values))
def test_columns_rise_strictly_and_keep_the_earliest_of_equal_options(problem: Problem) -> None:
    cols = columns(problem)
    rows = list(zip(cols.item.tolist(), cols.gpus.tolist(), cols.units.tolist(), strict=True))
    for one, two in pairwise(rows):
        assert one[0] < two[0] or (one[0] == two[0] and one[1] < two[1] and one[2] < two[2])
    for item, option in zip(cols.item.tolist(), cols.option.tolist(), strict=True):
        kept = problem.items[item].options[option]
        assert kept.gpus <= problem.capacity
        for index, other in enumerate(problem.items[item].options):
            if other.gpus <= kept.gpus and other.value >= kept.value:
                assert (other.gpus, other.value) == (kept.gpus, kept.value)
                assert index >= option


def test_no_column_is_lost() -> None:
    own = (Item("a", (Option(4, 3.0), Option(1, 1.0), Option(2, 1.0), Option(8, 9.0))),)
    cols = columns(Problem(own, 6))
    assert (cols.option.tolist(), cols.gpus.tolist()) == ([1, 0], [1, 4])
    assert cols.capacity == 4, "no more than can be used"


def test_hull_skips_what_lies_below_a_chord() -> None:
    # From (0, 0): 2 GPUs -> 4, 3 -> 4.5 (below the chord to 4 -> 7), 4 -> 7.
    own = (Item("a", (Option(2, 4.0), Option(3, 4.5), Option(4, 7.0))),)
    cols = columns(Problem(own, 4))
    steps = hull_steps(cols)
    assert cols.gpus[steps.row].tolist() == [2, 4]
    assert steps.gpus.tolist() == [2, 2]
    assert steps.rate.tolist() == sorted(steps.rate.tolist(), reverse=True)


def test_lp_bound_by_hand() -> None:
    """One GPU short of the second job: 5 + 3/4 of 4 at price 1 per GPU."""
    own = (Item("a", (Option(2, 5.0),)), Item("b", (Option(4, 4.0),)))
    assert lp_bound(Problem(own, 5)) == pytest.approx(8.0, rel=1e-12)
    cols = columns(Problem(own, 5))
    relaxation = relax(cols, hull_steps(cols))
    unit = 2.0**-cols.exponent
    assert relaxation.price * unit == 1.0
    assert (relaxation.loss * unit).tolist() == [0.0, 0.0]
    assert (relaxation.idle_loss * unit).tolist() == [3.0, 0.0]


def test_greedy_does_not_lose_the_one_big_option() -> None:
    """Value per GPU says a (2.0) before b (1.0), and then b does not fit any more."""
    own = (Item("a", (Option(1, 2.0),)), Item("b", (Option(10, 10.0),)))
    assert solve_greedy(Problem(own, 10)).chosen == {"b": 0}


def test_greedy_spends_what_the_split_leaves() -> None:
    own = (Item("a", (Option(3, 9.0),)), Item("b", (Option(4, 8.0),)), Item("c", (Option(1, 1.0),)))
    solution = solve_greedy(Problem(own, 5))
    assert solution.chosen == {"a": 0, "c": 0}
    assert solution.bound == pytest.approx(9.0 + 2 * 2.0, rel=1e-12)
    assert solution.gap == pytest.approx(3.0 / 13.0)


def test_units_use_the_head_room_and_do_not_overflow() -> None:
    own = tuple(Item(str(i), (Option(1, 1.0 + i / 7),)) for i in range(1000))
    cols = columns(Problem(own, 1000))
    total = sum(cols.units.tolist())
    assert 2**59 <= total < 2**60
    assert cols.units.dtype == np.int64

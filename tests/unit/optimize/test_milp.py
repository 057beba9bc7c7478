"""HiGHS as the oracle: it must agree with the knapsack, and say so when it was stopped."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from slurm_ext.optimize.knapsack import solve_exact
from slurm_ext.optimize.milp import MilpUnavailableError, solve_milp
from slurm_ext.optimize.problem import Item, Option, Problem, gpus_used


def medium(seed: int) -> Problem:
    draw = random.Random(seed)
    items = []
    for i in range(draw.randrange(20, 50)):
        alone_s = 10 ** draw.uniform(2.5, 4.5)
        counts = [1, 2, 4, 8, 12, 16][: draw.randrange(1, 7)]
        items.append(
            Item(
                f"job{i}",
                tuple(Option(a, a ** draw.uniform(0.5, 1.0) / alone_s, a) for a in counts),
            )
        )
    return Problem(tuple(items), draw.randrange(1, 100))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("presolve", [True, False])
def test_agrees_with_the_knapsack(seed: int, presolve: bool) -> None:
    problem = medium(seed)
    oracle = solve_milp(problem, presolve=presolve)
    assert oracle.optimal
    assert gpus_used(problem.items, oracle.chosen) <= problem.capacity
    assert solve_exact(problem).value == pytest.approx(oracle.value, rel=1e-9)


def test_no_items() -> None:
    assert solve_milp(Problem((), 4)).chosen == {}
    assert solve_milp(Problem((Item("a", ()), Item("b", (Option(5, 1.0),))), 4)).chosen == {}


def test_stopped_by_its_limit_it_does_not_claim_the_optimum() -> None:
    problem = medium(3)
    solution = solve_milp(problem, 0.0)
    assert not solution.optimal
    assert solution.note == "time limit"
    assert solution.value <= solve_exact(problem).value <= solution.bound * (1 + 1e-9)
    assert gpus_used(problem.items, solution.chosen) <= problem.capacity


def test_prints_nothing() -> None:
    """The daemon's stdout is a log of JSON lines."""
    code = (
        "from slurm_ext.optimize.milp import solve_milp\n"
        "from slurm_ext.optimize.problem import *\n"
        "assert solve_milp(Problem((Item('a', (Option(1, 1.0),)),), 1)).chosen == {'a': 0}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_importing_the_solvers_does_not_import_highs() -> None:
    code = "import sys, slurm_ext.optimize.solve; assert 'highspy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=50, check=True)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(MilpUnavailableError, match="pip install highspy"):
        solve_milp(medium(0))

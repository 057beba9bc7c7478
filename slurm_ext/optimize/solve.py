"""The front door of the allocation layer: `allocate` one pool, `allocate_pools` several.

Neither raises because time is up or a solver is not installed: the answer then comes from the
greedy, says so in ``solver`` and ``note``, and carries the gap that a bound proves.

Several pools: independent parts are solved one by one.  A part that is one pool without limits goes
to the exact knapsack.  Otherwise the part's relaxation to a single pool is tried first; if its
answer happens to keep every constraint it is optimal, and that is the usual case where limits are
far away.  Only then HiGHS is asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.components import split
from slurm_ext.optimize.greedy import solve_greedy
from slurm_ext.optimize.knapsack import KnapsackLimitError, solve_exact
from slurm_ext.optimize.lp import lp_bound
from slurm_ext.optimize.milp import solve_milp
from slurm_ext.optimize.pools import greedy_pools, is_feasible, pooled
from slurm_ext.optimize.problem import (
    PoolProblem,
    Problem,
    Solution,
    relative_gap,
    value_of,
)

# One decision must not delay the daemon's cycle.  The exact solution of 320 jobs x 64 GPUs takes
# milliseconds, so this limit is met by pathological input only.
DEFAULT_TIME_LIMIT_S = 1.0


def allocate(
    problem: Problem,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """The best choice for one pool: exact, or greedy with a proven gap when time is up."""
    try:
        return solve_exact(problem, time_limit_s, clock=clock)
    except KnapsackLimitError as limit:
        return solve_greedy(problem, note=f"exact solver gave up: {limit}", clock=clock)


def allocate_pools(
    problem: PoolProblem,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """The best choice over pools that may overlap, under group limits."""
    begin = clock()
    parts = [_allocate_part(part, begin + time_limit_s - clock(), clock) for part in split(problem)]
    merged = {key: index for part in parts for key, index in part.chosen.items()}
    chosen = {item.key: merged[item.key] for item in problem.items if item.key in merged}
    value = value_of(problem.items, chosen)
    optimal = all(part.optimal for part in parts)
    bound = value if optimal else max(value, math.fsum(part.bound for part in parts))
    return Solution(
        chosen=chosen,
        value=value,
        optimal=optimal,
        gap=relative_gap(value, bound),
        bound=bound,
        solver="+".join(sorted({part.solver for part in parts})) or "knapsack",
        time_s=clock() - begin,
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
    )


def _allocate_part(part: PoolProblem, time_limit_s: float, clock: Callable[[], float]) -> Solution:
    begin = clock()
    relaxed = allocate(pooled(part), time_limit_s, clock=clock)
    if (len(part.pools) == 1 and not part.limits) or is_feasible(part, relaxed.chosen):
        return relaxed
    why = "time limit"
    left_s = time_limit_s - (clock() - begin)
    bound = min(relaxed.bound, lp_bound(pooled(part)))
    incumbent: Mapping[str, int] = {}
    if left_s > 0.0:
        try:
            found = solve_milp(part, left_s)
        except SolverError as failed:
            why = str(failed)
        else:
            bound = min(bound, found.bound)
            if not is_feasible(part, found.chosen):
                # HiGHS accepts constraints within a tolerance; we do not.
                why = "HiGHS's answer breaks a constraint"
            elif found.optimal:
                return found
            else:
                incumbent = found.chosen
    chosen, solver = greedy_pools(part), "greedy"
    if value_of(part.items, incumbent) > value_of(part.items, chosen):
        chosen, solver = dict(incumbent), "highs"
    value = value_of(part.items, chosen)
    return Solution(
        chosen=chosen,
        value=value,
        optimal=False,
        gap=relative_gap(value, bound),
        bound=max(bound, value),
        solver=solver,
        time_s=clock() - begin,
        note=f"not proven optimal: {why}",
    )

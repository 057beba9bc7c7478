"""The front door of the allocation layer: `allocate` one pool, `allocate_pools` several.

Neither raises because time is up or a solver is not installed: the answer then comes from the
greedy, says so in ``solver`` and ``note``, and carries the gap that a bound proves.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_ext.optimize.problem import PoolProblem, Problem, Solution

# One decision must not delay the daemon's cycle; the exact solution of 320 jobs x 64 GPUs takes
# milliseconds, so this limit is met by pathological input only.
DEFAULT_TIME_LIMIT_S = 1.0


def allocate(
    problem: Problem,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """The best choice for one pool: exact, or greedy with a proven gap when time is up."""
    raise NotImplementedError


def allocate_pools(
    problem: PoolProblem,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """The best choice over pools that may overlap, under group limits."""
    raise NotImplementedError

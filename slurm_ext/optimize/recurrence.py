"""The textbook recurrence over all items, options and GPUs: slow, plain, and the check of the rest.

It prunes nothing, works in floating point and shares no code with the exact solver, so that an
agreement of the two says something.  Its time is items x options x GPUs, its memory items x GPUs.
It knows no time limit and no tie-break; decisions are never made with it.
"""

from __future__ import annotations

import time

import numpy as np

from slurm_ext.optimize.problem import Problem, Solution, value_of


def solve_unpruned(problem: Problem) -> Solution:
    begin = time.perf_counter()
    size = problem.capacity + 1
    most_options = max((len(item.options) for item in problem.items), default=0)
    # best[c]: the most that the items so far are worth on at most c GPUs; 0 = item left out.
    best = np.zeros(size)
    taken = np.zeros((len(problem.items), size), dtype=np.min_scalar_type(most_options))
    for item, choice in zip(problem.items, taken, strict=True):
        before = best.copy()
        for index, option in enumerate(item.options):
            if option.gpus > problem.capacity:
                continue
            with_option = before[: size - option.gpus] + option.value
            better = with_option > best[option.gpus :]
            best[option.gpus :][better] = with_option[better]
            choice[option.gpus :][better] = index + 1

    chosen: dict[str, int] = {}
    gpus = problem.capacity
    for item, choice in zip(reversed(problem.items), taken[::-1], strict=True):
        index = int(choice[gpus]) - 1
        if index >= 0:
            chosen[item.key] = index
            gpus -= item.options[index].gpus
    chosen = dict(reversed(chosen.items()))
    value = value_of(problem.items, chosen)
    return Solution(
        chosen=chosen,
        value=value,
        optimal=True,
        gap=0.0,
        bound=value,
        solver="recurrence",
        time_s=time.perf_counter() - begin,
    )

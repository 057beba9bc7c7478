"""Why a job did not get another GPU count: solve again with that count forced, compare the terms.

The forced problem's best answer is the strongest case for the other count.  What it is worth less
than the plan, term by term and job by job, is the reason, and the term that speaks most against it
is the one to name.  Pure arithmetic on the problem; wording for people is made of it elsewhere, but
`WhyNot.words` has one honest sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slurm_ext.domain.errors import SolverError
from slurm_ext.optimize.objective import TERM_NAMES, Scored
from slurm_ext.optimize.problem import Item, Problem, Solution, selected
from slurm_ext.optimize.solve import allocate


@dataclass(frozen=True, slots=True)
class WhyNot:
    """The plan against the best plan in which ``key`` gets ``gpus`` GPUs.

    ``terms`` holds plan minus alternative per term (1/s, summed over jobs), so positive entries
    speak for the plan; ``jobs`` maps every job whose count differs to (GPUs in the plan, GPUs in
    the alternative), 0 = left waiting.  ``alternative`` is ``None`` where that count does not fit
    or is not allowed; then ``terms`` and ``jobs`` are empty.
    """

    key: str
    gpus: int
    alternative: Solution | None
    terms: Mapping[str, float]
    jobs: Mapping[str, tuple[int, int]]
    words: str

    @property
    def decisive(self) -> str:
        """The term that speaks most for the plan; empty when nothing does."""
        name = max(self.terms, key=lambda term: self.terms[term], default="")
        return name if name and self.terms[name] > 0.0 else ""


def why_not(
    scored: Scored,
    solution: Solution,
    key: str,
    gpus: int,
    solver: Callable[[Problem], Solution] = allocate,
) -> WhyNot:
    """Why ``key`` did not get ``gpus`` GPUs in ``solution``; 0 asks why it was not left waiting."""
    problem = scored.problem
    item = next((item for item in problem.items if item.key == key), None)
    if item is None:
        raise SolverError(f"job {key!r} is not part of this decision")
    if gpus > problem.capacity:
        return _impossible(key, gpus, f"only {problem.capacity} GPUs are free")
    others = tuple(other for other in problem.items if other.key != key)
    forced: dict[str, int] = {}
    if gpus > 0:
        indices = [j for j, option in enumerate(item.options) if option.gpus == gpus]
        if not indices:
            allowed = sorted({option.gpus for option in item.options})
            return _impossible(key, gpus, f"its allowed counts are {allowed}")
        forced[key] = max(indices, key=lambda j: item.options[j].value)
    rest = solver(Problem(others, problem.capacity - gpus))
    chosen = {**rest.chosen, **forced}
    alternative = Solution(
        chosen={i.key: chosen[i.key] for i in problem.items if i.key in chosen},
        value=rest.value + sum(item.options[j].value for j in forced.values()),
        optimal=rest.optimal,
        gap=rest.gap,
        bound=rest.bound + sum(item.options[j].value for j in forced.values()),
        solver=rest.solver,
        time_s=rest.time_s,
        note=rest.note,
    )
    terms = {
        name: _sum_of(scored, solution.chosen, name) - _sum_of(scored, alternative.chosen, name)
        for name in TERM_NAMES
    }
    jobs = _differences(problem.items, solution.chosen, alternative.chosen)
    return WhyNot(key, gpus, alternative, terms, jobs, _words(key, gpus, terms, jobs))


def _impossible(key: str, gpus: int, reason: str) -> WhyNot:
    return WhyNot(key, gpus, None, {}, {}, f"job {key} cannot get {gpus} GPUs: {reason}")


def _sum_of(scored: Scored, chosen: Mapping[str, int], name: str) -> float:
    return math.fsum(getattr(scored.terms[key][j], name) for key, j in chosen.items())


def _differences(
    items: tuple[Item, ...], plan: Mapping[str, int], other: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    ours, theirs = selected(items, plan), selected(items, other)
    counts = {
        item.key: (
            ours[item.key].gpus if item.key in ours else 0,
            theirs[item.key].gpus if item.key in theirs else 0,
        )
        for item in items
    }
    return {key: pair for key, pair in counts.items() if pair[0] != pair[1]}


def _words(
    key: str, gpus: int, terms: Mapping[str, float], jobs: Mapping[str, tuple[int, int]]
) -> str:
    if key not in jobs:
        return f"job {key} has {gpus} GPUs in the plan"
    changes = ", ".join(f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in jobs.items())
    loss = sum(terms.values())
    if loss <= 0.0:
        return f"job {key} on {gpus} GPUs would be worth as much ({changes}); the tie-break decided"
    decisive = max(terms, key=lambda name: terms[name])
    return (
        f"job {key} on {gpus} GPUs ({changes}) would be worth {loss:.3g}/s less; "
        f"decisive term: {decisive} ({terms[decisive]:+.3g}/s)"
    )

"""One solve of a field: the best choice, unless what the last plan started is nearly as good.

Slurm is about to start what the last plan wanted, and a plan that wavers starts nothing. So the
problem is solved twice where the best choice would change that: freely, and with those jobs held to
their configurations. The second answer is taken unless the first is worth more by the margin.

What must not happen here is seating: a choice that finds no nodes is the caller's to solve again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.plan import Term
from slurm_ext.domain.policy import View
from slurm_ext.optimize.explain import why_not
from slurm_ext.optimize.objective import Demand, Scored, Weights, build_items
from slurm_ext.optimize.pools import cells_of
from slurm_ext.optimize.problem import (
    Item,
    PoolProblem,
    Problem,
    Solution,
    relative_gap,
    value_of,
)
from slurm_ext.optimize.solve import allocate, allocate_pools
from slurm_ext.policy.growth import Growth
from slurm_ext.policy.merged import bind, unbind
from slurm_ext.policy.opened import Open, firm, narrowed
from slurm_ext.policy.queue import Field

# Reasons by comparison cost a solve each: they are worked out for this many jobs per field.
COMPARED = 8


@dataclass(frozen=True, slots=True)
class Solver:
    """How a field is solved. ``margin`` is the relative gain for which a plan that Slurm has not
    carried out yet is changed; ``time_limit_s`` bounds one solve."""

    weights: Weights
    margin: float
    time_limit_s: float

    def keeping(
        self,
        view: View,
        part: Field,
        live: Sequence[Open],
        demands: Sequence[Demand],
        growing: Sequence[Growth] = (),
    ) -> tuple[Solution, Scored]:
        """Prefer what the last plan started, unless the new choice is better by the margin."""
        items, terms = build_items(demands, self.weights)
        items = (*items, *(growth.item for growth in growing))
        terms |= {growth.key: growth.terms for growth in growing}
        scored = Scored(Problem(items, part.gpus_free), terms)
        free = self._best(view, part, items, live)
        kept = {
            o.job.job_id: index
            for o in live
            for index, candidate in enumerate(o.candidates)
            if o.planned is not None
            and candidate.configuration == o.planned
            and len(candidate.job_ids) == 1
        }
        if all(free.chosen.get(key) == index for key, index in kept.items()):
            return free, scored
        held = self._best(view, part, firm(items, kept), narrowed(live, kept))
        if any(key not in held.chosen for key in kept):
            return free, scored  # the last plan does not fit any more
        value = value_of(items, chosen := {k: kept.get(k, i) for k, i in held.chosen.items()})
        if free.value > value * (1.0 + self.margin):
            return free, scored
        solution = replace(
            held,
            chosen=chosen,
            value=value,
            bound=free.bound,
            gap=relative_gap(value, free.bound),
            optimal=False,
            note=f"kept the last plan: a change is worth less than {self.margin:.0%}",
        )
        return solution, scored

    def _best(
        self, view: View, part: Field, items: Sequence[Item], live: Sequence[Open]
    ) -> Solution:
        """The best choice; of jobs that may be merged, each is told its own part of it."""
        offers = {o.job.job_id: o.candidates for o in live if o.mergeable}
        if not offers:
            return self._allocate(view, part, items)
        bound = bind(items, offers, part.gpus_free)
        solution = self._allocate(view, part, bound)
        return replace(solution, chosen=unbind(bound, solution.chosen))

    def _allocate(self, view: View, part: Field, items: Sequence[Item]) -> Solution:
        if len(part.pools) == 1:
            return allocate(Problem(tuple(items), part.gpus_free), self.time_limit_s)
        return allocate_pools(_pool_problem(part, view, items), self.time_limit_s)


def _pool_problem(part: Field, view: View, items: Sequence[Item]) -> PoolProblem:
    free = {node.name: node.gpus_free for node in part.nodes}
    members = {key: [n for n in view.pools[key] if n in free] for key in part.pools}
    cells, pools = cells_of(free, members)
    return PoolProblem(tuple(items), cells, pools)


def reasons(
    part: Field, live: Sequence[Open], scored: Scored, solution: Solution
) -> dict[str, Term]:
    """For the first few jobs, the term that decided against the next larger count."""
    if len(part.pools) > 1:
        return {}
    found: dict[str, Term] = {}
    for item in live:
        if len(found) >= COMPARED:
            break
        key, counts = item.job.job_id, sorted({c.gpus for c in item.candidates})
        index = solution.chosen.get(key)
        now_has = 0 if index is None else item.candidates[index].gpus
        wanted = next((c for c in counts if c > now_has and c <= part.gpus_free), None)
        if wanted is None:
            continue
        other = why_not(scored, solution, key, wanted)
        if other.decisive:
            loss = sum(other.terms.values())
            found[key] = Term(f"not {wanted} GPUs: {other.decisive}", loss, other.words)
    return found

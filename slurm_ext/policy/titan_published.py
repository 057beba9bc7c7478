"""Policy ``titan-published``: the formulation of Titan's author, kept as the yardstick of ours.

At every decision all jobs, waiting and running, are weighed anew. Of the ``G`` jobs with the
shortest time on their smallest count (G = all GPUs), each gets at most one of the counts 1, 2, 3,
4, 8, 12, ... so that the sum of

    max(R(a), D) / max(R(f), D)

is least, with R the remaining seconds, D the decision interval and f = max(1, G // number of jobs)
the fair share; a job that gets nothing costs 10^4. Running jobs whose count changes are stopped and
started anew, and no switch cost appears in the objective: this is what `titan` does differently.

The choice a reader would question: the sum is turned round (10^4 minus the cost, to be made
largest) and solved by the exact knapsack, where the author uses a general solver. Among equal
optima the two may differ, so the published numbers are met nearly, not to the last job.
"""

from __future__ import annotations

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.plan import Decision, Plan, Term
from slurm_ext.domain.policy import View
from slurm_ext.optimize.problem import Item, Option, Problem
from slurm_ext.optimize.solve import allocate
from slurm_ext.policy.preemptive import (
    Contender,
    Wanted,
    arrange,
    contenders,
    leave_the_rest,
    total_gpus,
    write,
)
from slurm_ext.policy.queue import Field, fields

NOTHING_COSTS = 1e4
NODE = 4
INTERVAL_S = 120.0


class PublishedTitan:
    """See the module. ``start_up_s`` of every start is not counted as remaining time."""

    name = "titan-published"
    preemptive = True

    def __init__(self, interval_s: float = INTERVAL_S, start_up_s: float = 0.0) -> None:
        self.interval_s = interval_s
        self.start_up_s = start_up_s

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        for part in fields(view):
            self._decide(view, part, now, decisions)
        leave_the_rest(view, decisions)
        return Plan(self.name, now, decisions)

    def _decide(self, view: View, part: Field, now: float, decisions: dict[str, Decision]) -> None:
        everyone = contenders(view, part, now)
        gpus = total_gpus(part, everyone)
        ranked = sorted(everyone, key=lambda c: (self._left(_smallest(c)), c.job.base_id, c.key))
        weighed, rest = ranked[:gpus], ranked[gpus:]
        chosen = self._choose(weighed, gpus) if weighed else {}
        wanted = [Wanted(item, chosen[item.key]) for item in weighed if item.key in chosen]
        rest = [*(item for item in weighed if item.key not in chosen), *rest]
        done = arrange(view, part, wanted, rest, spare=False)
        words = {}
        for item in ranked:
            candidate = chosen.get(item.key, item.present)
            left = self._left(candidate)
            words[item.key] = (
                "least sum of times, each over the time on a fair share",
                Term("remaining time", left, f"about {left:.0f} s on {candidate.gpus} GPUs"),
            )
        write(decisions, ranked, wanted, done, words)

    def _choose(self, weighed: list[Contender], gpus: int) -> dict[str, Candidate]:
        fair = max(1, gpus // len(weighed))
        items = []
        options: dict[str, list[Candidate]] = {}
        for item in weighed:
            share = max(
                (c for c in item.fact.candidates if c.gpus <= fair),
                key=lambda c: c.gpus,
                default=_smallest(item),
            )
            yardstick = max(self._left(share), self.interval_s)
            offered = [
                c for c in item.fact.candidates if c.gpus <= gpus and _is_published(c.gpus)
            ] or [item.present]
            options[item.key] = offered
            costs = (max(self._left(c), self.interval_s) / yardstick for c in offered)
            items.append(
                Item(
                    item.key,
                    tuple(
                        Option(candidate.gpus, max(0.0, NOTHING_COSTS - cost))
                        for candidate, cost in zip(offered, costs, strict=True)
                    ),
                )
            )
        solution = allocate(Problem(tuple(items), gpus))
        return {key: options[key][index] for key, index in solution.chosen.items()}

    def _left(self, candidate: Candidate) -> float:
        return max(0.0, candidate.remaining_s.value - self.start_up_s)


def _smallest(item: Contender) -> Candidate:
    return min(item.fact.candidates, key=lambda c: (c.gpus, c.remaining_s.value))


def _is_published(count: int) -> bool:
    return count <= NODE or count % NODE == 0

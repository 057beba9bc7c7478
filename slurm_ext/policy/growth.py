"""Growing a running job: what more GPUs are worth to it after all that the change costs.

A running job that goes on as it is makes 1/r of its remaining work per second, r being the time
that it has left. Stopped, saved and started again on more GPUs it makes 1/R, where R holds the full
cost: checkpoint, switch, start-up and all work that is lost. The difference is what the additional
GPUs are worth, in the same unit as the value of a start, so that growing and starting compete for
the free GPUs in one knapsack; going on as it is takes no option and is worth zero.

Growing must gain a share ``margin`` of 1/r on top. The gain is a promise about an uncertain future:
GPUs that a growing job takes are not there for the next arrival, and who just grew is tempted to
grow again at the next event. docs/policy.md has the measurements.

The choice a reader would question: jobs only ever grow. Shrinking a running job for a waiting one
was tried on the same workloads and did not pay: two restarts for one start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.plan import Decision, Term, Verdict
from slurm_ext.domain.policy import View
from slurm_ext.domain.spans import counted
from slurm_ext.optimize.objective import MIN_REMAINING_S, Terms, Weights
from slurm_ext.optimize.problem import Item, Option
from slurm_ext.policy.placement import Request
from slurm_ext.policy.preemptive import Contender, stoppable
from slurm_ext.policy.queue import Field, request_for


@dataclass(frozen=True, slots=True)
class Growth:
    """A running job with the larger counts that pay, and what each is worth to it."""

    contender: Contender
    candidates: tuple[Candidate, ...]
    terms: tuple[Terms, ...]

    @property
    def key(self) -> str:
        """The job's id."""
        return self.contender.key

    @property
    def item(self) -> Item:
        """The job as the knapsack sees it: an option takes the additional GPUs only."""
        held = self.contender.job.gpus
        pool = self.contender.fact.pool
        options = (
            Option(candidate.gpus - held, terms.total, None, pool)
            for candidate, terms in zip(self.candidates, self.terms, strict=True)
        )
        return Item(self.key, tuple(options))

    def without(self, index: int) -> Growth:
        """The same without one of its candidates."""
        return replace(
            self,
            candidates=self.candidates[:index] + self.candidates[index + 1 :],
            terms=self.terms[:index] + self.terms[index + 1 :],
        )


@dataclass(frozen=True, slots=True)
class Grown:
    """A running job that is started anew on more GPUs."""

    contender: Contender
    candidate: Candidate
    nodes: tuple[str, ...]
    terms: Terms

    @property
    def more_gpus(self) -> int:
        """GPUs beyond those it holds."""
        return self.candidate.gpus - self.contender.job.gpus

    def decision(self, rank: int) -> Decision:
        """Start it anew, and why that pays."""
        held, then = self.contender.job.gpus, self.candidate
        goes_on, again = self.contender.left_s, then.remaining_s.value
        words = (
            Term("progress", self.terms.progress, f"{again:.0f} s left instead of {goes_on:.0f} s"),
            Term("lease", self.terms.lease, "a change must be worth more by a margin"),
            Term("fairness", self.terms.fairness, f"weight {self.contender.fact.weight:g}"),
        )
        return Decision(
            job_id=self.contender.key,
            verdict=Verdict.START,
            rank=rank,
            reason=f"grows from {held} to {counted(then.gpus, 'GPU')}: done sooner, "
            "the new start included, and no other use of the free GPUs is worth more",
            configuration=then.configuration,
            nodes=self.nodes,
            remaining_s=then.remaining_s,
            pool=self.contender.fact.pool,
            terms=tuple(term for term in words if term.value != 0.0),
        )


def growths(view: View, part: Field, weights: Weights, margin: float, now: float) -> list[Growth]:
    """The running jobs of a field to which more of its free GPUs would be worth something."""
    free = part.gpus_free
    found = []
    for item in stoppable(view, part, now) if free else ():
        if not item.fact.permit.resize:
            continue
        going_on = weights.progress / max(item.left_s, MIN_REMAINING_S)
        candidates, terms = [], []
        for candidate in item.fact.candidates:
            if not item.job.gpus < candidate.gpus <= item.job.gpus + free:
                continue
            again = weights.progress / max(candidate.remaining_s.value, MIN_REMAINING_S)
            plain = again - going_on * (1.0 + margin)
            if plain > 0.0:
                candidates.append(candidate)
                terms.append(_terms(again - going_on, -margin * going_on, item.fact.weight))
        if candidates:
            found.append(Growth(item, tuple(candidates), tuple(terms)))
    return found


def _terms(progress: float, lease: float, weight: float) -> Terms:
    return Terms(
        progress=progress,
        start=0.0,
        waiting=0.0,
        deadline=0.0,
        lease=lease,
        switch=0.0,
        fairness=(weight - 1.0) * (progress + lease),
    )


def requests(view: View, chosen: Sequence[tuple[Growth, int]]) -> list[Request]:
    """The seats that the chosen candidates need."""
    return [
        request_for(
            growth.contender.job,
            growth.candidates[index],
            view.pools[growth.contender.fact.pool],
        )
        for growth, index in chosen
    ]


def give_way(
    growing: Sequence[Growth], chosen: Sequence[tuple[Growth, int]], unseated: Sequence[str]
) -> list[Growth]:
    """What to try next where somebody found no seat: a growth that found none is not tried again,
    and where only starts found none, the growth of least value makes room for them."""
    if not chosen:
        return list(growing)
    drop = {growth.key: index for growth, index in chosen if growth.key in unseated}
    if not drop:
        growth, index = min(chosen, key=lambda pair: (pair[0].terms[pair[1]].total, pair[0].key))
        drop = {growth.key: index}
    rest = [g.without(drop[g.key]) if g.key in drop else g for g in growing]
    return [growth for growth in rest if growth.candidates]

"""What a decision of `titan` works on: the jobs that are still open, and the starts it has chosen.

Data and small rules about them; what is chosen is `titan`'s business. The choice a reader would
question: the candidates of an open job are a list that shrinks while the decision is made, so that
every part of it sees what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Term
from slurm_ext.domain.policy import JobFacts
from slurm_ext.optimize.objective import Choice, Demand
from slurm_ext.optimize.problem import Item
from slurm_ext.policy.holdout import Declined
from slurm_ext.policy.merged import alone
from slurm_ext.policy.queue import Field, Waiting, present_candidate, shadow
from slurm_ext.policy.telling import worth_per_gpu


@dataclass(slots=True)
class Open:
    """What may still be chosen for one job: candidates are only ever removed."""

    job: Job
    fact: JobFacts
    now: float
    planned: Configuration | None
    candidates: list[Candidate]
    wanted_since_s: float | None = None
    stuck: bool = False
    declined: Declined | None = None

    @property
    def mergeable(self) -> bool:
        """Whether it has a candidate together with another job; those come last."""
        return bool(self.candidates) and len(self.candidates[-1].job_ids) > 1

    @property
    def demand(self) -> Demand:
        """The job as the objective sees it."""
        deadline = self.fact.deadline_s
        return Demand(
            key=self.job.job_id,
            choices=tuple(
                Choice(
                    gpus=c.gpus,
                    remaining_s=c.remaining_s.value,
                    planned=c.configuration == self.planned,
                    pool=self.fact.pool,
                    unlimited=c.remaining_s.unlimited,
                )
                for c in self.candidates
            ),
            waited_s=max(0.0, self.now - self.fact.waiting_since_s),
            weight=self.fact.weight,
            deadline_in_s=None if deadline is None else deadline - self.now,
        )


@dataclass(frozen=True, slots=True)
class Start:
    """A job that starts now, with the candidate, its seats and the terms that chose it."""

    open: Open
    candidate: Candidate
    nodes: tuple[str, ...]
    terms: tuple[Term, ...]
    overdue: bool = False

    @property
    def key(self) -> str:
        return self.open.job.job_id

    @property
    def served(self) -> tuple[str, ...]:
        """Itself, and whoever rides on it."""
        return self.candidate.job_ids if len(self.candidate.job_ids) > 1 else (self.key,)


def narrowed(live: Sequence[Open], kept: Mapping[str, int]) -> list[Open]:
    """The jobs as `firm` leaves them: a kept one has its kept candidate only."""
    return [
        replace(o, candidates=[o.candidates[kept[o.job.job_id]]]) if o.job.job_id in kept else o
        for o in live
    ]


def firm(items: Sequence[Item], kept: Mapping[str, int]) -> list[Item]:
    """Items in which a kept job has its kept option only, worth more than all others together."""
    extra = 1.0 + sum(max((o.value for o in item.options), default=0.0) for item in items)
    result = []
    for item in items:
        if item.key in kept:
            option = item.options[kept[item.key]]
            item = Item(item.key, (replace(option, value=option.value + extra),))
        result.append(item)
    return result


def gpus_on_nodes(starts: Sequence[Start]) -> dict[str, int]:
    taken: dict[str, int] = {}
    for start in starts:
        shares = sorted(start.candidate.configuration.placement, reverse=True)
        for name, share in zip(start.nodes, shares, strict=True):
            taken[name] = taken.get(name, 0) + share
    return taken


def only_behind(
    blocked: Open,
    rest: Sequence[Open],
    room: int,
    starts: Sequence[Start],
    releases: Sequence[tuple[float, int]],
    now: float,
) -> None:
    """Leave only candidates that do not delay the blocked job (EASY's rule)."""
    need = present_candidate(blocked.job, blocked.fact).gpus
    soon = [*releases, *((now + s.candidate.remaining_s.high, s.candidate.gpus) for s in starts)]
    when, spare = shadow(need, room, soon, now)
    # What ends in time delays nobody; what runs longer shares the GPUs that are left over then,
    # the most valuable per GPU first.
    by_worth = sorted(
        (o for o in rest if o.candidates),
        key=lambda o: (-max(worth_per_gpu(c, o.fact) for c in o.candidates), o.job.job_id),
    )
    for item in by_worth:
        long = [c for c in item.candidates if now + c.remaining_s.high > when]
        kept = [c for c in long if c.gpus <= spare]
        spare -= max((c.gpus for c in kept), default=0)
        item.candidates = [c for c in item.candidates if c not in long or c in kept]


def in_line(
    opens: Sequence[Open], blocked: Open | None, part: Field
) -> list[tuple[Waiting, JobFacts]]:
    """Jobs that do not start now, best value per GPU first; the blocked one before all.

    Each is shown with the largest count within an equal share of the field: the one it would
    probably get.
    """
    total = sum(node.gpus for node in part.nodes if node.available)
    share = max(1, total // max(1, len(opens)))
    rows = []
    for item in opens:
        own = alone(item.fact.candidates)
        fair = [c for c in own if c.gpus <= share]
        candidate = (
            max(fair, key=lambda c: (c.gpus, -c.remaining_s.value))
            if fair
            else min(own, key=lambda c: (c.gpus, c.remaining_s.value))
        )
        worth = worth_per_gpu(candidate, item.fact)
        rows.append(
            (item is not blocked, -worth, item.job.base_id, item.job.job_id, item, candidate)
        )
    rows.sort(key=lambda r: r[:4])
    return [(Waiting(item.job, candidate), item.fact) for *_, item, candidate in rows]

"""Which jobs of a long queue a decision of `titan` looks at, where nobody will ask about the rest.

Two steps. `front` takes from a queue that is kept in order from event to event the jobs that can
matter, without touching the others; `ways` says what each of them is worth on each count, from
which `worth` then leaves out what cannot be in the answer. Without a queue in order (in the daemon,
where every job is explained) neither is used.

The choice a reader would question: behind a job that blocks the others not the whole queue is
looked at, but its first ``DEPTH`` jobs of each size, as Slurm's own backfill looks at a limited
number of jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.optimize.objective import MIN_REMAINING_S, Weights
from slurm_ext.policy.opened import Open
from slurm_ext.policy.placement import TopologyRule, seat
from slurm_ext.policy.queue import Field, request_for, shape_of
from slurm_ext.policy.worth import Way

# Where a job past the waiting limit blocks the others, so many jobs are looked at (see `front`).
DEPTH = 200


def front(view: View, part: Field, now: float, waiting_limit_s: float, more: int) -> Sequence[Job]:
    """Of a queue that is in order already, the jobs that can matter to this decision.

    Exact while nobody is past the waiting limit: of jobs with one candidate and of one size those
    of the highest standing, and ``more`` for those that find no seat. Behind a job that blocks the
    others, what ends in time counts and not what is worth most: there the first ``DEPTH`` of each
    size and the ``DEPTH`` shortest are looked at.
    """
    if view.alike is None or view.apart is None:
        return part.jobs
    free = part.gpus_free
    late = _late(part, now, waiting_limit_s, free + 1)
    found = {job.job_id: job for job in late}
    again = view.previous.decisions if view.previous is not None else {}
    if any(d.verdict is Verdict.START and d.job_id in view.facts for d in again.values()):
        found |= {job.job_id: job for job in part.jobs if job.job_id in again}
    for pool in part.pools:
        found |= {job.job_id: job for job in view.apart.get(pool, ())}
        for gpus, jobs in view.alike.get(pool, {}).items():
            if gpus <= free:
                most = DEPTH if late else free // gpus + more
                found |= {job.job_id: job for job in jobs[:most]}
        if late and view.shortest is not None:
            found |= {job.job_id: job for job in view.shortest.get(pool, ())[:DEPTH]}
    return sorted(found.values(), key=lambda job: (job.submit_s, job.base_id))


def _late(part: Field, now: float, limit_s: float, most: int) -> list[Job]:
    """The first jobs past the waiting limit: beyond the GPUs there are, nobody can start."""
    late = takewhile(lambda job: now - job.submit_s > limit_s, part.jobs)
    return list(islice(late, most))


def standing(fact: JobFacts, weights: Weights) -> float | None:
    """What a job with one candidate is worth, but for what all of them gain by the hour."""
    if len(fact.candidates) != 1 or fact.weight != 1.0 or fact.deadline_s is not None:
        return None
    left_s = max(fact.candidates[0].remaining_s.value, MIN_REMAINING_S)
    worth = (weights.progress + weights.start) / left_s
    return worth - weights.waiting * fact.waiting_since_s / weights.patience_s**2


def ways(item: Open, weights: Weights) -> Sequence[Way] | None:
    """What an undistinguished job is worth on each count, as the objective has it."""
    fact = item.fact
    if (
        item.planned is not None
        or fact.weight != 1.0
        or fact.deadline_s is not None
        or item.mergeable
    ):
        return None
    waited_s = max(0.0, item.now - fact.waiting_since_s)
    bonus = weights.waiting * waited_s / weights.patience_s**2
    if weights.start:
        smallest = min(item.candidates, key=lambda c: (c.gpus, c.remaining_s.value))
        bonus += weights.start / max(smallest.remaining_s.value, MIN_REMAINING_S)
    return [
        Way(
            c.gpus,
            shape_of(item.job, fact, c),
            weights.progress / max(c.remaining_s.value, MIN_REMAINING_S) + bonus,
        )
        for c in item.candidates
    ]


def seats_for(view: View, part: Field, item: Open, candidate: Candidate, rule: TopologyRule) -> int:
    """For how many jobs like this one there would be room, and for nothing else."""
    request = request_for(item.job, candidate, view.pools[item.fact.pool])
    copies = range(part.gpus_free // candidate.gpus)
    same = [replace(request, job_id=str(copy)) for copy in copies]
    return len(seat(same, part.nodes, view.snapshot.topology, rule).seats)

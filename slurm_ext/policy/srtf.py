"""Policy ``srtf``: shortest remaining time first, in the shape that each job has now.

Non-preemptive, no resizing: jobs are ranked by their expected remaining time at their present GPU
count, and those that fit start in that order; a job that does not fit is passed over. Jobs past
the waiting limit go before all others, by age, and the first of them that does not fit holds the
others back (nothing starts behind it), so that a stream of short jobs cannot starve it.
"""

from __future__ import annotations

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Decision, Plan, Term
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.policy.placement import TopologyRule, seat
from slurm_ext.policy.queue import (
    Field,
    Waiting,
    fields,
    forecast,
    present_candidate,
    request_for,
    running_releases,
)
from slurm_ext.policy.telling import leave, started, waits

_Row = tuple[Job, JobFacts, Candidate, bool]


class SrtfPolicy:
    """See the module. ``waiting_limit_s`` is seconds since the first submission."""

    name = "srtf"

    def __init__(self, waiting_limit_s: float = 7 * 86400.0) -> None:
        self.waiting_limit_s = waiting_limit_s

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        for part in fields(view):
            self._decide_field(view, part, now, decisions)
        for job in view.snapshot.pending():
            fact = view.facts.get(job.job_id)
            if fact is not None and job.job_id not in decisions:
                decisions[job.job_id] = leave(job, fact, len(decisions))
        return Plan(self.name, now, decisions)

    def _decide_field(
        self, view: View, part: Field, now: float, decisions: dict[str, Decision]
    ) -> None:
        rows: list[_Row] = []
        for job in part.jobs:
            fact = view.facts[job.job_id]
            overdue = now - fact.waiting_since_s > self.waiting_limit_s
            rows.append((job, fact, present_candidate(job, fact), overdue))
        rows.sort(key=_srtf_key)
        room = part
        rank = 0
        waiting: list[_Row] = []
        releases = running_releases(view, frozenset(n.name for n in part.nodes), now)
        held_back = False
        for row in rows:
            job, fact, candidate, overdue = row
            nodes = None
            if not held_back and candidate.gpus <= room.gpus_free:
                request = request_for(job, candidate, view.pools[fact.pool])
                topology = view.snapshot.topology
                seating = seat([request], room.nodes, topology, TopologyRule.PREFERRED)
                nodes = seating.seats.get(job.job_id)
            if nodes is None:
                held_back = held_back or overdue
                waiting.append(row)
                continue
            shares = sorted(candidate.configuration.placement, reverse=True)
            room = room.less(dict(zip(nodes, shares, strict=True)))
            releases.append((now + candidate.remaining_s.value, candidate.gpus))
            left = candidate.remaining_s.value
            term = Term("remaining time", left, f"about {left:.0f} s: shortest first")
            decisions[job.job_id] = started(
                job, fact, candidate, nodes, (term,), rank, part, overdue
            )
            rank += 1
        begin = forecast([Waiting(r[0], r[2]) for r in waiting], room.gpus_free, releases, now)
        for place, (job, fact, candidate, _) in enumerate(waiting):
            # In its present shape a job may be left to Slurm, which then reserves for the first.
            first = place == 0 and (held_back or part.foreign > 0)
            decisions[job.job_id] = waits(
                Waiting(job, candidate),
                fact,
                rank + place,
                first,
                room.gpus_free,
                place,
                begin.get(job.job_id),
            )


def _srtf_key(row: _Row) -> tuple[bool, float, int, str]:
    job, fact, candidate, overdue = row
    wait = fact.waiting_since_s if overdue else candidate.remaining_s.value
    return (not overdue, wait, job.base_id, job.job_id)

"""Policy ``srtf``: shortest remaining time first, in the shape that each job has now.

Non-preemptive, no resizing: jobs are ranked by their expected remaining time at their present GPU
count, and those that fit start in that order; a job that does not fit is passed over. Jobs past
the waiting limit go before all others, by age, and the first of them that does not fit holds the
others back (nothing starts behind it), so that a stream of short jobs cannot starve it.

``by_count`` is how the published simulator does it: jobs are chosen by GPU counts alone, then
seated, largest first, and the GPUs of a chosen job that finds no seat stay idle until the next
decision. Ours seats each job before it looks at the next, which wastes less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, filterfalse, takewhile

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Decision, Plan, Term
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.policy.placement import TopologyRule, seat
from slurm_ext.policy.preemptive import seat_ranked
from slurm_ext.policy.queue import (
    Field,
    Shape,
    Waiting,
    fields,
    forecast,
    present_candidate,
    present_ways,
    request_for,
    running_releases,
    shape_of,
)
from slurm_ext.policy.telling import leave, started, waits

_Row = tuple[Job, JobFacts, Candidate, bool]


class SrtfPolicy:
    """See the module. ``waiting_limit_s`` is seconds since the first submission."""

    name = "srtf"

    def __init__(self, waiting_limit_s: float = 7 * 86400.0, *, by_count: bool = False) -> None:
        self.waiting_limit_s = waiting_limit_s
        self.by_count = by_count

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        for part in fields(view):
            self._decide_field(view, part, now, decisions)
        for job in () if view.brief else view.snapshot.pending():
            fact = view.facts.get(job.job_id)
            if fact is not None and job.job_id not in decisions:
                decisions[job.job_id] = leave(job, fact, len(decisions))
        return Plan(self.name, now, decisions)

    def _decide_field(
        self, view: View, part: Field, now: float, decisions: dict[str, Decision]
    ) -> None:
        rows = self._ranked(view, part, now)
        room, free = part, part.gpus_free
        # Nodes only fill up in this walk: what has found no seat once finds none later.
        full: set[Shape] = set()
        rank = 0
        waiting: list[_Row] = []
        begun: list[tuple[float, int]] = []
        held_back = False
        together = self._seats_by_count(view, part, rows) if self.by_count else None
        for row in rows:
            job, fact, candidate, overdue = row
            nodes = None
            if together is not None:
                nodes = together.get(job.job_id)
            elif not held_back and candidate.gpus <= free:
                for way in present_ways(job, fact):
                    shape = shape_of(job, fact, way)
                    if shape in full:
                        continue
                    request = request_for(job, way, view.pools[fact.pool])
                    topology = view.snapshot.topology
                    seating = seat([request], room.nodes, topology, TopologyRule.PREFERRED)
                    nodes = seating.seats.get(job.job_id)
                    if nodes is not None:
                        candidate = way
                        break
                    full.add(shape)
            if nodes is None:
                held_back = held_back or overdue
                if view.brief and (held_back or not free):
                    break
                waiting.append(row)
                continue
            free -= candidate.gpus
            shares = sorted(candidate.configuration.placement, reverse=True)
            room = room.less(dict(zip(nodes, shares, strict=True)))
            begun.append((now + candidate.remaining_s.value, candidate.gpus))
            left = candidate.remaining_s.value
            term = Term("remaining time", left, f"about {left:.0f} s: shortest first")
            decisions[job.job_id] = started(
                job, fact, candidate, nodes, (term,), rank, part, overdue
            )
            rank += 1
        if view.brief:
            return
        names = frozenset(node.name for node in part.nodes)
        releases = [*running_releases(view, names, now), *begun]
        begin = forecast([Waiting(r[0], r[2]) for r in waiting], free, releases, now)
        for place, (job, fact, candidate, _) in enumerate(waiting):
            # In its present shape a job may be left to Slurm, which then reserves for the first.
            first = place == 0 and (held_back or part.foreign > 0)
            decisions[job.job_id] = waits(
                Waiting(job, candidate),
                fact,
                rank + place,
                first,
                free,
                place,
                begin.get(job.job_id),
            )

    def _ranked(self, view: View, part: Field, now: float) -> Iterable[_Row]:
        """The jobs of a field, the one to start first in front; only as far as it is asked for
        where the view knows the order already."""

        def row(job: Job) -> _Row:
            fact = view.facts[job.job_id]
            overdue = now - fact.waiting_since_s > self.waiting_limit_s
            return job, fact, present_candidate(job, fact), overdue

        known = None if view.shortest is None else view.shortest.get(part.pools[0])
        if known is None or len(part.pools) > 1 or self.by_count:
            return sorted(map(row, part.jobs), key=_srtf_key)
        # Queues are by submission, so that who waits too long stands in front.
        aged = list(takewhile(lambda item: item[3], map(row, part.jobs)))
        return chain(aged, filterfalse(lambda item: item[3], map(row, known)))

    def _seats_by_count(
        self, view: View, part: Field, rows: Iterable[_Row]
    ) -> Mapping[str, tuple[str, ...]]:
        """Seats of the jobs whose counts fit, one after the other, into what is free."""
        free = part.gpus_free
        requests = []
        for job, fact, candidate, overdue in rows:
            if candidate.gpus <= free:
                free -= candidate.gpus
                requests.append(request_for(job, candidate, view.pools[fact.pool]))
            elif overdue:
                break
        return seat_ranked(requests, part, view.snapshot.topology).seats


def _srtf_key(row: _Row) -> tuple[bool, float, int, str]:
    job, fact, candidate, overdue = row
    wait = fact.waiting_since_s if overdue else candidate.remaining_s.value
    return (not overdue, wait, job.base_id, job.job_id)

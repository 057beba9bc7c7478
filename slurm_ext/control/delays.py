"""What a plan says of jobs that may not start yet: begin times, delays, cool-downs. Pure.

Policies know of none of them: what may not start yet is kept out of the allocation, and told here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_ext.control.lease import begin_s
from slurm_ext.control.resume import Cooldown
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import JobFacts
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.queue import present_candidate

# What a job that cools down waits for.
COOLING = "the end of its cool-down"


def with_begins(plan: Plan, snapshot: Snapshot) -> Plan:
    """The plan, in which a job that is left alone starts no earlier than Slurm lets it.

    So it is with Slurm's delay after a requeue where that may not be lifted, and with a --begin.
    """
    later = {
        job.job_id: begin
        for job in snapshot.pending()
        if (begin := begin_s(job)) is not None and begin > snapshot.taken_s
    }
    decisions = {
        job_id: replace(d, expected_start_s=later[job_id])
        if d.verdict is Verdict.LEAVE and d.expected_start_s is None and job_id in later
        else d
        for job_id, d in plan.decisions.items()
    }
    return replace(plan, decisions=decisions)


def with_cooling(
    plan: Plan,
    cooling: Mapping[str, Cooldown],
    facts: Mapping[str, JobFacts],
    snapshot: Snapshot,
) -> Plan:
    """The plan with what is to become of jobs that cool down, behind all others."""
    decisions = {j: d for j, d in plan.decisions.items() if j not in cooling}
    jobs = {job.job_id: job for job in snapshot.pending() if job.job_id in cooling}
    rank = len(plan.decisions)
    for job_id, wait in sorted(cooling.items(), key=lambda item: (item[1].until_s, item[0])):
        fact, job = facts[job_id], jobs[job_id]
        likely = present_candidate(job, fact) if fact.candidates else None
        until_s = wait.until_s
        begin = begin_s(job)
        if not fact.permit.lease:
            # Slurm starts it when its own delay is over.
            until_s = min(until_s, begin) if begin is not None else until_s
        decisions[job_id] = Decision(
            job_id=job_id,
            verdict=Verdict.WAIT,
            rank=rank,
            reason=wait.reason,
            configuration=likely.configuration if likely is not None else None,
            remaining_s=likely.remaining_s if likely is not None else None,
            expected_start_s=until_s,
            waits_for=COOLING,
            pool=fact.pool,
        )
        rank += 1
    return replace(plan, decisions=decisions)

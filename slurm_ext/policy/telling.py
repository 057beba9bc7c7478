"""Turns what a policy chose into decisions: verdict, place, and the reason in plain words."""

from __future__ import annotations

from dataclasses import replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Decision, Term, Verdict
from slurm_ext.domain.policy import JobFacts
from slurm_ext.domain.spans import about, counted
from slurm_ext.policy.queue import Field, Waiting


def started(
    job: Job,
    fact: JobFacts,
    candidate: Candidate,
    nodes: tuple[str, ...],
    terms: tuple[Term, ...],
    rank: int,
    part: Field,
    overdue: bool = False,
) -> Decision:
    """The decision for a job that starts now, on ``nodes`` in the candidate's placement."""
    count = candidate.gpus
    if overdue:
        why = f"it is past the waiting limit and {_are_free(count)}"
    elif fact.permit.resize and len(fact.candidates) > 1:
        why = (
            f"{counted(count, 'GPU')} on {counted(len(nodes), 'node')} "
            f"make{'s' if count == 1 else ''} the most progress per second, over all waiting jobs,"
            f" of what finds room among the {counted(part.gpus_free, 'free GPU')}"
        )
    else:
        why = f"{_are_free(count)} for it, and no other use of them makes more progress"
    ours = fact.permit.resize or fact.permit.lease
    return Decision(
        job_id=job.job_id,
        verdict=Verdict.START if ours else Verdict.ORDER,
        rank=rank,
        reason=why,
        configuration=candidate.configuration,
        nodes=nodes if fact.permit.pin else (),
        remaining_s=candidate.remaining_s,
        pool=fact.pool,
        terms=terms,
    )


def _are_free(count: int) -> str:
    return f"{counted(count, 'GPU')} {'is' if count == 1 else 'are'} free"


def waits(
    item: Waiting,
    fact: JobFacts,
    rank: int,
    reserve: bool,
    free: int,
    place: int,
    begin: float | None,
) -> Decision:
    """The decision for a job that does not start now; ``place`` of our waiting jobs are ahead."""
    need = min(c.gpus for c in fact.candidates)
    if free < need:
        left = counted(free, "GPU") if free else "none"
        waits_for = f"at least {counted(need, 'GPU')}; its pool has {left} left after this plan"
    else:
        waits_for = "a seat: enough GPUs are free, but not where its placement needs them"
    if place:
        more = (
            "is worth more per GPU and comes" if place == 1 else "are worth more per GPU and come"
        )
        waits_for += f"; {counted(place, 'job')} {more} first"
    if reserve:
        verdict, reason = Verdict.RESERVE, "first in line: Slurm reserves for it in this shape"
    elif fact.permit.lease:
        verdict, reason = Verdict.WAIT, "its GPU count is decided when GPUs become free"
    else:
        verdict, reason = Verdict.ORDER, "only its place in the queue is planned"
    remaining = item.candidate.remaining_s
    return Decision(
        job_id=item.job.job_id,
        verdict=verdict,
        rank=rank,
        reason=reason,
        configuration=item.candidate.configuration,
        remaining_s=remaining,
        expected_start_s=begin,
        waits_for=waits_for,
        pool=fact.pool,
        terms=(
            Term(
                "value per GPU",
                worth_per_gpu(item.candidate, fact),
                _work(remaining, item.candidate.gpus),
            ),
        ),
    )


def _work(remaining: Estimate, gpus: int) -> str:
    on = f"on {counted(gpus, 'GPU')}"
    if remaining.unlimited:
        return f"work {on}, without a time limit"
    return f"about {about(remaining.value)} of work {on}"


def carried(job: Job, fact: JobFacts, carrier: str, rank: int) -> Decision:
    """The decision for a job that is merged into one that starts now."""
    return Decision(
        job_id=job.job_id,
        verdict=Verdict.WAIT,
        rank=rank,
        reason=f"job {carrier} trains it along: both together make more progress so",
        waits_for=f"the end of job {carrier}",
        pool=fact.pool,
    )


def left_to_slurm(decision: Decision, job: Job, since_s: float | None, now: float) -> Decision:
    """A start that Slurm did not carry out: in its submitted shape the job is Slurm's again."""
    tried = "" if since_s is None else f" for {about(now - since_s)}"
    why = f" (it says {job.reason})" if job.reason not in ("", "None") else ""
    return replace(
        decision,
        verdict=Verdict.ORDER,
        reason=f"it should have started{tried}, but Slurm does not start it{why}",
        waits_for="",
        wanted_since_s=since_s,
    )


def worth_per_gpu(candidate: Candidate, fact: JobFacts) -> float:
    """Progress per second and GPU, times the job's weight: the order of jobs that wait."""
    area = candidate.remaining_s.value * candidate.gpus
    return fact.weight / area if area > 0 else float("inf")


def leave(job: Job, fact: JobFacts, rank: int) -> Decision:
    """The decision for a job of which nothing is ours to plan."""
    reason = "; ".join(fact.permit.reasons)
    if fact.permit.order and job.gpus:
        # What forbids another size is not what keeps it from being planned as it is.
        reason = "no feasible configuration is known" + (f" ({reason})" if reason else "")
    return Decision(job.job_id, Verdict.LEAVE, rank, reason, pool=fact.pool)

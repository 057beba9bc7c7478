"""Turns what a policy chose into decisions: verdict, place, and the reason in plain words."""

from __future__ import annotations

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Decision, Term, Verdict
from slurm_ext.domain.policy import JobFacts
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
        why = f"it is past the waiting limit and {count} GPUs are free"
    elif fact.permit.resize and len(fact.candidates) > 1:
        why = (
            f"{count} GPUs on {len(nodes)} node(s) make the most progress per second that the "
            f"{part.gpus_free} free GPUs allow, over all waiting jobs"
        )
    else:
        why = f"its {count} GPUs are free and no other use of them makes more progress"
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
        waits_for = f"at least {need} GPU(s); {free} of its pool are free after this plan"
    else:
        waits_for = "a seat: enough GPUs are free, but not where its placement needs them"
    if place:
        waits_for += f"; {place} job(s) are worth more per GPU and come first"
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
                f"about {remaining.value:.0f} s of work on {item.candidate.gpus} GPU(s)",
            ),
        ),
    )


def worth_per_gpu(candidate: Candidate, fact: JobFacts) -> float:
    """Progress per second and GPU, times the job's weight: the order of jobs that wait."""
    area = candidate.remaining_s.value * candidate.gpus
    return fact.weight / area if area > 0 else float("inf")


def leave(job: Job, fact: JobFacts, rank: int) -> Decision:
    """The decision for a job of which nothing is ours to plan."""
    reason = "; ".join(fact.permit.reasons) or "no feasible configuration is known"
    return Decision(job.job_id, Verdict.LEAVE, rank, reason, pool=fact.pool)

"""Documents of jobs that run: what a plan said no longer counts once Slurm has granted a place.

A job may start before any cycle has planned it, on an empty cluster it always does. It gets a
document all the same, so that its truth and its attempts are seen. No I/O here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm_ext.control.observe import Observation
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.truth import NOTHING_TOLD, Told
from slurm_ext.domain.document import Mode, PlanDocument
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import Permit

UNPLANNED = "Slurm started it before it could be planned"
BY_SLURM = "Slurm started it by itself"


def mode_in(partition: str, mode: Mode, rules: ActingRules) -> Mode:
    """The mode as it is for jobs of this partition."""
    return Mode.OBSERVE if mode is Mode.ACTING and not rules.acts.get(partition) else mode


def as_started(decision: Decision) -> Decision:
    """The decision once its job runs: it waits for nothing, and no reason to wait is left.

    A reason why the job was to start stays: it tells why it got these GPUs.
    """
    wanted = decision.verdict is Verdict.START or (
        decision.verdict is Verdict.ORDER and not decision.waits_for and not decision.left_to_slurm
    )
    return replace(
        decision,
        waits_for="",
        expected_start_s=None,
        reason=decision.reason if wanted else BY_SLURM,
    )


def of_job(
    job: Job,
    job_id: str,
    plan: Plan,
    decision: Decision,
    mode: Mode,
    rules: ActingRules,
    entry: LedgerEntry | None,
    word: Told,
) -> PlanDocument:
    """What every document of a job or array says, whether it was planned or has started unplanned.

    The counts and the waiting are those of Slurm's own record, where the caller knows no better.
    """
    return PlanDocument(
        job_id=job_id,
        base_id=job.base_id,
        user=job.user,
        uid=job.uid,
        partition=job.partition,
        qos=job.qos,
        account=job.account,
        state=job.state.value,
        priority=job.priority,
        made_s=plan.made_s,
        mode=mode_in(job.partition, mode, rules),
        policy=plan.policy,
        decision=decision,
        permit=Permit(order=False),
        requested_gpus=job.gpus,
        present_gpus=job.gpus,
        waiting_since_s=entry.first_submit_s if entry is not None else job.submit_s,
        ours=entry,
        attempt=job.restarts,
        starts=job.restarts,
        truth=word.truth,
        attempts=word.attempts,
    )


def unplanned(
    seen: Observation,
    plan: Plan,
    ledger: Mapping[str, LedgerEntry],
    mode: Mode,
    rules: ActingRules,
    known: Collection[int],
    told: Mapping[str, Told],
) -> dict[int, PlanDocument]:
    """Documents of running jobs of ours that have none (``known``), by number.

    An array with a pending rest is planned, and its document speaks for the array.
    """
    waiting = {job.base_id for job in seen.snapshot.pending()}
    found: dict[int, PlanDocument] = {}
    for job in seen.snapshot.running():
        if job.base_id in known or job.base_id in waiting or job.base_id in found:
            continue
        if job.job_id in seen.directives:
            reason = UNPLANNED
        elif job.job_id in seen.broken:
            reason = f"its directive is unusable: {seen.broken[job.job_id]}"
        else:
            continue
        entry = ledger.get(job.job_id)
        job_id = str(job.base_id) if job.array else job.job_id
        found[job.base_id] = replace(
            of_job(
                job,
                job_id,
                plan,
                Decision(job_id, Verdict.LEAVE, 0, reason),
                mode,
                rules,
                entry,
                told.get(job_id, NOTHING_TOLD),
            ),
            requested_gpus=_submitted_gpus(seen, job, entry),
            starts=job.restarts + 1,
        )
    return found


def _submitted_gpus(seen: Observation, job: Job, entry: LedgerEntry | None) -> int:
    if entry is not None and entry.submitted is not None:
        return entry.submitted.gpus
    directive = seen.directives.get(job.job_id)
    if directive is not None and directive.req is not None and directive.req.gpus:
        return directive.req.gpus
    return job.gpus

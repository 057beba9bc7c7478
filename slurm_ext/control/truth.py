"""What jobs tell about themselves, as plan documents show it. Pure.

The plan says what was expected, this what came of it: steps, speed, last checkpoint, the end that
follows from them, and the attempts so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_ext.control.observe import Observation
from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.document import PlanDocument, Truth
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.job import Job
from slurm_ext.domain.progress import Progress

# Documents written for reports alone, per second: a thousand jobs that report every few seconds
# must not make the daemon write a thousand files in every cycle. Few jobs are followed closely.
TRUTHS_PER_S = 33.0
# However many jobs run, a document follows its job's reports at this distance.
TRUTH_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Told:
    """What is known about one job from itself."""

    truth: Truth | None = None
    attempts: tuple[Attempt, ...] = ()


NOTHING_TOLD = Told()


def told_of(seen: Observation, ends: Mapping[str, Estimate]) -> dict[str, Told]:
    """By job id, for every job of ours that told anything. ``ends`` are expected ends."""
    found: dict[str, Told] = {}
    for job in seen.snapshot.jobs:
        if job.job_id not in seen.directives:
            continue
        report = seen.sources.progress.get(job.job_id)
        record = seen.attempts.get(job.job_id)
        if report is None and record is None:
            continue
        found[job.job_id] = Told(
            None if report is None else truth_from(report, _end(job, report, ends)),
            () if record is None else record.attempts,
        )
    return found


def truth_every_s(running: int) -> float:
    """At which distance documents follow reports while so many jobs run."""
    return min(TRUTH_EVERY_S, running / TRUTHS_PER_S)


def worth_telling(document: PlanDocument, told: Told, every_s: float = TRUTH_EVERY_S) -> bool:
    """Whether a running job's document has to be written again for what the job told since.

    ``every_s`` is how far the last report told has to lie back for a new one to be worth it.
    """
    old, new = document.truth, told.truth
    if told.attempts and told.attempts != document.attempts:
        return True
    if new is None or new == old:
        return False
    if old is None or old.attempt != new.attempt:
        return True
    if old.save_error != new.save_error or old.hold != new.hold:
        return True
    return old.checkpoint_step != new.checkpoint_step or new.at_s - old.at_s >= every_s


def _end(job: Job, report: Progress, ends: Mapping[str, Estimate]) -> Estimate | None:
    """The expected end, where it is one of the attempt that reported."""
    return ends.get(job.job_id) if job.running and report.attempt >= job.restarts else None


def truth_from(report: Progress, ends_s: Estimate | None = None) -> Truth:
    """A report as documents show it."""
    return Truth(
        at_s=report.at_s,
        attempt=report.attempt,
        step=report.step,
        samples=report.samples,
        samples_per_s=report.samples_per_s,
        total_steps=report.total_steps,
        total_samples=report.total_samples,
        checkpoint_step=report.last_checkpoint_step,
        checkpoint_s=report.last_checkpoint_s,
        save_s=report.save_s,
        ends_s=ends_s,
        save_error=report.save_error,
        hold=report.hold,
        restored_step=report.restored_step,
    )

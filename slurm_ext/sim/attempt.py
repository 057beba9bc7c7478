"""How far a job has come: the arithmetic of work over several starts.

Work is a share of the whole, so that it means the same at every GPU count. It is kept twice: what
is *done* in truth, which decides when a job ends, and what has been *seen*, reckoned with the
estimates alone, which is all that a policy is told. The two differ where the estimates err, and a
job that outlives its estimate is shown as nearly done rather than as done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate
from slurm_ext.sim.model import Run, SimJob

# A job that outlives its estimate is taken to have this share of its work left.
LEAST_LEFT = 0.01


@dataclass(frozen=True, slots=True)
class Progress:
    """A job between two starts: shares of its work, and the GPU seconds that it has held."""

    done: float = 0.0
    seen: float = 0.0
    attained_gpu_s: float = 0.0
    starts: int = 0

    @property
    def left_seen(self) -> float:
        """The share that a policy believes to be left."""
        return 1.0 if self.seen == 0 else max(1.0 - self.seen, LEAST_LEFT)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start, while it lasts.

    Work begins at ``begin_s``; the whole of it would take ``work_s`` in truth and ``seen_work_s``
    by the estimate. ``end_s`` is when it ends if nothing interferes, ``expected_end_s`` what the
    estimate says. ``before`` is the progress with which it started.
    """

    job: SimJob
    configuration: Configuration
    seats: Mapping[str, int]
    serial: int
    queued_s: float
    start_s: float
    begin_s: float
    end_s: float
    work_s: float
    seen_work_s: float
    expected_end_s: float
    before: Progress

    def worked_s(self, at: float) -> float:
        """Seconds of work up to ``at``."""
        return min(max(0.0, at - self.begin_s), (1.0 - self.before.done) * self.work_s)

    def progress(self, at: float, kept_every_s: float = 0.0) -> Progress:
        """How far the job is at ``at``; of work that an outage cuts, whole multiples are kept."""
        worked = self.worked_s(at)
        if kept_every_s:
            worked = math.floor(worked / kept_every_s + 1e-9) * kept_every_s
        before = self.before
        return Progress(
            before.done + (worked / self.work_s if self.work_s else 0.0),
            before.seen + (worked / self.seen_work_s if self.seen_work_s else 0.0),
            before.attained_gpu_s + max(0.0, at - self.start_s) * self.configuration.gpus,
            before.starts + 1,
        )

    def run(self, end_s: float, cause: str, kept: float) -> Run:
        """The record of this start, of which the share ``kept`` of the work remains."""
        return Run(
            job_id=self.job.job_id,
            submit_s=self.job.submit_s,
            start_s=self.start_s,
            end_s=end_s,
            gpus=self.configuration.gpus,
            seats=self.seats,
            error_free_s=self.job.error_free_s,
            queued_s=self.queued_s,
            share=kept,
            lost_s=max(0.0, end_s - self.start_s - kept * self.work_s),
            cause=cause,
        )


def attempt(
    job: SimJob,
    configuration: Configuration,
    true_s: float,
    seats: Mapping[str, int],
    before: Progress,
    now: float,
    queued_s: float,
    launch_s: float = 0.0,
    saved_s: float = 0.0,
) -> Attempt:
    """Start a job. ``true_s`` is a whole run's time, ``saved_s`` what a pipeline switch spares."""
    start_up = max(0.0, job.start_up_s - saved_s)
    work_s = max(0.0, true_s - job.start_up_s)
    begin_s = now + launch_s + start_up
    if before.done:
        end_s = begin_s + (1.0 - before.done) * work_s
    else:
        end_s = now + launch_s + max(true_s - saved_s, start_up)
    candidate = job.candidate(configuration)
    if candidate is None:
        expected_s, seen_work_s = job.limit_s, 0.0
    else:
        expected_s = left_of(candidate.remaining_s, job.start_up_s, before.left_seen).value
        seen_work_s = max(0.0, candidate.remaining_s.value - job.start_up_s)
    return Attempt(
        job=job,
        configuration=configuration,
        seats=seats,
        serial=before.starts,
        queued_s=queued_s,
        start_s=now,
        begin_s=begin_s,
        end_s=end_s,
        work_s=work_s,
        seen_work_s=seen_work_s,
        expected_end_s=now + expected_s,
        before=before,
    )


def left_of(whole: Estimate, start_up_s: float, left: float) -> Estimate:
    """The estimate of a start that has only the share ``left`` of the work before it."""
    if left == 1.0:
        return whole

    def part(seconds: float) -> float:
        return start_up_s + left * max(0.0, seconds - start_up_s)

    return Estimate(part(whole.value), part(whole.low), part(whole.high), whole.source, whole.note)


def restarts(job: SimJob, progress: Progress, delay_s: float = 0.0) -> tuple[Candidate, ...]:
    """The job's candidates as they are after some progress: what a start from here would take,
    which for a job that runs begins ``delay_s`` after it was told to stop."""
    left = progress.left_seen
    if left == 1.0 and not delay_s:
        return job.candidates
    # Built by hand: this is what a replay with running jobs that may be stopped spends its time on.
    return tuple(
        Candidate(
            item.job_ids,
            item.configuration,
            _later(left_of(item.remaining_s, job.start_up_s, left), delay_s),
            item.throughput,
        )
        for item in job.candidates
    )


def _later(estimate: Estimate, delay_s: float) -> Estimate:
    if not delay_s:
        return estimate
    low, value, high = estimate.low, estimate.value, estimate.high
    return replace(estimate, low=low + delay_s, value=value + delay_s, high=high + delay_s)

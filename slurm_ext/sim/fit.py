"""What a site's accounting says about its fine-tuning queue. Pure: a log in, shares out.

An hour's queueing share is sum of waits / sum of job completion times of the jobs whose waiting
*began* in that hour of the day: a user meets the queue when submitting. Jobs that still wait or run
are counted but not judged, so a log that ends in a jam looks a little better than it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_ext.sim.fragments import Fragments, fragments
from slurm_ext.sim.readers.sacct import ended_jobs
from slurm_ext.sim.readers.sacctjob import SacctJob, SacctLog
from slurm_ext.sim.reuse import Reuse, reuse

# Half of a job's time is waiting: order and GPU counts decide over it.
BUSY = 0.5
# Beyond it waiting outweighs running by half as much again: also trains slower to wait less.
CROWDED = 0.6
# Of a job shorter than this, starting it is a visible part.
SHORT_S = 1800
# An hour of the day with fewer jobs does not speak for itself.
MIN_HOUR_JOBS = 10
HOUR_S = 3600
_DAY_H = 24
# Ends that say nothing about how long such work takes.
_BROKEN = frozenset({"FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "LAUNCH_FAILED"})


@dataclass(frozen=True, slots=True)
class Hour:
    """Jobs submitted in one hour of the day, and the share of their time that was waiting."""

    hour: int
    jobs: int
    queue_share: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The findings of `fit` about GPU jobs that ran to an end. Shares are from 0 to 1.

    ``short_share`` leaves out jobs that broke down (``broken_share``): a crash after ten seconds
    is no short job. ``multi_gpu_share`` and ``short_gpu_share`` are shares of GPU time, the
    ``*_jobs_share`` shares of the jobs that were submitted in busy and crowded hours.
    """

    jobs: int
    unfinished: int
    period_s: float
    gpu_hours: float
    sizes: tuple[tuple[int, int], ...]
    multi_gpu_share: float
    short_share: float
    short_gpu_share: float
    broken_share: float
    queue_share: float
    hours: tuple[Hour, ...]
    busy_jobs_share: float
    crowded_jobs_share: float
    reuse: Reuse
    fragments: Fragments | None
    notes: tuple[str, ...] = ()


def fit(log: SacctLog, gpus_per_node: int | None = None) -> Fit:
    """Judge a log. Raises DataError where no GPU job ran to its end."""
    jobs, notes = ended_jobs(log)
    whole = [job for job in jobs if job.state not in _BROKEN] or jobs
    times = [(job, job.ran_s * job.gpus / HOUR_S) for job in jobs]
    gpu_hours = sum(hours for _, hours in times)
    hours = _hours(jobs)
    return Fit(
        jobs=len(jobs),
        unfinished=sum(job.copies for job in log.jobs if job.gpus and (job.running or job.waiting)),
        period_s=log.horizon_s - min(job.submit_s for job in jobs),
        gpu_hours=gpu_hours,
        sizes=tuple(sorted(Counter(job.gpus for job in jobs).items())),
        multi_gpu_share=sum(h for job, h in times if job.gpus > 1) / gpu_hours,
        short_share=sum(job.ran_s < SHORT_S for job in whole) / len(whole),
        short_gpu_share=sum(h for job, h in times if job.ran_s < SHORT_S) / gpu_hours,
        broken_share=sum(job.state in _BROKEN for job in jobs) / len(jobs),
        queue_share=_queue_share(jobs),
        hours=hours,
        busy_jobs_share=_in_hours(hours, BUSY, len(jobs)),
        crowded_jobs_share=_in_hours(hours, CROWDED, len(jobs)),
        reuse=reuse(jobs),
        fragments=fragments(log, gpus_per_node),
        notes=notes,
    )


def _queue_share(jobs: Sequence[SacctJob]) -> float:
    waited = sum(job.waited_s for job in jobs)
    ran = sum(job.ran_s for job in jobs)
    return waited / (waited + ran)


def _hours(jobs: Sequence[SacctJob]) -> tuple[Hour, ...]:
    groups: dict[int, list[SacctJob]] = defaultdict(list)
    for job in jobs:
        groups[int(job.ready_s // HOUR_S) % _DAY_H].append(job)
    return tuple(
        Hour(hour, len(group), _queue_share(group)) for hour, group in sorted(groups.items())
    )


def _in_hours(hours: Sequence[Hour], bound: float, jobs: int) -> float:
    """Share of the jobs that were submitted in hours of at least this queueing share."""
    return sum(hour.jobs for hour in reached(hours, bound)) / jobs


def reached(hours: Sequence[Hour], bound: float) -> tuple[Hour, ...]:
    """Hours with enough jobs whose queueing share is at least ``bound``."""
    return tuple(h for h in hours if h.jobs >= MIN_HOUR_JOBS and h.queue_share >= bound)

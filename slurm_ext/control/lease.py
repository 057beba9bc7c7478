"""Whose is a pending job's future start, and until when shall a lease run.

A lease is a StartTime that we wrote. Slurm tells only the time, not who set it, so every future
start is compared with what the ledger says: a start that we did not write is the user's. Two
starts are ours to take over without having written them: the submit grace of job_submit.lua and
the delay that Slurm itself gives a requeued job.

The begin time is read from EligibleTime, not from StartTime and not from the reason: backfill's
expected start hides the begin time in StartTime, and after a write the reason stays what it was
until the scheduler looks at the job again (both seen on 24.11.5).

Leases end at instants that are spread evenly over the renewal period by job id, so that a thousand
jobs leased in one cycle are not renewed in one cycle.
"""

from __future__ import annotations

import math
from enum import StrEnum

from slurm_ext.control.rules import ActingRules
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry

# Slurm keeps whole seconds, and the submit grace is counted from a clock read before the job's
# submit time is stamped.
_SAME_S = 1.5
_STAMP_S = 2.5
# Fractional part of the golden ratio: multiples of it fill the unit interval evenly, so that
# consecutive job ids get phases far apart.
_GOLDEN = 0.6180339887498949


class Hold(StrEnum):
    """Why a pending job may not start before its begin time.

    NONE     its begin time has come
    OURS     a lease of ours
    GRACE    the submit grace that job_submit.lua gave it
    REQUEUE  the delay that Slurm gives a requeued job
    OTHERS   the user's --begin, or somebody's StartTime
    """

    NONE = "none"
    OURS = "ours"
    GRACE = "grace"
    REQUEUE = "requeue"
    OTHERS = "others"

    @property
    def liftable(self) -> bool:
        """Whether we may let the job start earlier."""
        return self in (Hold.OURS, Hold.GRACE, Hold.REQUEUE)


def begin_s(job: Job) -> float | None:
    """The earliest start that Slurm holds for a pending job, ``None`` where there is none."""
    if job.eligible_s is not None:
        return job.eligible_s
    return job.start_s if job.reason == "BeginTime" else None


def hold_of(
    job: Job,
    entry: LedgerEntry | None,
    directive: Directive | None,
    rules: ActingRules,
    now: float,
) -> Hold:
    """Who keeps the job from starting before its begin time."""
    begin = begin_s(job)
    if begin is None or begin <= now:
        return Hold.NONE
    if entry is not None:
        for written in (entry.lease_until_s, entry.lease_before_s):
            if written is not None and abs(begin - written) <= _SAME_S:
                return Hold.OURS
    own = directive.begin_s if directive is not None else None
    if own is not None and own > now:
        return Hold.OTHERS
    if directive is None:
        return Hold.OTHERS
    if job.restarts and abs(begin - job.submit_s - rules.requeue_hold_s) <= _STAMP_S:
        return Hold.REQUEUE
    if not job.restarts and rules.grace_s and begin <= job.submit_s + rules.grace_s + _STAMP_S:
        return Hold.GRACE
    return Hold.OTHERS


def lease_end_s(job: Job, rules: ActingRules, now: float) -> float:
    """When a lease written now shall end: the job's own instant in the last renewal period.

    It lies more than ``lease_s * (1 - renew_at)`` and at most ``lease_s`` ahead, in whole seconds
    rounded up, and repeats with the renewal period.
    """
    period = rules.lease_s * rules.renew_at
    phase = (job.base_id * _GOLDEN) % 1.0 * period
    least = now + rules.lease_s - period
    turns = math.floor((least - phase) / period) + 1
    return float(math.ceil(phase + turns * period))


def renewal_due(begin: float, rules: ActingRules, now: float) -> bool:
    """Whether a lease that ends at ``begin`` has to be renewed now."""
    return begin - now <= rules.lease_s * (1.0 - rules.renew_at)

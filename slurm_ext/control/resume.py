"""Whether a job that came back to the queue may start now, or has to wait a little. Pure.

Slurm keeps a requeued job back for about two minutes; a job that saved and left in good order loses
that time for nothing, so its delay is lifted. A job that fails at every start would then fail
without a pause, and a node that dies under a hundred jobs would bring back all of them at once.
Hence two bounds, and a reason in words for every "no":

* Cool-down. So many requeues in a window cost nothing; each further one doubles the time before
  the next start. Each cause counts by itself, and causes that are nobody's fault (preemption, time
  limit, a person's or our own request) have a bound of their own.
* At once. So many jobs of one partition may be on their way from start to first step together: they
  all read checkpoints from the same file server.

The choice a reader would question: a refusal is at most Slurm's own delay for a job that may not be
leased. Only one that may is kept back for longer, and never past the waiting limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from slurm_ext.control.lease import Hold, begin_s
from slurm_ext.control.rules import ResumeRules
from slurm_ext.domain.attempt import Attempts, Cause
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry, Requeue
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.domain.spans import about, counted

# Requeues kept per job: more than any sensible bound, few enough for a row of the ledger.
MAX_REQUEUES = 32
# From a requeue, which Slurm notes in whole seconds, to the first second that is surely later.
REVOKED_S = 2.0
# A cool-down does not double for ever.
_MAX_DOUBLINGS = 20
# A start that was let go "now" is stamped by slurmctld's clock.
_CLOCKS_S = 2.0
# Causes that say nothing against the job or the nodes that it ran on.
ORDERLY = frozenset(
    {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.DAEMON, Cause.OPERATOR, Cause.COMPLETED}
)

# What a job can say of its end when in truth a node under it failed.
_MAY_BE_A_NODE = frozenset({None, Cause.UNKNOWN, Cause.LOST_PEER})


@dataclass(frozen=True, slots=True)
class Cooldown:
    """Until when a job shall not start again, and why."""

    until_s: float
    reason: str


def noted(
    entry: LedgerEntry, job: Job, attempts: Attempts | None, node_failed: bool
) -> LedgerEntry:
    """The entry with a requeue that was not noted yet.

    Of several that nobody saw, only the last one's time is known, and only it is noted. What the
    job's own record says about the cause comes before what we saw, a failed node of the job; but a
    lost peer on a failed node was lost with it, which no rank on another node can know.
    """
    if entry.restarts is None or job.restarts < entry.restarts:
        return replace(entry, restarts=job.restarts)
    if job.restarts == entry.restarts:
        return entry
    cause = told_cause(attempts, job.restarts - 1)
    if node_failed and cause in _MAY_BE_A_NODE:
        cause = Cause.NODE_FAIL
    cause = cause or Cause.UNKNOWN
    # Slurm stamps a requeued job's submit time anew.
    requeues = (*entry.requeues, Requeue(job.submit_s, cause))[-MAX_REQUEUES:]
    return replace(entry, requeues=requeues, restarts=job.restarts)


def told_cause(attempts: Attempts | None, number: int) -> Cause | None:
    """Why that attempt ended, as its own record says; ``None`` where it does not."""
    if attempts is None:
        return None
    found = [a.cause for a in attempts.attempts if a.number == number and a.cause is not None]
    return found[-1] if found else None


def cooldown_of(entry: LedgerEntry, rules: ResumeRules, now: float) -> Cooldown | None:
    """The cool-down that the job has still to wait for, ``None`` where there is none."""
    if not entry.requeues:
        return None
    last = entry.requeues[-1]
    recent = [r for r in entry.requeues if now - r.at_s < rules.window_s]
    times = sum(1 for r in recent if r.cause is last.cause)
    free = rules.free_orderly if last.cause in ORDERLY else rules.free_failures
    if times <= free:
        return None
    wait_s = min(
        rules.cooldown_max_s, rules.cooldown_s * 2.0 ** min(_MAX_DOUBLINGS, times - free - 1)
    )
    until_s = last.at_s + wait_s
    if until_s <= now:
        return None
    return Cooldown(
        until_s,
        f"it cools down for {about(wait_s)} after {counted(times, 'requeue')} within"
        f" {about(rules.window_s)} (cause: {last.cause.value})",
    )


def revoking(job: Job, now: float) -> str:
    """Why a job that came back a moment ago must not start yet; empty where it may.

    A node takes no credential of a job that was made in the second in which it ended the job's last
    attempt, or before; Slurm fails such a job for good (seen on 24.11: "Job credential revoked").
    """
    if job.restarts and now < job.submit_s + REVOKED_S:
        return "its last attempt ended a moment ago, and its nodes would refuse the next one"
    return ""


class ResumeGuard:
    """Decides over the lifts of one wave."""

    def __init__(
        self,
        snapshot: Snapshot,
        rules: ResumeRules,
        now: float,
        stepping: Collection[str] = (),
    ) -> None:
        """``stepping`` are running jobs whose present attempt has ended a step."""
        self._rules = rules
        self._now = now
        self._resuming = Counter(
            job.partition
            for job in snapshot.jobs
            if job.restarts and self._on_its_way(job, stepping)
        )

    def _on_its_way(self, job: Job, stepping: Collection[str]) -> bool:
        if job.running:
            begun = job.start_s if job.start_s is not None else self._now
            return job.job_id not in stepping and self._now - begun < self._rules.settle_s
        # Let go a moment ago: it starts as soon as Slurm looks at it.
        begin = begin_s(job)
        return (
            job.pending
            and begin is not None
            and not job.held
            and -_CLOCKS_S <= self._now - begin < self._rules.settle_s
        )

    def refusal(self, job: Job, entry: LedgerEntry, hold: Hold, permit: Permit) -> str:
        """Why the job may not be let go now; empty where it may, and then it counts as resuming."""
        if not job.restarts or (hold is Hold.OURS and not permit.lease):
            return ""  # a lease that may not be renewed would only end a little later
        cooling = cooldown_of(entry, self._rules, self._now)
        if cooling is not None:
            return cooling.reason
        if self._resuming[job.partition] >= self._rules.at_once:
            return (
                f"as many requeued jobs of its partition as may ({self._rules.at_once}) are"
                " starting now"
            )
        self._resuming[job.partition] += 1
        return ""

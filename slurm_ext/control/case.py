"""One pending job of ours with everything that is known about it from one observation.

Here the ledger is brought up to what Slurm shows: leases that are over, writes that have arrived,
values that somebody else wrote, a new attempt after a requeue. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_ext.control.lease import Hold, hold_of, renewal_due
from slurm_ext.control.order import Place
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.submitted import (
    Frame,
    carries_ours,
    first_sight,
    frame_of,
    notice_others,
    present_shape,
    same_limit,
    same_size,
)
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job, Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot

_NOTHING = Permit(order=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A pending job, what is ours on it, what may be touched, and what the plan wants."""

    job: Job
    entry: LedgerEntry
    directive: Directive | None
    permit: Permit
    decision: Decision | None
    hold: Hold
    frame: Frame | None

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.job.job_id

    @property
    def verdict(self) -> Verdict:
        """What the plan wants, as far as the job may be touched."""
        if self.decision is None or not (self.permit.order or self.permit.resize):
            return Verdict.LEAVE
        return self.decision.verdict

    @property
    def rank(self) -> int:
        """The wanted place; jobs without a plan come first, what is ours on them is in the way."""
        return self.decision.rank if self.decision is not None else -1

    @property
    def why(self) -> str:
        """The plan's reason."""
        return self.decision.reason if self.decision is not None else "it is not planned"

    @property
    def requeued(self) -> bool:
        """Whether something of an earlier attempt may still lie on the job."""
        return self.job.restarts != self.entry.attempt

    @property
    def stale(self) -> bool:
        """Whether the job still carries the size that was written for an earlier attempt."""
        return self.requeued and carries_ours(self.job, self.entry)

    @property
    def present(self) -> Shape:
        """The shape in which Slurm would start it now."""
        submitted = self.entry.submitted
        return present_shape(self.job, submitted.kind if submitted is not None else ShapeKind.FIXED)

    @property
    def factor(self) -> int:
        """The SiteFactor on the job. sprio shows none for jobs that are not eligible."""
        if not self.job.eligible and self.entry.factor is not None:
            return self.entry.factor
        return self.job.site_factor

    @property
    def place(self) -> Place:
        """The job as ordering sees it."""
        return Place(
            self.job.job_id,
            self.job.base_id,
            native=self.job.priority - self.factor,
            present=self.job.priority,
            group=f"{self.job.partition}|{self.job.qos}",
        )

    @property
    def at_home(self) -> bool:
        """Whether the job's size is the one that it shall wait in.

        That is the submitted one, or the one that its owner pinned.
        """
        if not carries_ours(self.job, self.entry):
            return True
        pinned_to = self.entry.veto_gpus if self.entry.veto else None
        return pinned_to is not None and pinned_to == self.job.gpus


def cases_of(
    plan: Plan,
    snapshot: Snapshot,
    ledger: Mapping[str, LedgerEntry],
    permits: Mapping[str, Permit],
    directives: Mapping[str, Directive],
    rules: ActingRules,
    now: float,
) -> list[Case]:
    """A case for every pending job that has a directive, or on which something is ours.

    Jobs at rest under a lease are left out: thousands of them wait in a long queue, they stand in
    nobody's way, and nothing is due about them.
    """
    return [
        _case(
            job,
            ledger.get(job.job_id),
            directives.get(job.job_id),
            permits.get(job.job_id, _NOTHING),
            plan.decisions.get(job.job_id),
            rules,
            now,
        )
        for job in snapshot.pending()
        if (job.job_id in ledger or job.job_id in directives)
        and not _at_rest(
            job,
            ledger.get(job.job_id),
            permits.get(job.job_id, _NOTHING),
            plan.decisions.get(job.job_id),
            rules,
            now,
        )
    ]


def _at_rest(
    job: Job,
    entry: LedgerEntry | None,
    permit: Permit,
    decision: Decision | None,
    rules: ActingRules,
    now: float,
) -> bool:
    """Whether the job waits as wanted, under our lease, with nothing of ours in its size."""
    if (
        entry is None
        or entry.submitted is None
        or decision is None
        or decision.verdict is not Verdict.WAIT
        or not permit.lease
        or job.eligible_s is None
        or job.eligible_s != entry.lease_until_s
    ):
        return False
    return (
        job.restarts == entry.attempt
        and entry.written is None
        and entry.written_limit_s is None
        and not entry.pinned
        and job.gpus == entry.submitted.gpus
        and job.eligible_s - now >= rules.safe_s
        and not renewal_due(job.eligible_s, rules, now)
    )


def _case(
    job: Job,
    known: LedgerEntry | None,
    directive: Directive | None,
    permit: Permit,
    decision: Decision | None,
    rules: ActingRules,
    now: float,
) -> Case:
    entry = notice_others(job, first_sight(job, directive, known))
    hold = hold_of(job, entry, directive, rules, now)
    if hold is Hold.NONE and entry.lease_until_s is not None:
        entry = replace(entry, lease_until_s=None, lease_before_s=None)
    entry = _settled(job, entry)
    return Case(job, entry, directive, permit, decision, hold, frame_of(job, directive, entry))


def _settled(job: Job, entry: LedgerEntry) -> LedgerEntry:
    """The entry once writes that gave the job back have been seen to have arrived."""
    submitted = entry.submitted
    if submitted is not None and same_size(present_shape(job, submitted.kind), submitted):
        if entry.written is not None and entry.given_back:
            entry = replace(
                entry,
                written=None,
                written_before=None,
                tries=0,
                given_back=False,
                reason_before="",
            )
        if entry.written_limit_s is not None and same_limit(
            job.time_limit_s, entry.submitted_limit_s
        ):
            entry = replace(entry, written_limit_s=None, written_limit_before_s=None)
    if job.restarts != entry.attempt and not carries_ours(job, entry):
        clean = replace(entry, failed=None, tries=0, unstarted=(), reason_before="", barred="")
        # The factor of the earlier attempt is cleared first, see `ranking`.
        entry = clean if entry.factor else replace(clean, attempt=job.restarts)
    return entry

"""From a plan and an observation to the next writes: the state machine of each job, derived anew.

Nothing is stored about how far a job has come: each call looks at what Slurm shows, at what is
ours (the ledger) and at what the plan wants, and gives one wave of writes. The caller stores
``entries``, applies ``actions`` in their order, reads back, and calls again, until there are none.
So a wave is never built on hope: the shape is written when the lease has been *read* back, the
lease is lifted when the shape has been *read* back, and a kill between any two steps changes
nothing.

================  ==========================================================================
verdict           what is brought about
================  ==========================================================================
START             planned shape, limit and nodes, then the lease is lifted
WAIT              leased, in the submitted shape
RESERVE           no lease, present shape, so that Slurm reserves for it
ORDER             no lease, submitted shape
LEAVE, no plan    what is ours is given back; of a job without GPUs the requeue delay is lifted
================  ==========================================================================

Size fields are written only to a pending job whose begin time, as read back, lies at least two
cycles ahead. Output is bounded per call; what is left out comes in the next one, since nothing is
remembered about it. No I/O and no clock here.

The choice a reader would question: a job that waits lies in its *submitted* shape. A shape written
for a start that did not come about is taken back, at the price of two writes, so that a lease that
expires after the daemon's death starts the job as its owner asked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_ext.control.case import Case, cases_of
from slurm_ext.control.growth import GrowthGuard
from slurm_ext.control.lease import Hold, begin_s, lease_end_s, renewal_due
from slurm_ext.control.limits import Size, Usage, let_go_of, present_size, size_of, usage_of
from slurm_ext.control.offers import Offers
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.ranking import Factor, factors_for
from slurm_ext.control.resume import ResumeGuard, revoking
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.shapes import Fields
from slurm_ext.control.target import Planner, Target, has_size, submitted_target
from slurm_ext.control.unstarted import struck_off
from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot

# So many writes of one shape that Slurm did not show afterwards, then it is not tried again.
MAX_TRIES = 3

# Urgency, most urgent first: what lets a job start, what prepares a start, a lease that keeps the
# plan intact, what gives back, renewals by the time left, places by rank.
_LIFT = 0.0
_SHAPE = 1.0
_LEASE = 2.0
_RESTORE = 3.0
_RENEWAL = 4.0
_FACTOR = 5.0
_WAVES = tuple(ActionKind)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that the plan wanted and that was not done, and why."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One wave. ``entries`` have to be stored before ``actions`` are applied in their order.

    ``left_out`` counts writes that did not fit into this wave.
    """

    actions: tuple[Action, ...]
    entries: Mapping[str, LedgerEntry] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """One write, its urgency, and what it changes in the ledger."""

    action: Action
    urgency: float
    case: Case
    changes: Mapping[str, Any]

    @property
    def sort_key(self) -> tuple[float, int, str]:
        return (self.urgency, self.case.rank, self.action.job_id)


class _Wave:
    """Collects the steps of one call."""

    def __init__(self, rules: ActingRules, now: float, resumes: ResumeGuard | None) -> None:
        self.rules = rules
        self.now = now
        self.resumes = resumes
        self.steps: list[_Step] = []
        self.refusals: dict[tuple[str, str], Refusal] = {}

    def add(
        self,
        case: Case,
        kind: ActionKind,
        fields: Fields,
        reason: str,
        urgency: float,
        **changes: Any,
    ) -> None:
        """Note one write."""
        action = Action(kind, case.job_id, fields, reason)
        self.steps.append(_Step(action, urgency, case, changes))

    def refuse(self, case: Case, reason: str) -> None:
        """Note that something wanted is not done."""
        self.refusals[case.job_id, reason] = Refusal(case.job_id, reason)

    def result(self, entries: Mapping[str, LedgerEntry], max_writes: int) -> Reconciled:
        """The most urgent steps that fit, in the order of waves."""
        kept = sorted(self.steps, key=lambda s: s.sort_key)[:max_writes]
        kept.sort(key=lambda s: (_WAVES.index(s.action.kind), s.sort_key))
        changed = dict(entries)
        for step in kept:
            before = changed.get(step.action.job_id, step.case.entry)
            changed[step.action.job_id] = replace(before, **step.changes)
        return Reconciled(
            tuple(step.action for step in kept),
            changed,
            tuple(self.refusals.values()),
            len(self.steps) - len(kept),
        )

    # -- single writes ---------------------------------------------------------------------------

    def factor(self, found: Factor) -> None:
        """Write a SiteFactor. With a start it comes in the same wave, before the lift."""
        case = found.case
        starts = case.verdict is Verdict.START
        urgency = _SHAPE if starts else _FACTOR
        fields = (("SiteFactor", str(found.value)),)
        self.add(case, ActionKind.FACTOR, fields, found.reason, urgency, factor=found.value)

    def left_s(self, case: Case) -> float:
        """How long the job cannot start, as read back."""
        begin = begin_s(case.job)
        return 0.0 if begin is None else max(0.0, begin - self.now)

    def safe(self, case: Case) -> bool:
        """Whether size fields may be written now."""
        return self.left_s(case) >= self.rules.safe_s

    def lease(self, case: Case, reason: str, urgency: float) -> None:
        """Move the job's earliest start into the future."""
        until = lease_end_s(case.job, self.rules, self.now)
        ours = case.hold is Hold.OURS
        self.add(
            case,
            ActionKind.LEASE,
            (("StartTime", f"uts{int(until)}"),),
            reason,
            urgency,
            lease_until_s=until,
            lease_before_s=begin_s(case.job) if ours else None,
        )

    def lift(self, case: Case, reason: str, **changes: Any) -> None:
        """Let the job start. The ledger forgets the lease when it is seen to be gone."""
        if not case.hold.liftable:
            return
        if why := revoking(case.job, self.now):
            self.refuse(case, why)
            return
        if self.resumes is not None and (
            why := self.resumes.refusal(case.job, case.entry, case.hold, case.permit)
        ):
            self.refuse(case, why)
            soon = case.hold is Hold.OURS or not self.safe(case)
            if case.permit.lease and soon:
                self.keep_back(case, why)
            return
        self.add(case, ActionKind.LIFT, (("StartTime", "now"),), reason, _LIFT, **changes)

    def bring(self, case: Case, target: Target | None, urgency: float) -> bool:
        """Bring the job one step nearer to its size; false when it has it, as read back."""
        if target is None or has_size(case, target):
            return False
        if not self.safe(case):
            if case.hold is Hold.OTHERS:
                self.refuse(case, "its begin time is not ours and too near to change its size")
            else:
                self.lease(case, f"leased for a change of size ({target.reason})", urgency)
            return True
        self._write(case, target, urgency)
        return True

    def _write(self, case: Case, target: Target, urgency: float) -> None:
        entry = case.entry
        again = (
            entry.written == target.shape
            and entry.given_back == target.submitted
            and not case.requeued
        )
        tries = entry.tries + 1 if again else 1
        # What lies on the job now is ours to recognise until the new values are seen.
        changes: dict[str, Any] = {
            **(_new_attempt(case) if case.requeued else {}),
            "written": target.shape,
            "written_before": entry.written_before if again else entry.written,
            "attempt": case.job.restarts,
            "tries": tries,
            "given_back": target.submitted,
        }
        if not again:
            changes["reason_before"] = case.job.reason
        if not target.submitted and tries >= MAX_TRIES:
            changes["failed"] = target.shape
        if target.limit_s is not None:
            changes["written_limit_s"] = target.limit_s
            if target.limit_s != entry.written_limit_s:
                changes["written_limit_before_s"] = entry.written_limit_s
        if target.nodes is not None:
            changes["pinned"] = True  # until it is read back that no list of ours is left
        kind = ActionKind.RESTORE if target.submitted else ActionKind.SHAPE
        self.add(case, kind, target.fields, target.reason, urgency, **changes)

    # -- verdicts that need no plan --------------------------------------------------------------

    def keep_back(self, case: Case, reason: str) -> None:
        """Lease the job, or renew its lease, where that is due."""
        left_s = self.left_s(case)
        if case.hold is Hold.OTHERS:
            return
        if case.hold is Hold.NONE or left_s < self.rules.safe_s:
            # It may start any moment.
            self.lease(case, reason, _LEASE)
        elif renewal_due(self.now + left_s, self.rules, self.now):
            self.lease(case, f"renewed: {reason}", _RENEWAL + left_s / (left_s + 1.0))

    def wait(self, case: Case) -> None:
        """Keep the job from starting, in its submitted shape."""
        if not case.permit.lease:
            why = case.permit.reasons[0] if case.permit.reasons else "it may not be leased"
            self.give_back(case, why, let_go=True)
            return
        if not case.at_home and self.safe(case):
            target = submitted_target(case, "it waits in its submitted shape")
            if self.bring(case, target, _RESTORE):
                return
        decision = case.decision
        self.keep_back(case, (decision.waits_for if decision else "") or case.why)

    def reserve(self, case: Case) -> None:
        """Leave the job to Slurm in its present shape."""
        if case.stale:
            self.give_back(case, "requeued, an attempt inherits no plan", let_go=True)
        else:
            self.lift(case, f"left to Slurm, which reserves for it: {case.why}")

    def give_back(self, case: Case, why: str, *, let_go: bool) -> None:
        """Restore what is ours in the job's size; then let it go."""
        if self.bring(case, submitted_target(case, f"given back: {why}"), _RESTORE):
            return
        if let_go:
            self.lift(case, f"let go: {why}")


class _Starts:
    """START, which needs the planned size and the limits that Slurm checks no more."""

    def __init__(self, wave: _Wave, planner: Planner, usage: Usage, let_go: frozenset[str]):
        self._wave = wave
        self._planner = planner
        self._usage = usage
        self._let_go = let_go

    def start(self, case: Case) -> None:
        """The next step towards the job's start."""
        target = self._planner.target(case)
        if over := self._over_limit(case, target):
            self._wave.refuse(case, over)
            self._wave.keep_back(case, over)
            return
        if not self._wave.bring(case, target, _SHAPE):
            # A size of an earlier attempt that is wanted again is this attempt's from now on.
            changes = _new_attempt(case) if case.requeued else {}
            self._wave.lift(case, f"it may start: {case.why}", **changes)

    def _over_limit(self, case: Case, target: Target | None) -> str:
        """The limit that the job would break now, if Slurm does not check it any more."""
        if case.job_id in self._let_go:
            return ""
        size = _size(case, target)
        changed = case.entry.written is not None or (target is not None and not target.submitted)
        if changed and (over := self._usage.why_over(case.job, size)):
            return over
        self._usage.add(case.job, size)
        return ""


def _size(case: Case, target: Target | None) -> Size:
    if target is None or case.frame is None:
        return present_size(case.job)
    limit_s = target.limit_s if target.limit_s is not None else case.job.time_limit_s
    return size_of(case.job, case.frame, target.shape, limit_s)


def _new_attempt(case: Case) -> dict[str, Any]:
    """What the ledger says once nothing of an earlier attempt counts any more."""
    return {
        "attempt": case.job.restarts,
        "failed": None,
        "tries": 0,
        "unstarted": (),
        "reason_before": case.job.reason,
        "barred": "",
    }


def _not_kept(case: Case) -> bool:
    """Whether Slurm's delay after a requeue is lifted although no plan says when to start: a job
    without GPUs competes for none of what is planned."""
    return case.hold is Hold.REQUEUE and case.permit.order and not case.job.gpus


def _struck_off(case: Case) -> Case:
    """The case, with the size struck off in which the policy has waited too long for its start."""
    if case.decision is None or not case.decision.left_to_slurm:
        return case
    return replace(case, entry=struck_off(case.job, case.entry))


def reconcile(
    plan: Plan,
    snapshot: Snapshot,
    ledger: Mapping[str, LedgerEntry],
    permits: Mapping[str, Permit],
    directives: Mapping[str, Directive],
    rules: ActingRules,
    now: float,
    *,
    at_submitted: Mapping[str, Estimate] | None = None,
    max_writes: int | None = None,
    stepping: Collection[str] = (),
    bounded: bool = True,
) -> Reconciled:
    """The next wave of writes that brings the cluster nearer to the plan.

    ``at_submitted`` estimates the remaining seconds of a job in its submitted shape; where it is
    absent, a time limit is never shortened. ``max_writes`` is what is left of the cycle's bound.
    ``stepping`` are running jobs that have ended a step in their present attempt. Without
    ``bounded`` requeued jobs are let go however many they are (a release).
    Call again with a fresh snapshot and the ledger updated by ``entries`` until ``actions`` is
    empty.
    """
    cases = [
        _struck_off(case)
        for case in cases_of(plan, snapshot, ledger, permits, directives, rules, now)
    ]
    entries = {case.job_id: case.entry for case in cases}
    index = PoolIndex(snapshot, entries)
    resumes = ResumeGuard(snapshot, rules.resume, now, stepping) if bounded else None
    wave = _Wave(rules, now, resumes)
    for found in factors_for(snapshot, cases, rules, now, wave.refuse):
        wave.factor(found)
    planned = {c.job_id for c in cases if c.verdict is not Verdict.LEAVE}
    growth = GrowthGuard(snapshot, planned, index)
    let_go = let_go_of(snapshot, entries)
    usage = usage_of(snapshot, let_go)
    planner = Planner(index, Offers(index, growth, usage), at_submitted or {}, wave.refuse)
    starts = _Starts(wave, planner, usage, let_go)
    for case in sorted(cases, key=lambda c: (c.rank, c.job_id)):
        match case.verdict:
            case Verdict.START:
                starts.start(case)
            case Verdict.WAIT:
                wave.wait(case)
            case Verdict.RESERVE:
                wave.reserve(case)
            case Verdict.ORDER:
                left = case.decision is not None and case.decision.left_to_slurm
                why = case.why if left else "only its place in the queue is ours"
                wave.give_back(case, why, let_go=True)
            case Verdict.LEAVE:
                why = case.permit.reasons[0] if case.permit.reasons else case.why
                wave.give_back(case, why, let_go=case.hold is Hold.OURS or _not_kept(case))
    noticed = {c.job_id: c.entry for c in cases if c.entry != ledger.get(c.job_id)}
    bound = rules.max_writes_per_cycle if max_writes is None else max_writes
    return wave.result(noticed, bound)

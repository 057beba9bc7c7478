"""What may be touched on a pending job, and the reason for every "no".

The classification says what *may* be done; whether anything is done is the plan's business. A
person's word always wins: a hold, a priority written by an operator, a begin time, a node list, a
pin. A job that is refused everything is left alone, counted, and told why.

The choice a reader would question: ``lease`` means "may be kept waiting under a lease". A job past
the waiting limit loses it, and keeps ``resize``: the few seconds of lease that a resize takes do
not keep it waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurm_ext.control.barred import why_barred
from slurm_ext.control.features import parse_features
from slurm_ext.control.lease import Hold, begin_s, hold_of
from slurm_ext.control.rules import LEASE, ORDER, PIN, RESIZE, ActingRules
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.pausing import last_pause
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.spans import moment

if TYPE_CHECKING:
    from slurm_ext.slurm.facts import SlurmConfig

# Slurm sets a priority of 0 with these reasons by itself (an exclusive job after a node failure).
_HELD_BY_SLURM = frozenset({"BadConstraints", "JobLaunchFailure"})
NO_GPUS = "it asks for no GPUs: there is nothing to plan, and Slurm orders and starts it"
# From the end of an attempt until `slurm-ext pause` has written the later start: it waits until
# the job is in the queue again.
_PAUSED_LATE_S = 120.0


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """What Slurm's configuration allows us to do at all."""

    multifactor: bool = True
    site_factor_plugin: str = ""
    enforces_limits: bool = False
    accrues_always: bool = False

    def refusal(self) -> str:
        """Why nothing may be touched in this cluster; empty when it may."""
        if not self.multifactor:
            return (
                "PriorityType is not priority/multifactor, so SiteFactor has no meaning: set"
                " PriorityType=priority/multifactor"
            )
        if self.site_factor_plugin:
            return (
                f"PrioritySiteFactorPlugin={self.site_factor_plugin} writes the same field as we"
                " do: unset it or do not let slurm-ext act"
            )
        return ""

    def lease_refusal(self) -> str:
        """Why no job may be leased here; empty when it may."""
        if self.enforces_limits and not self.accrues_always:
            return (
                "AccountingStorageEnforce has limits and PriorityFlags lacks ACCRUE_ALWAYS: a lease"
                " would zero the job's age"
            )
        return ""


def facts_from(config: SlurmConfig) -> SlurmFacts:
    """The facts that ``scontrol show config`` gives."""
    return SlurmFacts(
        multifactor=config.multifactor,
        site_factor_plugin=config.site_factor_plugin,
        enforces_limits=config.enforces_limits,
        accrues_always=config.accrues_always,
    )


def classify(
    job: Job,
    directive: Directive | None,
    entry: LedgerEntry | None,
    facts: SlurmFacts,
    rules: ActingRules,
    now: float,
    attempts: Attempts | None = None,
) -> Permit:
    """What may be touched on the job now."""
    hard = _untouchable(job, directive, entry, facts, rules, now, attempts)
    if hard or directive is None:
        return Permit(order=False, reasons=(hard,))
    reasons: list[str] = []
    order = rules.may(job.partition, ORDER)
    if not order:
        reasons.append(f"partition {job.partition} is observed only: its order is not acted on")
    resize = _why_not_resized(job, directive, entry, facts, rules)
    if resize and job.bar is not None:
        return Permit(order=False, reasons=(why_barred(job),))
    pin = resize or _why_not_pinned(job, rules)
    lease = resize
    if not resize:
        waited = now - (entry.first_submit_s if entry is not None else job.submit_s)
        if waited > rules.waiting_limit_s:
            lease = (
                f"waited {waited / 3600:.1f} h, longer than the waiting limit of"
                f" {rules.waiting_limit_s / 3600:.1f} h: not kept back any more"
            )
    for reason in (resize, lease, pin):
        if reason and reason not in reasons:
            reasons.append(reason)
    return Permit(
        order=order, resize=not resize, lease=not lease, pin=not pin, reasons=tuple(reasons)
    )


def _untouchable(
    job: Job,
    directive: Directive | None,
    entry: LedgerEntry | None,
    facts: SlurmFacts,
    rules: ActingRules,
    now: float,
    attempts: Attempts | None,
) -> str:
    """Why nothing at all may be touched; empty when something may."""
    if directive is None:
        return "not ours: it has no --ft-* directive"
    if not job.pending:
        return f"it is {job.state.value.lower()}, only pending jobs are touched"
    if refusal := facts.refusal():
        return refusal
    if job.het_job_id is not None:
        return "it is part of a heterogeneous job"
    if len(job.partitions) != 1:
        return f"it is queued in {len(job.partitions)} partitions: neither permuted nor resized"
    if "," in job.qos:
        return "it names several QOS: neither permuted nor resized"
    if job.reason in _HELD_BY_SLURM and job.priority == 0:
        return (
            f"Slurm holds it with reason {job.reason} since its requeue, nobody else does: update"
            " or resubmit it"
        )
    if job.held_by_user:
        return "its owner holds it"
    if job.held_by_admin:
        return "an administrator holds it"
    if job.priority == 0:
        return "its priority is 0, so somebody holds it"
    if job.bar is not None and not job.bar.by_size:
        return why_barred(job)
    if job.priority_set:
        return f"an operator set its priority to {job.priority}"
    if job.dependency:
        return f"it depends on {job.dependency}"
    if paused := _paused(job, attempts, now):
        return paused
    if hold_of(job, entry, directive, rules, now) is Hold.OTHERS:
        own = directive.begin_s is not None and directive.begin_s > now
        return (
            "its owner asked for a later --begin"
            if own
            else "its start was set to a later time, and not by the daemon"
        )
    return ""


def _paused(job: Job, attempts: Attempts | None, now: float) -> str:
    """That somebody paused the job and until when, also before its later start is written."""
    begin = begin_s(job)
    if attempts is None or begin is None or begin <= now:
        return ""
    left = last_pause(attempts.attempts)
    if left is None or left.attempt.number != job.restarts - 1:
        return ""
    until = left.until_s(None)
    if now >= until or begin > until + _PAUSED_LATE_S:
        return ""  # over, or put off once more by somebody
    return (
        f"{left.paused.who} paused it until {moment(left.until_s(begin), now)}; slurm-ext resume"
        f" {job.job_id} lets it start"
    )


def _why_not_resized(
    job: Job,
    directive: Directive,
    entry: LedgerEntry | None,
    facts: SlurmFacts,
    rules: ActingRules,
) -> str:
    if not job.gpus:
        return NO_GPUS
    if not rules.may(job.partition, RESIZE) or not rules.may(job.partition, LEASE):
        return f"resizing is switched off in partition {job.partition}"
    if refusal := facts.lease_refusal():
        return refusal
    if not job.batch:
        return "salloc and srun jobs are ordered, not resized"
    veto = entry is not None and entry.veto
    if not veto and not directive.gpus.resizable:
        return "its GPU count stays as submitted: no --ft-gpus allows another"
    if entry is not None and entry.resized_by_hand:
        return "its size was changed by hand (scontrol update) and is kept"
    if reason := _why_fixed(job, directive, entry):
        return reason
    if veto and entry is not None and not _veto_unmet(job, directive, entry):
        return "its owner pinned its GPU count (slurm-ext pin)"
    return ""


def _why_fixed(job: Job, directive: Directive, entry: LedgerEntry | None) -> str:
    """What about the job's own form forbids another size."""
    if directive.req is None or directive.shape is None:
        return "job_submit.lua did not see its submission, so its shape is not known well enough"
    if directive.shape is ShapeKind.FIXED or directive.req.why_fixed:
        return f"its shape is fixed ({directive.req.why_fixed or 'no form that can be resized'})"
    if job.exclusive:
        return "it asked for whole nodes (--exclusive)"
    if job.reservation:
        return f"it runs in reservation {job.reservation}: ordered only"
    if job.licenses:
        return f"it needs licences ({job.licenses}): ordered only"
    pinned = entry is not None and entry.pinned
    if job.req_nodes and not pinned:
        return "it names its nodes (--nodelist)"
    if parse_features(job.features).tied:
        return f"its feature expression {job.features!r} ties nodes to its size"
    return ""


def _veto_unmet(job: Job, directive: Directive, entry: LedgerEntry) -> bool:
    """Whether the count that the owner pinned still has to be written."""
    requested = directive.req.gpus if directive.req is not None else job.gpus
    kept = entry.veto_gpus if entry.veto_gpus is not None else requested
    return directive.gpus.resizable and kept != job.gpus


def _why_not_pinned(job: Job, rules: ActingRules) -> str:
    if not rules.may(job.partition, PIN):
        return f"pinning to nodes is switched off in partition {job.partition}"
    if job.array:
        return "Slurm takes no node list for a part of an array"
    return ""

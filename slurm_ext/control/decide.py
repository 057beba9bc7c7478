"""From an observation to a plan: permits, pools, candidates, then the policy.

Pure given its arguments; the clock reading, the ledger and the previous plan come in. Where
nothing may be acted on, the same function plans with rules that allow everything, so that an
administrator sees for a week what would be done.

When the policy fails the cycle still needs an answer: the previous plan is checked against the new
snapshot and kept where it still holds, else jobs are ordered by shortest remaining time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.control.barred import barred_by_limits, why_barred
from slurm_ext.control.config import Config
from slurm_ext.control.delays import with_begins, with_cooling
from slurm_ext.control.growth import GrowthGuard
from slurm_ext.control.lease import begin_s
from slurm_ext.control.limits import (
    Size,
    Usage,
    allowed_counts,
    let_go_of,
    present_size,
    size_of,
    usage_of,
)
from slurm_ext.control.observe import Observation
from slurm_ext.control.offers import Offers
from slurm_ext.control.permits import SlurmFacts, classify
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.resume import Cooldown, cooldown_of
from slurm_ext.control.rules import LEASE, ORDER, PIN, RESIZE, ActingRules
from slurm_ext.control.shapes import possible_counts, shape_for
from slurm_ext.control.submitted import (
    Frame,
    frame_of,
    offered_counts,
    present_shape,
    same_size,
)
from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.directive import Directive, GpuRequestKind
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Pool
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import JobFacts, Permit, Policy, View
from slurm_ext.domain.reasons import BARS
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.estimate.enumerate import consolidated
from slurm_ext.estimate.remaining import candidates, ends_at
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import TitanConfig, TitanPolicy

_log = logging.getLogger(__name__)
EVERYTHING = frozenset({ORDER, RESIZE, LEASE, PIN})


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan and what led to it.

    ``refused`` says per job why a GPU count was no candidate, ``ends`` when each running job is
    expected to end (epoch seconds).
    """

    plan: Plan
    view: View
    permits: Mapping[str, Permit]
    refused: Mapping[str, Mapping[int, str]]
    pools: Mapping[str, Pool]
    at_submitted: Mapping[str, Estimate]
    failure: str = ""
    ends: Mapping[str, Estimate] = field(default_factory=dict)

    def overlaid(self, other: Decided, job_ids: Sequence[str]) -> Decided:
        """This plan with what ``other`` says about the named jobs."""
        names = set(job_ids)
        plan = replace(
            self.plan,
            decisions={
                **{j: d for j, d in self.plan.decisions.items() if j not in names},
                **{j: d for j, d in other.plan.decisions.items() if j in names},
            },
            solves=self.plan.solves or other.plan.solves,
        )
        facts = {**self.view.facts, **{j: f for j, f in other.view.facts.items() if j in names}}
        return Decided(
            plan,
            replace(self.view, facts=facts),
            {**self.permits, **{j: p for j, p in other.permits.items() if j in names}},
            {**self.refused, **{j: r for j, r in other.refused.items() if j in names}},
            {**other.pools, **self.pools},
            self.at_submitted,
            self.failure or other.failure,
            self.ends,
        )


@dataclass(slots=True)
class _Facts:
    facts: dict[str, JobFacts] = field(default_factory=dict)
    permits: dict[str, Permit] = field(default_factory=dict)
    refused: dict[str, Mapping[int, str]] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    at_submitted: dict[str, Estimate] = field(default_factory=dict)
    cooling: dict[str, Cooldown] = field(default_factory=dict)


def policy_from(config: Config) -> Policy:
    """The decision rule that the configuration names."""
    if config.policy == "srtf":
        return SrtfPolicy(config.waiting_limit_s)
    return TitanPolicy(
        TitanConfig(
            margin=config.margin,
            waiting_limit_s=config.waiting_limit_s,
            time_limit_s=config.solver_time_limit_s,
            hold_out=config.hold_out,
        )
    )


def everything_allowed(rules: ActingRules, snapshot: Snapshot) -> ActingRules:
    """The rules under which an observer plans: every switch on in every partition."""
    return replace(rules, acts={p.name: EVERYTHING for p in snapshot.partitions})


def decide(
    seen: Observation,
    ledger: Mapping[str, LedgerEntry],
    rules: ActingRules,
    slurm: SlurmFacts,
    config: Config,
    policy: Policy,
    previous: Plan | None,
    carried_out: bool = True,
    also_planned: Collection[str] = (),
) -> Decided:
    """Plan for every pending job that is ours; ``carried_out`` is false for a plan only shown.

    ``also_planned`` are jobs without a directive here that the daemon plans nevertheless.
    """
    found = _Facts()
    for job in seen.snapshot.pending():
        directive = seen.directives.get(job.job_id)
        if directive is not None:
            entry = ledger.get(job.job_id)
            found.permits[job.job_id] = classify(
                job, directive, entry, slurm, rules, seen.now, seen.attempts.get(job.job_id)
            )
        elif job.job_id in seen.broken:
            reason = f"its directive is unusable: {seen.broken[job.job_id]}"
            found.permits[job.job_id] = Permit(order=False, reasons=(reason,))
            found.facts[job.job_id] = JobFacts((), found.permits[job.job_id], job.submit_s)
    planned = {job_id for job_id, p in found.permits.items() if p.order or p.resize}
    room = _Room.of(seen.snapshot, ledger, planned.union(also_planned))
    for job in seen.snapshot.pending():
        directive = seen.directives.get(job.job_id)
        if directive is not None:
            entry = ledger.get(job.job_id)
            found.facts[job.job_id] = _facts(job, directive, entry, seen, room, config, found)
            permit = found.permits[job.job_id]
            kept = permit.lease or (begin_s(job) or 0.0) > seen.now
            if entry is not None and kept and (permit.order or permit.resize):
                cooling = cooldown_of(entry, rules.resume, seen.now)
                if cooling is not None:
                    found.cooling[job.job_id] = cooling
    facts = found.facts
    ends = _ends(seen)
    view = View(
        snapshot=seen.snapshot,
        # What cools down takes no GPUs from those that may start.
        facts={j: replace(f, candidates=()) if j in found.cooling else f for j, f in facts.items()}
        if found.cooling
        else facts,
        pools={key: tuple(n.name for n in pool.nodes) for key, pool in found.pools.items()},
        free_at_s={job_id: end.value for job_id, end in ends.items()},
        previous=previous,
        carried_out=carried_out,
    )
    failure = ""
    try:
        plan = policy(view, seen.now)
    except SlurmExtError as exc:
        failure = str(exc)
        _log.error("policy %s failed, falling back: %s", policy.name, exc)
        plan = _fall_back(view, previous, config, seen.now)
    plan = with_begins(plan, seen.snapshot)
    if found.cooling:
        plan = with_cooling(plan, found.cooling, facts, seen.snapshot)
        view = replace(view, facts=facts)
    return Decided(
        plan,
        view,
        found.permits,
        found.refused,
        found.pools,
        found.at_submitted,
        failure,
        ends,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """What limits, reservations and other people's jobs leave, for one snapshot."""

    index: PoolIndex
    usage: Usage
    let_go: frozenset[str]
    offers: Offers

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        ledger: Mapping[str, LedgerEntry],
        planned: Collection[str],
    ) -> _Room:
        """Work it out once. ``planned`` are the jobs that are ours to plan."""
        index = PoolIndex(snapshot, ledger)
        let_go = let_go_of(snapshot, ledger)
        usage = usage_of(snapshot, let_go)
        return cls(
            index, usage, let_go, Offers(index, GrowthGuard(snapshot, planned, index), usage)
        )


def _facts(
    job: Job,
    directive: Directive,
    entry: LedgerEntry | None,
    seen: Observation,
    room: _Room,
    config: Config,
    found: _Facts,
) -> JobFacts:
    permit, pool = found.permits[job.job_id], room.index.pool_of(job)
    since = entry.first_submit_s if entry is not None else job.submit_s
    base = JobFacts((), permit, since, deadline_s=directive.deadline_s)
    if pool is None:
        if permit.order:
            # Ordered by its time limit alone: no GPUs, or no node that could take it.
            single = candidates(job, None, (job.gpus,), 1, "", seen.sources, seen.now)
            return replace(base, candidates=single.candidates)
        return base
    found.pools.setdefault(pool.key, pool)
    base = replace(base, pool=pool.key)
    if not permit.order:
        return base  # the policy leaves it alone; what it could be is nobody's question
    per_node = max(node.gpus for node in pool.nodes)
    gpu_type = pool.gpu_type or _only_type(pool)
    refused: dict[int, str] = {}
    counts: Sequence[int] = (job.gpus,)
    frame = frame_of(job, directive, entry) if permit.resize and entry is not None else None
    barred = ""
    mine = present_size(job)
    if job.job_id in room.let_go:
        room.usage.add(job, mine, -1)  # it does not stand in its own way
    if frame is not None and entry is not None:
        counts = _counts(job, directive, entry, frame, pool, per_node, room.usage, config, refused)
        barred, mended = _barred_as_submitted(job, entry, frame, seen, room.usage)
        if barred:
            refused[frame.gpus] = barred
            counts = tuple(count for count in counts if count != frame.gpus and mended)
    # What the submitted count would take sets the time limit of every other one.
    asked = (*counts, frame.gpus) if frame is not None and barred else counts
    offered = candidates(job, directive, asked, per_node, gpu_type, seen.sources, seen.now)
    refused.update({n: why for n, why in offered.refused.items() if n not in refused})
    chosen = offered.candidates
    submitted = entry.submitted if entry is not None else None
    as_asked = offered.at(submitted.gpus) if submitted is not None else None
    if as_asked is not None:
        found.at_submitted[job.job_id] = as_asked.remaining_s
    if barred:
        chosen = tuple(c for c in chosen if c.gpus in counts)
    elif permit.resize:
        # `candidates` always answers for the present count; another was asked for where a limit
        # or the owner's pin forbids it.
        chosen = _only(chosen, counts, refused)
    if frame is not None and entry is not None:
        at_submitted = found.at_submitted.get(job.job_id)
        chosen = _startable(
            job, entry, frame, chosen, at_submitted, room, refused, needed=not barred
        )
    if job.job_id in room.let_go:
        room.usage.add(job, mine)
    if refused:
        found.refused[job.job_id] = dict(sorted(refused.items()))
    if barred and not chosen:
        # Every other size is refused as well, for now at least: planned, it would keep GPUs idle.
        permit = Permit(order=False, reasons=(barred,))
        found.permits[job.job_id] = permit
        return replace(base, permit=permit)
    return replace(base, candidates=chosen)


def _counts(
    job: Job,
    directive: Directive,
    entry: LedgerEntry,
    frame: Frame,
    pool: Pool,
    per_node: int,
    usage: Usage,
    config: Config,
    refused: dict[int, str],
) -> Sequence[int]:
    """GPU counts that directive, shape, pool and limits allow, with the refusals noted."""
    most = sum(node.gpus for node in pool.nodes)
    for count in directive.gpus.counts:
        if count > most:
            refused[count] = f"the pool {pool.key} has {most} GPUs"
    if directive.gpus.kind is GpuRequestKind.AUTO:
        most = min(most, config.max_gpus_per_job)
    wanted = offered_counts(directive, entry, job, resizable=True, maximum=most)
    shaped = possible_counts(frame, wanted, per_node)
    refused.update(shaped.refused)
    touched = entry.written is not None
    same_attempt = entry.attempt == job.restarts
    allowed = allowed_counts(
        job,
        shaped.ok,
        usage,
        lambda count: _size_at(job, frame, count, per_node),
        submitted=frame.gpus,
        touched=touched,
    )
    refused.update(allowed.refused)
    unstarted = entry.unstarted if same_attempt else ()
    failed = dict.fromkeys(unstarted, "Slurm did not start it on so many in this attempt")
    if entry.failed is not None and same_attempt:
        failed[entry.failed.gpus] = "Slurm failed to take this size in this attempt"
    failed.pop(frame.gpus, None)
    refused.update({count: why for count, why in failed.items() if count in allowed.ok})
    return tuple(count for count in allowed.ok if count not in failed)


def _barred_as_submitted(
    job: Job, entry: LedgerEntry, frame: Frame, seen: Observation, usage: Usage
) -> tuple[str, bool]:
    """Why Slurm would never start the job as submitted, and whether another size may mend that.

    Slurm's own word comes first, as it is now or as it was before we changed the job. Limits that
    are known come second, since of a job under a lease Slurm says nothing. It is the owner's time
    limit that counts: one that is too long is not made shorter to get the job past a limit.
    """
    at_home = same_size(present_shape(job, frame.kind), frame.shape)
    before = replace(job, reason=entry.barred if entry.attempt == job.restarts else "")
    for told in (job, before) if at_home else (before,):
        if told.bar is not None:
            return why_barred(told), told.bar.by_size
    size = size_of(job, frame, frame.shape, entry.submitted_limit_s)
    broken = barred_by_limits(job, size, usage, enforced=seen.slurm.enforces_limits)
    if broken is None:
        return "", True
    return f"it is left to Slurm: {broken.why}", BARS[broken.reason].by_size


def _size_at(job: Job, frame: Frame, count: int, per_node: int) -> Size:
    """What the job would take on so many GPUs, in the fewest nodes; its time is not known yet."""
    shape = shape_for(frame, Configuration(count, consolidated(count, per_node)))
    return size_of(job, frame, shape if shape is not None else frame.shape)


def _startable(
    job: Job,
    entry: LedgerEntry,
    frame: Frame,
    chosen: tuple[Candidate, ...],
    at_submitted: Estimate | None,
    room: _Room,
    refused: dict[int, str],
    *,
    needed: bool,
) -> tuple[Candidate, ...]:
    """The candidates that could start now with the time limit that they would get.

    A start in any other is refused when it is carried out, and its GPUs would stay idle. Where one
    is ``needed`` although all are refused, it is the submitted one, or what there is.
    """
    kept = []
    touched = entry.written is not None
    for candidate in chosen:
        shape = shape_for(frame, candidate.configuration)
        if shape is None:
            kept.append(candidate)  # falls back to what was submitted
            continue
        limit = room.offers.limit(job, entry, frame, shape, candidate.remaining_s, at_submitted)
        why = limit.refusal
        if not why and (touched or shape.gpus != frame.gpus):
            limit_s = limit.limit_s if limit.limit_s is not None else entry.submitted_limit_s
            why = room.usage.why_over(job, size_of(job, frame, shape, limit_s))
        if why:
            refused[candidate.gpus] = why
        else:
            kept.append(candidate)
    if not needed:
        return tuple(kept)
    # A job needs a candidate; the submitted one is never refused by more than a limit.
    return tuple(kept) or tuple(c for c in chosen if c.gpus == frame.gpus) or chosen


def _only(
    chosen: tuple[Candidate, ...], counts: Sequence[int], refused: dict[int, str]
) -> tuple[Candidate, ...]:
    """The candidates among ``counts``; all of them where none is, for a job needs one."""
    only = tuple(c for c in chosen if c.gpus in counts)
    if not only:
        return chosen
    for candidate in chosen:
        if candidate.gpus not in counts:
            refused.setdefault(candidate.gpus, "its owner pinned another count (slurm-ext pin)")
    return only


def _only_type(pool: Pool) -> str:
    """The GPU type of a job that named none, where all nodes of its pool agree."""
    types = {node.gpu_type for node in pool.nodes}
    return types.pop() if len(types) == 1 else ""


def _ends(seen: Observation) -> dict[str, Estimate]:
    """Expected end of each running job (epoch seconds)."""
    nodes = {node.name: node for node in seen.snapshot.nodes}
    ends: dict[str, Estimate] = {}
    for job in seen.snapshot.running():
        where = [nodes[name] for name in job.node_names if name in nodes]
        if not job.gpus or not where:
            continue
        ends[job.job_id] = ends_at(
            job,
            seen.directives.get(job.job_id),
            max(1, max(node.gpus for node in where)),
            where[0].gpu_type,
            seen.sources,
            seen.now,
        )
    return ends


def _fall_back(view: View, previous: Plan | None, config: Config, now: float) -> Plan:
    """The previous plan where it still holds, else the order of shortest remaining time."""
    plan = SrtfPolicy(config.waiting_limit_s)(view, now)
    kept = still_valid(view, previous)
    if not kept:
        return plan
    rest = sorted(
        (d for d in plan.decisions.values() if d.job_id not in kept),
        key=lambda d: (d.rank, d.job_id),
    )
    decisions = dict(kept)
    for decision in rest:
        # The GPUs belong to what the previous plan starts: nobody else starts beside it.
        waits = decision.verdict is Verdict.START
        decisions[decision.job_id] = replace(
            decision,
            rank=len(decisions),
            verdict=Verdict.ORDER if waits else decision.verdict,
            nodes=() if waits else decision.nodes,
        )
    return replace(plan, policy=f"{plan.policy} (previous starts kept)", decisions=decisions)


def still_valid(view: View, previous: Plan | None) -> dict[str, Decision]:
    """Starts of the previous plan that the new snapshot still allows."""
    if previous is None:
        return {}
    nodes = {node.name: node for node in view.snapshot.nodes}
    free = Counter({name: node.gpus_free for name, node in nodes.items()})
    pending = {job.job_id for job in view.snapshot.pending()}
    kept: dict[str, Decision] = {}
    for decision in sorted(previous.decisions.values(), key=lambda d: (d.rank, d.job_id)):
        facts = view.facts.get(decision.job_id)
        if (
            decision.verdict is not Verdict.START
            or decision.configuration is None
            or facts is None
            or decision.job_id not in pending
            or all(c.configuration != decision.configuration for c in facts.candidates)
        ):
            continue
        where = decision.nodes or view.pools.get(decision.pool, ())
        need = sorted(decision.configuration.placement, reverse=True)
        if decision.nodes:
            taken = dict(zip(where, need, strict=False))
            fits = len(where) == len(need) and all(free[n] >= g for n, g in taken.items())
        else:
            fits = sum(free[n] for n in where) >= sum(need)
            taken = _take(free, where, sum(need)) if fits else {}
        if not fits:
            continue
        for name, gpus in taken.items():
            free[name] -= gpus
        kept[decision.job_id] = replace(decision, rank=len(kept))
    return kept


def _take(free: Mapping[str, int], where: Sequence[str], gpus: int) -> dict[str, int]:
    taken: dict[str, int] = {}
    for name in where:
        part = min(gpus, free[name])
        if part > 0:
            taken[name] = part
            gpus -= part
    return taken

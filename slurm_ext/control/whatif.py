"""What would be planned for a job that is not submitted: one more job in a true observation.

The very functions of a cycle decide, so that the forecast cannot differ from what the daemon would
do with the same knowledge. What an ordinary user lacks of that knowledge is taken from the plan
documents: what is ours on each job (the ledger is the daemon's alone), whole rows of jobs that
Slurm hides from this user, and candidates of jobs whose directive cannot be read. Nothing is
written and no clock is read here.

The choice a reader would question: where the daemon may not act in the job's partition, the
forecast is what it would plan if it might, as its own documents are; the caller has to say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from slurm_ext.control.config import Config
from slurm_ext.control.decide import EVERYTHING, Decided, decide, policy_from
from slurm_ext.control.documents import build_documents
from slurm_ext.control.lease import begin_s
from slurm_ext.control.observe import Observation
from slurm_ext.control.permits import SlurmFacts
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.rules import ActingRules, rules_from
from slurm_ext.control.submitted import first_sight, notice_others
from slurm_ext.domain.directive import Directive, RequestedShape
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Node, Partition
from slurm_ext.domain.nodelist import expand
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import JobFacts, Policy
from slurm_ext.domain.script import BatchScript
from slurm_ext.domain.snapshot import Snapshot

NEW = "new"
_MEMORY = re.compile(r"([0-9]+)([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024.0}
# Slurm's clock and ours may differ by this much where a lease is recognised by its length.
_SLACK_S = 2.0


@dataclass(frozen=True, slots=True)
class Submitter:
    """Who would submit, and what Slurm would fill in for them; empty = not known."""

    user: str
    uid: int
    account: str = ""
    qos: str = ""


@dataclass(frozen=True, slots=True)
class Foretold:
    """The plan document that the job would get, and what it stands on.

    ``acts`` tells whether the daemon would carry it out. ``others`` counts the waiting jobs of the
    partition that may start and are not planned: Slurm's priorities decide between them and this
    job.
    """

    document: PlanDocument
    acts: bool
    others: int


def job_of(
    script: BatchScript, shape: RequestedShape, who: Submitter, snapshot: Snapshot, now: float
) -> Job:
    """The job as Slurm would show it right after its submission."""
    options = script.options
    partitions = script.partitions or tuple(p.name for p in snapshot.partitions if p.default)[:1]
    limit_s = script.time_limit_s
    if "time" not in options:
        # Slurm takes the partition's DefaultTime, and without one its MaxTime.
        limit_s = min(
            (
                p.max_time_s
                for p in snapshot.partitions
                if p.name in partitions and p.max_time_s is not None
            ),
            default=None,
        )
    cpus = max(1, shape.ntasks) * max(1, shape.cpus_per_task)
    if per_gpu := _count(options.get("cpus-per-gpu", "")):
        cpus = per_gpu * shape.gpus
    # Queued last, so it has waited least: no waiting job is taken to be behind it.
    waiting = [j.priority for j in snapshot.pending() if j.eligible and j.priority > 1]
    return Job(
        job_id=NEW,
        base_id=0,  # the next free number, see `foretell`
        user=who.user,
        uid=who.uid,
        account=options.get("account", who.account),
        qos=options.get("qos", who.qos),
        partitions=partitions,
        state=JobState.PENDING,
        submit_s=now,
        eligible_s=now,
        gpus=shape.gpus,
        nodes=shape.nodes,
        max_nodes=_most_nodes(options, shape),
        ntasks=shape.ntasks,
        cpus=cpus,
        memory_mib=_memory_mib(options, shape, cpus),
        time_limit_s=limit_s,
        priority=min(waiting, default=2),
        gpu_type=shape.gpu_type or script.gpu_type,
        req_nodes=expand(options.get("nodelist", "")),
        exc_nodes=expand(options.get("exclude", "")),
        features=options.get("constraint", ""),
        licenses=options.get("licenses", ""),
        dependency=options.get("dependency", ""),
        reservation=options.get("reservation", ""),
        exclusive=options.get("exclusive") == "",
        array="array" in options,
        held_by_user="hold" in options,
    )


def _most_nodes(options: Mapping[str, str], shape: RequestedShape) -> int | None:
    """The most nodes that Slurm may give it: with ``-N 2`` two, without ``-N`` any number."""
    if "nodes" not in options:
        return None
    return max(shape.nodes, shape.nodes_max if "-" in options["nodes"] else 0)


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _memory_mib(options: Mapping[str, str], shape: RequestedShape, cpus: int) -> int | None:
    for name, times in (
        ("mem", shape.nodes),
        ("mem-per-gpu", shape.gpus),
        ("mem-per-cpu", cpus),
    ):
        match = _MEMORY.fullmatch(options.get(name, ""))
        if match and int(match[1]):
            return int(int(match[1]) * _MIB[match[2].upper()] * times)
    return None


def foretell(
    seen: Observation,
    slurm: SlurmFacts,
    job: Job,
    directive: Directive,
    documents: Mapping[int, PlanDocument],
    whole: ClusterDocument | None,
    config: Config,
) -> Foretold:
    """Plan the cluster with one more job. ``whole`` is ``None`` where no daemon is at work."""
    hidden = list(_hidden(seen, documents))
    newest = max((j.base_id for j in (*seen.snapshot.jobs, *hidden)), default=0)
    job = replace(job, base_id=newest + 1)
    snapshot = replace(seen.snapshot, jobs=(*seen.snapshot.jobs, *hidden, job))
    seen = replace(seen, snapshot=snapshot, directives={**seen.directives, job.job_id: directive})
    acting = whole.acting if whole is not None and whole.mode is Mode.ACTING else {}
    rules = replace(
        rules_from(config),
        acts={p.name: frozenset(acting.get(p.name, ())) or EVERYTHING for p in snapshot.partitions},
    )
    # The number that the new job would get may be that of an ended job whose document still lies
    # there: nothing of it is the new job's.
    documents = {base_id: d for base_id, d in documents.items() if base_id != job.base_id}
    ledger = _ledger(seen, documents, rules)
    policy = policy_from(config)
    previous = _previous(seen, documents, whole)
    known = {d.job_id for d in documents.values() if d.permit.order or d.permit.resize}
    decided = decide(seen, ledger, rules, slurm, config, policy, previous, also_planned=known)
    decided = _completed(decided, seen, documents, policy)
    documents_now = build_documents(seen, decided, ledger, Mode.ACTING, rules)
    acts = bool(acting.get(job.partition))
    document = replace(
        documents_now[job.base_id],
        mode=_mode(acts, whole),
        foreign_ahead=0,
        ours=None,
    )
    others = sum(
        1
        for other in snapshot.pending()
        if other.job_id not in decided.view.facts
        and other.competes
        and not set(other.partitions).isdisjoint(job.partitions)
    )
    return Foretold(document, acts, others)


def _mode(acts: bool, whole: ClusterDocument | None) -> Mode:
    if acts:
        return Mode.ACTING
    released = whole is not None and whole.mode is Mode.RELEASED
    return Mode.RELEASED if released else Mode.OBSERVE


def _hidden(seen: Observation, documents: Mapping[int, PlanDocument]) -> Iterator[Job]:
    """Pending jobs that Slurm hides from this user (PrivateData=jobs), from their documents."""
    if "jobs" not in {w.strip() for w in seen.slurm.get("PrivateData").lower().split(",")}:
        return
    shown = {job.base_id for job in seen.snapshot.jobs}
    for base_id, document in documents.items():
        if base_id in shown or document.state != JobState.PENDING.value:
            continue
        yield Job(
            job_id=document.job_id,
            base_id=base_id,
            user=document.user,
            uid=document.uid,
            account=document.account,
            qos=document.qos,
            partitions=(document.partition,) if document.partition else (),
            state=JobState.PENDING,
            submit_s=document.waiting_since_s,
            gpus=document.present_gpus,
            cpus=max(1, document.present_gpus),
            priority=document.priority,
            reason=document.slurm_reason,
        )


def _ledger(
    seen: Observation, documents: Mapping[int, PlanDocument], rules: ActingRules
) -> dict[str, LedgerEntry]:
    """What is ours on each of our pending jobs, as far as the documents tell."""
    found: dict[str, LedgerEntry] = {}
    for job in seen.snapshot.pending():
        directive = seen.directives.get(job.job_id)
        if directive is None:
            continue
        document = documents.get(job.base_id)
        entry = document.ours if document is not None else None
        if entry is not None:
            entry = replace(entry, job_id=job.job_id)
        entry = notice_others(job, first_sight(job, directive, entry))
        begin = begin_s(job)
        if begin is not None and begin > seen.now and job.job_id != NEW:
            leased = entry.lease_until_s is not None
            if document is None:
                # Nothing says whose this start is: one that lies no further ahead than a lease,
                # on a job of ours whose owner asked for no --begin, is most probably ours.
                ahead = begin - seen.now
                leased = ahead <= rules.lease_s + _SLACK_S and directive.begin_s is None
            if leased:  # renewed since the document was written, perhaps
                entry = replace(entry, lease_until_s=begin)
        found[job.job_id] = entry
    return found


def _previous(
    seen: Observation, documents: Mapping[int, PlanDocument], whole: ClusterDocument | None
) -> Plan | None:
    """The daemon's last plan, which it changes only for a gain."""
    if whole is None:
        return None
    pending = {job.job_id for job in seen.snapshot.pending()}
    decisions = {d.job_id: d.decision for d in documents.values() if d.job_id in pending}
    return Plan(whole.policy, whole.made_s, decisions)


def _completed(
    decided: Decided, seen: Observation, documents: Mapping[int, PlanDocument], policy: Policy
) -> Decided:
    """Decided again with the jobs of which only the document is known; the same without such."""
    ours = {d.job_id: d.ours for d in documents.values() if d.ours is not None}
    index = PoolIndex(seen.snapshot, ours)
    facts = dict(decided.view.facts)
    pools = dict(decided.pools)
    for job in seen.snapshot.pending():
        document = documents.get(job.base_id)
        if job.job_id in facts or document is None or not document.candidates:
            continue
        pool = index.pool_of(job)
        if pool is not None:
            pools.setdefault(pool.key, pool)
            facts[job.job_id] = JobFacts(
                document.candidates, document.permit, document.waiting_since_s, pool=pool.key
            )
    if len(facts) == len(decided.view.facts):
        return decided
    view = replace(
        decided.view,
        facts=facts,
        pools={key: tuple(node.name for node in pool.nodes) for key, pool in pools.items()},
    )
    return replace(decided, plan=policy(view, seen.now), view=view, pools=pools)


def empty_cluster(
    script: BatchScript, shape: RequestedShape, per_node: int, gpu_type: str, most: int, now: float
) -> Snapshot:
    """Nodes enough for any count, for estimates where Slurm cannot be asked."""
    names = script.partitions or ("?",)
    nodes = tuple(
        Node(
            name=f"?{number}",
            gpus=per_node,
            gpu_type=shape.gpu_type or gpu_type,
            cpus=1 << 20,
            memory_mib=1 << 40,
            features=frozenset(
                re.findall(r"[A-Za-z0-9_.:+/-]+", script.options.get("constraint", ""))
            ),
            partitions=frozenset(names),
        )
        for number in range(max(shape.nodes, -(-max(most, shape.gpus) // per_node)))
    )
    partitions = tuple(
        Partition(name, tuple(node.name for node in nodes), default=True) for name in names
    )
    return Snapshot(now, (), nodes, partitions)

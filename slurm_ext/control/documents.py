"""Builds plan documents from a cycle's results, and finds those that are worth writing again.

Pure but for the memory of what was written last. A document is written again when what it tells
has changed; a forecast that moved a little is no change, else every job would be written in every
cycle. Jobs that are about to start come first, because their `ft-run` reads the document at once.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from slurm_ext.control.decide import Decided
from slurm_ext.control.delays import COOLING
from slurm_ext.control.granted import as_started, of_job
from slurm_ext.control.observe import Observation
from slurm_ext.control.outages import out_of_use
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.truth import NOTHING_TOLD, Told, truth_every_s, worth_telling
from slurm_ext.domain.attempt import Cause
from slurm_ext.domain.document import ENDED, Mode, PlanDocument
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, Verdict

# A forecast of a start that moved by less than this, or by less than this share of the wait until
# then, tells the user nothing new.
FORECAST_S = 60.0
FORECAST_SHARE = 0.1
MAX_WRITES = 1000
# A job's last words are looked for until so long after it was seen to be gone: a shared file system
# may show a file of another node late, and ft-run writes the end after Slurm has counted it.
LAST_WORDS_S = 120.0
UNTOLD = "it left the queue, and its ft-run did not tell how it ended"
_NOTHING: Mapping[str, tuple[str, ...]] = {}
_NO_WORDS: Mapping[int, Told] = {}
_NOBODY: Mapping[str, Told] = {}


def build_documents(
    seen: Observation,
    decided: Decided,
    ledger: Mapping[str, LedgerEntry],
    mode: Mode,
    rules: ActingRules,
    *,
    only_starting: bool = False,
    not_done: Mapping[str, tuple[str, ...]] = _NOTHING,
    told: Mapping[str, Told] = _NOBODY,
    notes: Mapping[str, tuple[str, ...]] = _NOTHING,
) -> dict[int, PlanDocument]:
    """One document per pending job or array that is ours (and starts now), by number.

    ``not_done`` says by job what its plan wants and could not be carried out, ``told`` what the
    job itself told, ``notes`` what else there is to tell about it.
    """
    chosen = [
        decision
        for decision in decided.plan.decisions.values()
        if not only_starting or decision.verdict is Verdict.START
    ]
    if not chosen:
        return {}
    jobs = {job.job_id: job for job in seen.snapshot.pending()}
    places, totals = _places(jobs, decided.plan.decisions)
    foreign = _foreign_priorities(seen)
    solves = {pool: s for s in decided.plan.solves for pool in s.pool.split(",")}
    outages = {key: out_of_use(pool.nodes) for key, pool in decided.pools.items()}
    found: dict[int, PlanDocument] = {}
    for decision in chosen:
        job_id = decision.job_id
        job = jobs.get(job_id)
        if job is None:
            continue
        # An array's pending rest speaks for the array, before a single requeued task of it.
        known = found.get(job.base_id)
        if known is not None and "[" not in job_id:
            continue
        facts = decided.view.facts[job_id]
        entry = ledger.get(job_id)
        submitted = entry.submitted if entry is not None else None
        priorities = foreign.get(job.partition, [])
        found[job.base_id] = replace(
            of_job(
                job,
                job_id,
                decided.plan,
                _naming(decision, outages.get(decision.pool, "")),
                mode,
                rules,
                entry,
                told.get(job_id, NOTHING_TOLD),
            ),
            slurm_reason=job.reason,
            permit=facts.permit,
            requested_gpus=submitted.gpus if submitted is not None else job.gpus,
            waiting_since_s=facts.waiting_since_s,
            place=places.get(job_id),
            places=totals.get((job.partition, job.qos), 0),
            foreign_ahead=len(priorities) - bisect.bisect_right(priorities, job.priority),
            candidates=facts.candidates,
            refused={str(gpus): why for gpus, why in decided.refused.get(job_id, {}).items()},
            notes=(
                *seen.missing,
                *(f"not done: {why}" for why in not_done.get(job_id, ())),
                *notes.get(job_id, ()),
            ),
            solve=solves.get(decision.pool),
        )
    return found


def _naming(decision: Decision, outage: str) -> Decision:
    """The decision with the nodes that it may wait for; a cool-down waits for none."""
    if not outage or not decision.waits_for or decision.waits_for == COOLING:
        return decision
    return replace(decision, waits_for=f"{decision.waits_for}; {outage}")


def _places(
    jobs: Mapping[str, Job], decisions: Mapping[str, Decision]
) -> tuple[dict[str, int], Counter[tuple[str, str]]]:
    totals: Counter[tuple[str, str]] = Counter()
    places: dict[str, int] = {}
    for decision in sorted(decisions.values(), key=lambda d: (d.rank, d.job_id)):
        job = jobs.get(decision.job_id)
        if job is not None and decision.verdict is not Verdict.LEAVE:
            totals[job.partition, job.qos] += 1
            places[job.job_id] = totals[job.partition, job.qos]
    return places, totals


def _foreign_priorities(seen: Observation) -> dict[str, list[int]]:
    """Ascending priorities of the jobs that may start and are not ours, by partition."""
    found: dict[str, list[int]] = defaultdict(list)
    for job in seen.snapshot.pending():
        if job.job_id not in seen.directives and job.competes:
            for partition in job.partitions:
                found[partition].append(job.priority)
    for priorities in found.values():
        priorities.sort()
    return found


class DocumentKeeper:
    """Remembers what was written, and says what has to be written now."""

    def __init__(self) -> None:
        self._written: dict[int, PlanDocument] = {}
        self._lost: set[int] = set()
        self._parted_s: dict[int, float] = {}

    def lose(self) -> None:
        """What was written lies in the spool no more."""
        self._lost = set(self._written)

    def lost(self, others: Iterable[int]) -> list[PlanDocument]:
        """Documents as they were written that have to be written again, without ``others``."""
        missing = sorted(self._lost.difference(others))[:MAX_WRITES]
        return [self._written[base_id] for base_id in missing]

    def due(self, documents: Mapping[int, PlanDocument]) -> list[PlanDocument]:
        """Documents that tell something new, those of starting jobs first, at most `MAX_WRITES`."""
        changed = [
            document
            for base_id, document in documents.items()
            if not same(self._written.get(base_id), document)
        ]
        changed.sort(key=lambda d: (d.decision.verdict is not Verdict.START, d.decision.rank))
        return changed[:MAX_WRITES]

    def running(
        self, jobs: Iterable[Job], told: Mapping[str, Told] = _NOBODY
    ) -> list[PlanDocument]:
        """Documents of jobs that have started since: the plan as it was, with what was granted.

        Also of those that have told something new about themselves. An array is running once none
        of its tasks is pending; its document keeps the array's id, and tells of no single task.
        """
        jobs = list(jobs)
        every_s = truth_every_s(sum(1 for job in jobs if job.running))
        waiting = {job.base_id for job in jobs if job.pending}
        states = {(job.base_id, job.state.value) for job in jobs}
        changed: dict[int, PlanDocument] = {}
        for job in jobs:
            known = self._written.get(job.base_id)
            if known is None or not job.running or job.base_id in waiting | changed.keys():
                continue
            array = "[" in known.job_id or known.job_id == str(job.base_id)
            job_id = str(job.base_id) if job.array and array else job.job_id
            word = told.get(job_id, NOTHING_TOLD)
            # Requeued and started again since; of an array's tasks each counts for itself.
            again = known.job_id == job.job_id and known.attempt != job.restarts
            if (job.base_id, known.state) in states and not again:
                if known.job_id == job_id and worth_telling(known, word, every_s):
                    changed[job.base_id] = _with(known, word)
                continue
            started = replace(
                known,
                job_id=job_id,
                state=job.state.value,
                present_gpus=job.gpus,
                slurm_reason="",
                attempt=job.restarts,
                starts=job.restarts + 1,
                decision=as_started(known.decision)
                if known.state in (JobState.PENDING.value, ENDED)
                else known.decision,
            )
            changed[job.base_id] = _with(started, word)
        return list(changed.values())[:MAX_WRITES]

    def parting(self, present: Collection[int], now: float) -> list[PlanDocument]:
        """Documents of jobs that have left the queue and whose last words may still arrive.

        Also of those that left while no daemon looked, where their last start has no end.
        """
        for base_id in present:
            self._parted_s.pop(base_id, None)
        for base_id, document in self._written.items():
            if base_id not in present and (document.state != ENDED or _open(document)):
                self._parted_s.setdefault(base_id, now)
        return [
            self._written[base_id]
            for base_id, since_s in self._parted_s.items()
            if now - since_s <= LAST_WORDS_S
        ]

    def ended(
        self, present: Collection[int], now: float, words: Mapping[int, Told] = _NO_WORDS
    ) -> list[PlanDocument]:
        """Documents of jobs that have left the queue: what was planned, marked as past.

        With their last ``words``, by number. A start whose end nobody has told until the last words
        are due ended, at the latest, when its job was seen to be gone.
        """
        changed: list[PlanDocument] = []
        for base_id, document in self._written.items():
            since_s = self._parted_s.get(base_id)
            if base_id in present or (document.state == ENDED and since_s is None):
                continue
            past = _with(
                replace(document, state=ENDED, slurm_reason=""), words.get(base_id, NOTHING_TOLD)
            )
            if since_s is not None and now - since_s > LAST_WORDS_S:
                past = _closed(past, since_s)
            if past.attempts:
                past = replace(past, starts=max(past.starts, past.attempts[-1].number + 1))
            if past != document:
                changed.append(past)
        return changed[:MAX_WRITES]

    def wrote(self, documents: Collection[PlanDocument]) -> None:
        """These documents lie in the spool now."""
        for document in documents:
            self._written[document.base_id] = document
            self._lost.discard(document.base_id)

    def forget(self, base_ids: Iterable[int]) -> None:
        """These jobs are gone."""
        for base_id in base_ids:
            self._written.pop(base_id, None)
            self._lost.discard(base_id)
            self._parted_s.pop(base_id, None)

    @property
    def known(self) -> frozenset[int]:
        """Jobs and arrays that have a document."""
        return frozenset(self._written)


def _with(document: PlanDocument, told: Told) -> PlanDocument:
    """The document with what the job told; what it told before stays where it is silent now."""
    return replace(
        document,
        truth=told.truth or document.truth,
        attempts=told.attempts or document.attempts,
    )


def _open(document: PlanDocument) -> bool:
    return bool(document.attempts) and document.attempts[-1].ended_s is None


def _closed(document: PlanDocument, gone_s: float) -> PlanDocument:
    """The document with an end of its last start, where that has none."""
    if not _open(document):
        return document
    last = document.attempts[-1]
    told_s = document.truth.at_s if document.truth is not None else last.started_s
    # Gone before a daemon looked: the last report is nearer to the end than the daemon's start.
    at_s = gone_s if gone_s - told_s <= LAST_WORDS_S else told_s
    end = replace(last, ended_s=max(at_s, last.started_s), cause=Cause.UNKNOWN, reason=UNTOLD)
    return replace(document, attempts=(*document.attempts[:-1], end))


def same(old: PlanDocument | None, new: PlanDocument) -> bool:
    """Whether ``new`` tells a reader nothing that ``old`` does not."""
    if old is None:
        return False
    before, after = old.decision.expected_start_s, new.decision.expected_start_s
    if (before is None) != (after is None):
        return False
    if before is not None and after is not None:
        allowed = max(FORECAST_S, FORECAST_SHARE * (after - new.made_s))
        if abs(after - before) > allowed:
            return False
    calm = replace(new.decision, expected_start_s=before)
    # Slurm's priority ages all the time; the order of our jobs is in `place`.
    return replace(new, made_s=old.made_s, priority=old.priority, decision=calm) == old

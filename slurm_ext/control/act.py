"""Carries a plan out in waves: reconcile, write down, write to Slurm, read back, again.

Each wave is built on what was read back, never on what was sent, and what is about to be written
is journalled first. A write is not repeated within one cycle: whether it is worth another try is
the next cycle's question.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.control.decide import Decided
from slurm_ext.control.ledger import Ledger
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.observe import Observation
from slurm_ext.control.reconcile import Reconciled, Refusal, reconcile
from slurm_ext.control.rules import ActingRules
from slurm_ext.domain.action import Action, ActionKind, ActionResult
from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import JournalRow
from slurm_ext.slurm.backend import Backend

_log = logging.getLogger(__name__)

# Lease, shape, lift, and one more for what was refused half-way. What is left comes in the next
# cycle.
MAX_WAVES = 4
# The job started, ended or was cancelled between plan and write: nothing went wrong.
GONE = "gone: it does not wait any more"

Stage = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Acted:
    """What was written in one cycle. ``failed`` counts what was not read back as written.

    ``refusals`` tells by job what the plan wants and is not done.
    """

    writes: int = 0
    failed: int = 0
    waves: int = 0
    left_out: int = 0
    refusals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Actor:
    """Writes to Slurm. Remembers only what was refused last, to tell it once."""

    def __init__(
        self, backend: Backend, clock: Callable[[], float], metrics: Metrics, stage: Stage
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._metrics = metrics
        self._stage = stage
        self._refusals: dict[str, str] = {}

    def act(
        self,
        seen: Observation,
        decided: Decided,
        ledger: Ledger,
        rules: ActingRules,
        cycle: int,
        store: Callable[[Sequence[JournalRow]], None],
    ) -> Acted:
        """Write up to `MAX_WAVES` waves. Raises SourceMissingError where the read-back fails.

        ``store`` writes the ledger and the given rows to the journal.
        """
        snapshot = seen.snapshot
        attempted: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        sent: list[ActionResult] = []
        refused: Sequence[Refusal] = ()
        writes = failed = 0
        for wave in range(MAX_WAVES + 1):
            now = self._clock()
            found = reconcile(
                decided.plan,
                snapshot,
                ledger,
                decided.permits,
                seen.directives,
                rules,
                now,
                at_submitted=decided.at_submitted,
                max_writes=max(0, rules.max_writes_per_cycle - writes),
                stepping=seen.stepping,
            )
            rows = self._judged(
                sent, found, {job.job_id: job for job in snapshot.pending()}, cycle, now
            )
            failed += sum(row.outcome != "ok" for row in rows)
            if wave == 0:
                refused = found.refusals
                rows += self._new_refusals(refused, cycle, now)
            actions = [a for a in found.actions if (a.job_id, a.fields) not in attempted]
            for entry in found.entries.values():
                ledger.put(entry)
            with self._stage("act.journal"):
                store(rows)
            if not actions or wave == MAX_WAVES:
                break
            attempted.update((a.job_id, a.fields) for a in actions)
            with self._stage("act.write"):
                sent = self._apply(actions, cycle, store)
            writes += len(sent)
            with self._stage("act.read_back"):
                snapshot = replace(snapshot, jobs=self._backend.jobs(), taken_s=self._clock())
        return Acted(writes, failed, wave, found.left_out, _by_job(refused))

    def _apply(
        self, actions: Sequence[Action], cycle: int, store: Callable[[Sequence[JournalRow]], None]
    ) -> list[ActionResult]:
        try:
            return self._backend.apply(actions)
        except SourceMissingError as exc:
            # Some may have been carried out. The next cycle sees which.
            now = self._clock()
            store([_row(action, f"unknown: {exc.reason}", cycle, now) for action in actions])
            for action in actions:
                self._metrics.writes.labels(action.kind.value, "unknown").inc()
            raise

    def _judged(
        self,
        sent: Sequence[ActionResult],
        found: Reconciled,
        present: Mapping[str, Job],
        cycle: int,
        now: float,
    ) -> list[JournalRow]:
        """Rows of what was sent, judged by whether it would have to be sent again."""
        again = {(a.job_id, a.fields) for a in found.actions}
        rows = []
        for result in sent:
            action = result.action
            if action.job_id not in present:
                outcome = GONE
            elif not result.ok:
                outcome = f"refused: {result.message}"
            elif (action.job_id, action.fields) in again:
                outcome = "not read back: Slurm shows something else"
            else:
                outcome = "ok"
                if action.kind is ActionKind.LIFT and present[action.job_id].restarts:
                    self._metrics.resumed.inc()
            word = outcome.partition(":")[0].replace(" ", "_")
            self._metrics.writes.labels(action.kind.value, word).inc()
            data = {
                "job": action.job_id,
                "action": action.kind.value,
                "reason": action.reason,
                "fields": dict(action.fields),
                "outcome": outcome,
            }
            level = logging.INFO if outcome in ("ok", GONE) else logging.WARNING
            _log.log(level, "write", extra={"data": data})
            rows.append(_row(action, outcome, cycle, now))
        return rows

    def _new_refusals(
        self, refusals: Sequence[Refusal], cycle: int, now: float
    ) -> list[JournalRow]:
        """Rows of what is not done, once for as long as the reason stays the same."""
        current = {refusal.job_id: refusal.reason for refusal in refusals}
        rows = []
        for job_id, reason in current.items():
            if _kind_of(self._refusals.get(job_id, "")) == _kind_of(reason):
                continue
            self._metrics.refusals.labels(_kind_of(reason)).inc()
            _log.info(
                "refusal", extra={"data": {"job": job_id, "action": "none", "reason": reason}}
            )
            rows.append(JournalRow(now, cycle, job_id, "refusal", reason))
        self._refusals = current
        return rows


def _by_job(refusals: Sequence[Refusal]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for refusal in refusals:
        found[refusal.job_id] = (*found.get(refusal.job_id, ()), refusal.reason)
    return found


def _row(action: Action, outcome: str, cycle: int, now: float) -> JournalRow:
    return JournalRow(
        at_s=now,
        cycle=cycle,
        job_id=action.job_id,
        event=f"write:{action.kind.value}",
        reason=action.reason,
        fields=" ".join(f"{key}={value}" for key, value in action.fields),
        outcome=outcome,
    )


# Words of a reason to the kind under which it is counted: reasons name numbers and jobs, and a
# metric must not have a label for each of them. The first that occurs wins.
_KINDS = (
    ("begin time", "begin time"),
    ("cools down", "cool-down"),
    ("requeued jobs of its partition", "resumes at once"),
    ("could delay job", "growth"),
    ("allows", "limit"),
    ("asks for at least", "limit"),
    ("longest allowed", "time limit"),
    ("form cannot", "form"),
    ("not pinned", "pin"),
    ("tie", "order"),
)


def _kind_of(reason: str) -> str:
    if not reason:
        return ""
    return next((kind for words, kind in _KINDS if words in reason), "other")

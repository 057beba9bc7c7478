"""Tells others what was decided: log lines, plan documents, metrics.

Nothing here decides or writes to Slurm, and nothing here can fail a cycle: a spool that hangs or is
read-only costs documents.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from slurm_ext.control.changes import DecisionLog
from slurm_ext.control.config import Config
from slurm_ext.control.decide import Decided
from slurm_ext.control.delays import COOLING
from slurm_ext.control.documents import DocumentKeeper, build_documents
from slurm_ext.control.granted import unplanned
from slurm_ext.control.ledger import Ledger
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.observe import Observation
from slurm_ext.control.permits import facts_from
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.spool import Spool, SpoolThread
from slurm_ext.control.tally import AttemptTally, checkpoint_share
from slurm_ext.control.truth import Told, told_of, truth_from
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.document import ClusterDocument, Mode, PlanDocument
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.remaining import EstimateSources
from slurm_ext.estimate.table import table_bytes

_log = logging.getLogger(__name__)


class Teller:
    """Log, spool and metrics of one daemon."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        prepare_spool: Callable[[Spool], None] = Spool.prepare,
    ) -> None:
        self._config = config
        self._prepare_spool = prepare_spool
        self._metrics = metrics
        self._news = DecisionLog()
        self._keeper = DocumentKeeper()
        self._tally = AttemptTally(metrics)
        self._last_words: dict[str, Attempts] = {}
        self._told = ""
        self._shown_index: ThroughputIndex | None = None
        self._whole_written = False
        self.spool: SpoolThread | None = None
        self.prepare()

    def reconfigure(self, config: Config) -> None:
        """Take over a configuration."""
        self._config = config
        self._shown_index = None  # the new spool may have no copy of the table
        self._whole_written = False
        self.spool = None
        self.prepare()

    def prepare(self) -> bool:
        """Make the spool's directories where that has not worked yet; whether it is usable."""
        if self.spool is not None:
            return True
        spool = SpoolThread(Spool(self._config.spool), self._config.command_timeout_s)
        try:
            spool.call(self._prepare_spool)
            # What an earlier daemon wrote need not be written again, and is ours to remove.
            self._keeper.wrote(spool.call(lambda found: found.read_plans()).values())
        except (DataError, SourceMissingError) as exc:
            self._complain(f"{exc}; going on without plan documents")
            return False
        self._told = ""
        self.spool = spool
        return True

    # -- decisions -------------------------------------------------------------------------------

    def news(self, shown: Decided) -> list[Decision]:
        """Decisions that are new, after logging each of them."""
        changed = self._news.news(shown.plan.decisions)
        for decision in changed:
            data: dict[str, object] = {
                "job": decision.job_id,
                "action": decision.verdict.value,
                "reason": decision.reason,
            }
            if decision.configuration is not None:
                data["gpus"] = decision.configuration.gpus
            if decision.nodes:
                data["nodes"] = list(decision.nodes)
            _log.info("decision", extra={"data": data})
        return changed

    # -- documents -------------------------------------------------------------------------------

    def announce(
        self, seen: Observation, shown: Decided, ledger: Ledger, mode: Mode, rules: ActingRules
    ) -> None:
        """Write the documents of jobs that are about to start: their ranks read them at once."""
        due = self._keeper.due(
            build_documents(
                seen,
                shown,
                ledger,
                mode,
                rules,
                only_starting=True,
                told=told_of(seen, shown.ends),
            )
        )
        if due and self._to_spool(lambda spool: spool.write_plans(due)):
            self._keeper.wrote(due)

    def documents(
        self,
        seen: Observation,
        shown: Decided,
        ledger: Ledger,
        mode: Mode,
        rules: ActingRules,
        cycle: int,
        not_done: Mapping[str, tuple[str, ...]] | None = None,
        notes: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Write every document that tells something new, and the one of the whole.

        ``not_done`` says by job what its plan wants and could not be carried out, ``notes`` what
        else there is to tell.
        """
        self._look_for_losses()
        told = told_of(seen, shown.ends)
        due = self._keeper.due(
            build_documents(
                seen,
                shown,
                ledger,
                mode,
                rules,
                not_done=not_done or {},
                told=told,
                notes=notes or {},
            )
        )
        ours = [job for job in seen.snapshot.jobs if job.job_id in seen.directives]
        due += self._keeper.running(ours, told)
        known = self._keeper.known.difference(
            job.base_id for job in seen.snapshot.jobs if job.job_id in seen.broken
        )
        due += self._keeper.due(unplanned(seen, shown.plan, ledger, mode, rules, known, told))
        present = {job.base_id for job in seen.snapshot.jobs}
        words = self._hear_out(self._keeper.parting(present, seen.now))
        due += self._keeper.ended(present, seen.now, words)
        due += self._keeper.lost(document.base_id for document in due)
        if due and self._to_spool(lambda spool: spool.write_plans(due)):
            self._keeper.wrote(due)
        refusal = facts_from(seen.slurm).refusal()
        whole = ClusterDocument(
            made_s=shown.plan.made_s,
            mode=mode,
            policy=shown.plan.policy,
            cycle=cycle,
            cycle_s=self._config.cycle_s,
            lease_s=self._config.lease_s,
            acting={name: tuple(sorted(acts)) for name, acts in rules.acts.items()},
            refusals=tuple(word for word in (refusal, shown.failure, *seen.missing) if word),
            solves=shown.plan.solves,
            jobs=len(shown.plan.decisions),
            verdicts=dict(Counter(d.verdict.value for d in shown.plan.decisions.values())),
            corrections=seen.sources.calibration.corrections,
            stale=seen.sources.calibration.stale,
        )
        self._whole_written |= self._to_spool(lambda spool: spool.write_cluster(whole))
        self._show_table(seen.sources)

    def _hear_out(self, gone: Sequence[PlanDocument]) -> dict[int, Told]:
        """The last words of jobs that have left the queue, by number: their last step, their end.

        They are written as a job ends, so that the cycle that saw it run last came too early.
        """
        self._last_words = {}
        wanted: dict[int, dict[str, int]] = {}
        for document in gone:
            if document.uid is not None:
                wanted.setdefault(document.uid, {})[document.job_id] = document.base_id
        found: dict[int, Told] = {}
        for uid, jobs in wanted.items():
            if self.spool is None:
                break
            try:
                inbox = self.spool.call(partial(Spool.read_about, uid=uid, wanted=set(jobs)))
            except SourceMissingError as exc:
                self._complain(str(exc))
                break
            for job_id, base_id in jobs.items():
                record = inbox.attempts.get((uid, job_id))
                report = inbox.progress.get((uid, job_id))
                if record is not None:
                    self._last_words[job_id] = record
                found[base_id] = Told(
                    None if report is None else truth_from(report),
                    () if record is None else record.attempts,
                )
        return found

    def _look_for_losses(self) -> None:
        """Where somebody emptied the spool beside us, everything is written once more."""
        if self.spool is None or not self._whole_written:
            return
        try:
            if self.spool.call(Spool.intact):
                return
            self.spool.call(Spool.prepare)
        except (DataError, SourceMissingError) as exc:
            self._complain(str(exc))
            return
        _log.warning("spool: documents were removed; all of them are written again")
        self._whole_written = False
        self._shown_index = None
        self._keeper.lose()

    def _show_table(self, sources: EstimateSources) -> None:
        """Copy the throughput table into the spool when it was read anew: it lies out of reach."""
        if sources.index is self._shown_index or sources.missing:
            return
        try:
            content = table_bytes(self._config.table)
        except (DataError, SourceMissingError) as exc:
            self._complain(str(exc))
            return
        if self._to_spool(lambda spool: spool.write_table(content)):
            self._shown_index = sources.index

    def forget(self, gone: frozenset[int]) -> None:
        """Remove the documents of jobs that have long left the queue."""
        self._tally.forget(gone)
        known = gone & self._keeper.known
        if known and self._to_spool(lambda spool: spool.remove_plans(known)):
            self._keeper.forget(known)

    @property
    def known(self) -> frozenset[int]:
        """Jobs and arrays that have a document."""
        return self._keeper.known

    def _to_spool(self, work: Callable[[Spool], None]) -> bool:
        if self.spool is None:
            return False
        try:
            self.spool.call(work)
        except SourceMissingError as exc:
            self._complain(str(exc))
            return False
        self._told = ""
        return True

    def _complain(self, words: str) -> None:
        """Once for as long as the trouble is the same."""
        if words != self._told:
            _log.error("spool: %s", words)
            self._told = words

    # -- metrics ---------------------------------------------------------------------------------

    def measure(self, seen: Observation, shown: Decided, ledger: Ledger) -> None:
        """Set the gauges."""
        metrics = self._metrics
        metrics.plan_time.set(shown.plan.made_s)
        counts = Counter(d.verdict for d in shown.plan.decisions.values())
        for verdict in Verdict:
            metrics.jobs.labels(verdict.value).set(counts[verdict])
        metrics.cooling.set(sum(1 for d in shown.plan.decisions.values() if d.waits_for == COOLING))
        self._tally.notice({**self._last_words, **seen.attempts})
        share = checkpoint_share(seen)
        if share is not None:
            metrics.checkpoint_share.set(share)
        metrics.calibration.clear()
        for found in seen.sources.calibration.corrections:
            metrics.calibration.labels(found.model, found.gpu_type).set(found.factor)
        metrics.stale_rows.set(len(seen.sources.calibration.stale))
        metrics.leased.set(sum(1 for e in ledger.values() if (e.lease_until_s or 0.0) > seen.now))
        metrics.gpus_free.clear()
        for pool in shown.pools.values():
            metrics.gpus_free.labels(pool.key).set(pool.gpus_free)

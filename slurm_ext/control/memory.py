"""What the daemon remembers between cycles: ledger, journal, past runs.

The working copy is in memory, the journal outlives us. A journal that is lost, damaged or removed
under our feet is replaced by a new one that takes over what memory holds; when memory is new as
well (a restart), it is rebuilt from the plan documents in the spool. What cannot be written down
is not acted on: a journal on a full disk fails the cycle, and leases run out by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from slurm_ext.control.calibrate import Calibrator
from slurm_ext.control.config import Config
from slurm_ext.control.files import is_there
from slurm_ext.control.journal import Journal, open_journal
from slurm_ext.control.ledger import Ledger, holds_something
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.observe import Observation
from slurm_ext.control.recover import recover
from slurm_ext.control.requeues import RequeueWatch
from slurm_ext.control.runs import RunWatch
from slurm_ext.control.spool import SpoolThread
from slurm_ext.control.submitted import first_sight, notice_others
from slurm_ext.control.unstarted import notice_barred, notice_unstarted
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import JournalRow, LedgerEntry
from slurm_ext.domain.request import PinRequest
from slurm_ext.estimate.history import Declared, Habit, habits

_log = logging.getLogger(__name__)
# A request bears the time of the machine on which it was made.
_CLOCKS_S = 60.0


class Memory:
    """Ledger and journal of one daemon."""

    def __init__(self, config: Config, clock: Callable[[], float], metrics: Metrics) -> None:
        """Open the journal. Raises DataError only where not even a new one can be made."""
        self._config = config
        self._clock = clock
        self._metrics = metrics
        existed = is_there(config.journal)
        self._journal, told = open_journal(config.journal, config.journal_max_rows, clock())
        if told:
            level = logging.ERROR if existed else logging.INFO
            _log.log(level, "journal: %s; what is ours is rebuilt from Slurm and the spool", told)
            metrics.rebuilt.inc()
        self._recovering = bool(told)
        self.ledger = Ledger(self._journal.ledger())
        self.last_cycle = self._journal.last_cycle()
        self._watch = RunWatch()
        self._requeues = RequeueWatch()
        self._runs = self._journal.runs()
        self.habits: Mapping[tuple[str, Declared], Habit] = habits(self._runs)
        self.calibrator = Calibrator(self._journal.samples())

    def close(self) -> None:
        """Close the journal; everything in it stays."""
        self._journal.close()

    def reconfigure(self, config: Config) -> None:
        """Take over a configuration; a journal that it names elsewhere is begun at once."""
        moved = config.journal != self._config.journal
        self._config = config
        if moved:
            self._reopen("the configuration names another")

    @property
    def holds_anything(self) -> bool:
        """Whether anything of ours is out on any job."""
        return any(holds_something(entry) for entry in self.ledger.values())

    def directives(self) -> dict[int, str]:
        """AdminComments that are known from earlier."""
        return self._journal.directives()

    def rows(self) -> int:
        """Rows of history."""
        return self._journal.rows()

    # -- what was seen ---------------------------------------------------------------------------

    def notice(
        self, seen: Observation, expected_s: Mapping[str, float], spool: SpoolThread | None
    ) -> None:
        """Bring the ledger up to what was seen: new jobs, others' changes, users' pins, ends.

        ``expected_s`` are the run times expected of jobs that start now.
        """
        ours = [job for job in seen.snapshot.jobs if job.job_id in seen.directives]
        if self._recovering:
            self._recover(ours, spool)
        self.ledger.forget_given_away(seen.snapshot.jobs)
        self.ledger.meet(ours, seen.now)
        self._requeues.look(seen.snapshot)
        for job in ours:
            entry = self._requeued(job, seen)
            if job.pending:
                entry = notice_others(job, first_sight(job, seen.directives[job.job_id], entry))
                entry = notice_barred(job, notice_unstarted(job, entry, seen.now), seen.now)
            if job.uid is not None:
                entry = _pinned(job, entry, seen.inbox.request_about(job.uid, job.base_id))
            self.ledger.put(entry)
        ended = self._watch.watch(seen.snapshot, expected_s, seen.now)
        if ended:
            self._runs = [*self._runs, *ended]
            self.habits = habits(self._runs)
            self._write(lambda journal: journal.add_runs(ended))
        self.calibrator.notice(seen)
        changed, gone = self.calibrator.unsaved()
        self._write(lambda journal: journal.store_samples(changed, gone))

    def _requeued(self, job: Job, seen: Observation) -> LedgerEntry:
        """The job's entry, with a requeue since the last cycle noted, counted and told."""
        before = self.ledger[job.job_id]
        entry = self._requeues.note(job, before, seen.attempts)
        if entry.requeues != before.requeues:
            cause = entry.requeues[-1].cause.value
            self._metrics.restarts.labels(cause).inc()
            data = {"job": job.job_id, "restarts": job.restarts, "cause": cause}
            _log.info("requeued", extra={"data": data})
        return entry

    def _recover(self, ours: Sequence[Job], spool: SpoolThread | None) -> None:
        """After the journal was lost. Without the spool, Slurm alone has to do."""
        self._recovering = False
        if spool is None:
            return
        try:
            plans = spool.call(lambda found: found.read_plans())
        except SourceMissingError as exc:
            _log.warning("the ledger cannot be rebuilt from the spool: %s", exc)
            return
        recovered = recover(self.ledger, plans, ours)
        if recovered:
            _log.warning(
                "the journal was lost: %d of %d jobs rebuilt from the spool",
                len(recovered),
                len(ours),
            )

    # -- writing down ----------------------------------------------------------------------------

    def check(self) -> None:
        """Notice a journal that was removed under our feet."""
        if self._journal.lost:
            self._reopen("the file was removed")

    def store(
        self, rows: Sequence[JournalRow] = (), directives: Mapping[int, str] | None = None
    ) -> None:
        """Write ledger changes, history and new directives down."""
        self._write(lambda journal: journal.store(*self.ledger.staged(), rows, directives))
        self.ledger.settle()

    def forget_directives(self, base_ids: Iterable[int]) -> None:
        """Drop the directives of jobs that are gone."""
        gone = list(base_ids)
        self._write(lambda journal: journal.forget_directives(gone))

    def _write(self, work: Callable[[Journal], None]) -> None:
        """A journal that fails is replaced once; one that fails again ends the cycle."""
        try:
            work(self._journal)
        except DataError as exc:
            self._reopen(str(exc))
            work(self._journal)

    def _reopen(self, why: str) -> None:
        _log.error("journal: %s; it is opened anew with what is remembered", why)
        self._metrics.rebuilt.inc()
        self._journal.close()
        self._journal, told = open_journal(
            self._config.journal, self._config.journal_max_rows, self._clock()
        )
        if told:
            _log.warning("journal: %s", told)
        self.ledger.unsettle()
        self.calibrator.forget_stored()


def _pinned(job: Job, entry: LedgerEntry, request: PinRequest | None) -> LedgerEntry:
    """The entry with what its owner last asked for."""
    if request is None:
        return entry
    if not job.restarts and request.at_s < job.submit_s - _CLOCKS_S:
        return entry  # about an earlier job of the same number; requests are never deleted
    gpus = request.gpus if request.pinned else None
    if (entry.veto, entry.veto_gpus) == (request.pinned, gpus):
        return entry
    words = "pinned by its owner" if request.pinned else "its owner took the pin back"
    _log.info("%s", words, extra={"data": {"job": entry.job_id, "gpus": gpus}})
    return replace(entry, veto=request.pinned, veto_gpus=gpus)

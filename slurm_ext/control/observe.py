"""One look at everything a decision needs: the cluster, the directives, the spool, the table.

What must not be missing is the queue, the nodes and Slurm's configuration: without them the cycle
is skipped (SourceMissingError). What may be missing is the spool and the table: the last answer
stays in force, `Observation.missing` says so, and jobs are planned with less knowledge.
AdminComment is asked for once per new job and kept, since that column is the expensive one; a
number that Slurm gave to another job since is a new job (`ledger.given_away`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from slurm_ext.control.config import Config
from slurm_ext.control.ledger import given_away
from slurm_ext.control.spool import Inbox, SpoolThread
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.directive import Directive, extract_from_admin_comment, parse_comment
from slurm_ext.domain.errors import (
    DataError,
    DirectiveError,
    ProtocolError,
    SourceMissingError,
)
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits, Topology
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.estimate.calibration import NO_CALIBRATION, Calibration
from slurm_ext.estimate.history import Declared, Habit
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.remaining import EstimateSources
from slurm_ext.estimate.table import load_index, table_stamp
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.facts import SlurmConfig

T = TypeVar("T")
_log = logging.getLogger(__name__)
# AdminComments asked for in one cycle: a first cycle on a long queue must not take minutes.
MAX_NEW_DIRECTIVES = 10_000


@dataclass(frozen=True, slots=True)
class Observation:
    """What one cycle saw.

    ``directives`` holds our jobs by id; a job that is absent there is not ours, or its directive
    is unusable for the reason in ``broken``. ``missing`` names optional sources that could not be
    read; the values in force are then older ones. ``attempts`` is what each job's own ``ft-run``
    tells about its starts.
    """

    now: float
    snapshot: Snapshot
    slurm: SlurmConfig
    directives: Mapping[str, Directive]
    broken: Mapping[str, str]
    inbox: Inbox
    sources: EstimateSources
    missing: tuple[str, ...] = ()
    attempts: Mapping[str, Attempts] = field(default_factory=dict)

    @property
    def stepping(self) -> frozenset[str]:
        """Running jobs whose present attempt has reported a step."""
        reports = self.sources.progress
        return frozenset(
            job.job_id
            for job in self.snapshot.running()
            if (report := reports.get(job.job_id)) is not None
            and report.attempt >= job.restarts
            and (report.first_step_s is not None or report.step > (report.restored_step or 0))
        )


@dataclass(slots=True)
class _Known:
    """Answers that change rarely, with the time they were read."""

    slurm: SlurmConfig
    limits: Mapping[str, Limits]
    topology: Topology
    at_s: float


@dataclass(slots=True)
class _Table:
    index: ThroughputIndex = field(default_factory=ThroughputIndex)
    stamp: tuple[int, ...] = ()
    looked_s: float | None = None
    missing: str = ""


class Observer:
    """Reads, and keeps what need not be read again."""

    def __init__(
        self,
        backend: Backend,
        config: Config,
        spool: SpoolThread | None,
        directives: Mapping[int, str] | None = None,
        submitted: Mapping[int, float] | None = None,
    ) -> None:
        """``directives`` are AdminComments known from the journal, by number of job or array;
        ``submitted`` tells when these jobs were submitted first."""
        self._backend = backend
        self._config = config
        self._spool = spool
        # Without a directive there is no telling whose it was: it is asked for again.
        self._texts: dict[int, str] = {base: t for base, t in (directives or {}).items() if t}
        self._submitted: dict[int, float] = dict(submitted or {})
        self._parsed: dict[int, Directive | str | None] = {}
        self._known: _Known | None = None
        self._table = _Table()
        self._inbox = Inbox()
        self._new_texts: dict[int, str] = {}

    def reconfigure(self, config: Config, spool: SpoolThread | None) -> None:
        """Take over another configuration; what was read stays, except what it points elsewhere."""
        if config.table != self._config.table:
            self._table = _Table()
        self._config, self._spool = config, spool
        self._known = None

    def observe(
        self,
        now: float,
        habits: Mapping[tuple[str, Declared], Habit],
        calibration: Calibration = NO_CALIBRATION,
    ) -> Observation:
        """Look once. Raises SourceMissingError where the cycle has to be skipped.

        ``habits`` and ``calibration`` are what earlier cycles have learnt for the estimates.
        """
        missing: list[str] = []
        snapshot = self._backend.snapshot()
        known = self._rarely(now, missing)
        snapshot = replace(snapshot, limits=known.limits, topology=known.topology)
        self._read_directives(snapshot)
        directives: dict[str, Directive] = {}
        broken: dict[str, str] = {}
        for job in snapshot.jobs:
            parsed = self._parsed.get(job.base_id)
            if isinstance(parsed, Directive):
                directives[job.job_id] = parsed
            elif isinstance(parsed, str):
                broken[job.job_id] = parsed
        self._read_inbox(snapshot, directives, missing)
        self._read_table(now)
        if self._table.missing:
            missing.append(self._table.missing)
        # Before its first start a job has nothing to report: it is an earlier job's, or made up.
        told = {job.job_id for job in snapshot.jobs if job.restarts or not job.pending}
        sources = EstimateSources(
            index=self._table.index,
            habits=habits,
            progress=_of_owners(snapshot, self._inbox.progress, told),
            gpu_memory_gb={name.lower(): gb for name, gb in self._config.gpu_memory_gb.items()},
            efficiency_floor=self._config.efficiency_floor,
            missing=self._table.missing,
            calibration=calibration,
        )
        return Observation(
            now,
            snapshot,
            known.slurm,
            directives,
            broken,
            self._inbox,
            sources,
            tuple(missing),
            _of_owners(snapshot, self._inbox.attempts, told),
        )

    def forget(self, base_ids: frozenset[int]) -> None:
        """Drop the directives of jobs that are gone: job numbers are used again some day."""
        for base_id in base_ids:
            self._texts.pop(base_id, None)
            self._submitted.pop(base_id, None)
            self._parsed.pop(base_id, None)

    def take_new_texts(self) -> dict[int, str]:
        """AdminComments read since the last call, for the journal."""
        taken, self._new_texts = self._new_texts, {}
        return taken

    @property
    def remembered(self) -> frozenset[int]:
        """Jobs and arrays whose AdminComment is kept."""
        return frozenset(self._texts)

    def _rarely(self, now: float, missing: list[str]) -> _Known:
        known = self._known
        if known is not None and now - known.at_s < self._config.limits_every_s:
            return known
        try:
            known = _Known(
                self._backend.slurm_config(),
                self._backend.limits(),
                self._backend.topology(),
                now,
            )
        except SourceMissingError as exc:
            if self._known is None:
                raise
            # slurmdbd away: yesterday's limits are better than none, and no reason to stop.
            missing.append(exc.source)
            self._known.at_s = now
            return self._known
        self._known = known
        return known

    def _read_directives(self, snapshot: Snapshot) -> None:
        again = frozenset(
            job.base_id
            for job in snapshot.jobs
            if (first_s := self._submitted.get(job.base_id)) is not None
            and given_away(job, first_s)
        )
        if again:
            _log.warning(
                "job %d and %d others have numbers of earlier jobs", min(again), len(again) - 1
            )
            self.forget(again)
        new: dict[int, Job] = {}
        for job in snapshot.jobs:
            if job.base_id not in self._texts and job.base_id not in new:
                if len(new) >= MAX_NEW_DIRECTIVES:
                    break
                new[job.base_id] = job
        if new:
            self._fetch({job.job_id: base for base, job in new.items()}, snapshot.taken_s)
            for base_id, job in new.items():
                if base_id in again and "ft:" not in self._texts.get(base_id, ""):
                    self._new_texts[base_id] = ""  # else a restarted daemon finds the old one
                if not job.restarts:
                    self._submitted[base_id] = job.submit_s
        for base_id, text in self._texts.items():
            if base_id not in self._parsed:
                self._parsed[base_id] = _parse(base_id, text)

    def _fetch(self, base_of: Mapping[str, int], now: float) -> None:
        """Ask for the texts of new jobs: AdminComment, and the users' comments where wanted."""
        texts = dict(self._backend.admin_comments(list(base_of)))
        if self._config.read_comments:
            bare = [job_id for job_id, text in texts.items() if "ft:" not in text]
            for job_id, comment in self._backend.user_comments(bare).items() if bare else ():
                texts[job_id] = _from_comment(job_id, comment, now)
        for job_id, text in texts.items():
            base_id = base_of[job_id]
            # Only what carries a directive is worth journalling; "" is kept in memory.
            self._texts[base_id] = text
            if "ft:" in text:
                self._new_texts[base_id] = text

    def _read_inbox(
        self, snapshot: Snapshot, directives: Mapping[str, Directive], missing: list[str]
    ) -> None:
        if self._spool is None:
            return
        uids = {
            job.uid for job in snapshot.jobs if job.uid is not None and job.job_id in directives
        }
        try:
            self._inbox = self._spool.call(lambda spool: spool.read_inbox(uids | {0}))
        except SourceMissingError as exc:
            missing.append("spool")
            _log.warning("spool: %s", exc)

    def _read_table(self, now: float) -> None:
        table = self._table
        if table.looked_s is not None and now - table.looked_s < self._config.table_every_s:
            return
        table.looked_s = now
        stamp = table_stamp(Path(self._config.table))
        if stamp == table.stamp and not table.missing:
            return
        try:
            table.index, table.missing = load_index(Path(self._config.table)), ""
            _log.info("throughput table %s: %d rows", self._config.table, table.index.rows)
        except (DataError, SourceMissingError) as exc:
            if str(exc) != table.missing:
                _log.error("throughput table: %s", exc)
            table.missing = str(exc)
        table.stamp = stamp


def _parse(base_id: int, text: str) -> Directive | str | None:
    try:
        return extract_from_admin_comment(text)
    except ProtocolError as exc:
        _log.warning("job %d: its directive is unusable: %s", base_id, exc)
        return str(exc)


def _from_comment(job_id: str, comment: str, now: float) -> str:
    """The stored form of the directive in a user's comment; empty where there is none."""
    if "ft:" not in comment:
        return ""
    try:
        directive = parse_comment(comment, now_s=now)
    except DirectiveError as exc:
        _log.warning("job %s: the directive in its comment is unusable: %s", job_id, exc)
        return ""
    return "" if directive is None else f"ft:{directive.to_json()}"


def _of_owners(
    snapshot: Snapshot, told: Mapping[tuple[int, str], T], wanted: Set[str]
) -> dict[str, T]:
    """What was told, by job id; only the owner of a job may tell about it."""
    found: dict[str, T] = {}
    for job in snapshot.jobs:
        if job.uid is not None and job.job_id in wanted:
            word = told.get((job.uid, job.job_id))
            if word is not None:
                found[job.job_id] = word
    return found

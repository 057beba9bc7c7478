"""One cycle: observe, decide, act, tell. Synchronous; the loop runs it in a thread.

The order of steps makes a kill at any point harmless: what is ours is journalled before Slurm is
written to, plan documents of starting jobs lie in the spool before those jobs can start, and the
heartbeat comes last, so that only a complete cycle beats.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_ext.control.act import Acted, Actor
from slurm_ext.control.asks import Munge
from slurm_ext.control.changes import decision_rows
from slurm_ext.control.config import Config
from slurm_ext.control.decide import Decided, decide, everything_allowed, policy_from
from slurm_ext.control.heartbeat import beat
from slurm_ext.control.locks import FileLock, acting_lock
from slurm_ext.control.memory import Memory
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.mover import Mover
from slurm_ext.control.observe import Observation, Observer
from slurm_ext.control.permits import facts_from
from slurm_ext.control.released import is_released
from slurm_ext.control.rules import ActingRules, rules_from
from slurm_ext.control.spool import Spool
from slurm_ext.control.tell import Teller
from slurm_ext.domain.document import Mode
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.estimate import Source
from slurm_ext.domain.journal import JournalRow
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import Policy
from slurm_ext.slurm.backend import Backend

_log = logging.getLogger(__name__)
# Counting a long history takes milliseconds, and nobody needs it every cycle.
_COUNT_ROWS_EVERY = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What one cycle did, for the loop, for ``--once`` and for tests."""

    cycle: int
    skipped: str = ""
    jobs: int = 0
    writes: int = 0
    failed: int = 0
    changed: int = 0
    mode: Mode = Mode.OBSERVE

    def in_words(self) -> str:
        """One line for people and for systemd's status."""
        if self.skipped:
            return f"cycle {self.cycle} skipped: {self.skipped}"
        return (
            f"cycle {self.cycle} ({self.mode.value}): {self.jobs} jobs planned,"
            f" {self.changed} decisions changed, {self.writes} writes, {self.failed} failed"
        )


class Engine:
    """The daemon without its loop."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        *,
        observe_only: bool = False,
        clock: Callable[[], float] = time.time,
        metrics: Metrics | None = None,
        policy: Policy | None = None,
        prepare_spool: Callable[[Spool], None] = Spool.prepare,
        munge: Munge | None = None,
    ) -> None:
        """Opens journal and spool. Raises DataError where not even a new journal can be made.

        ``prepare_spool`` makes the spool usable, whenever it is reached for the first time.
        Without ``munge`` no job is asked for anything, and no operator's request passed on.
        """
        self.config = config
        self.metrics = metrics or Metrics()
        self.observe_only = observe_only
        self._clock = clock
        self._given_policy = policy
        self._policy = policy or policy_from(config)
        self.memory = Memory(config, clock, self.metrics)
        self._cycle = self.memory.last_cycle
        self._teller = Teller(config, self.metrics, prepare_spool)
        self._observer = Observer(
            backend,
            config,
            self._teller.spool,
            self.memory.directives(),
            self.memory.ledger.submitted,
        )
        self._actor = Actor(backend, clock, self.metrics, self._stage)
        self._mover = None if munge is None else Mover(munge, backend, self.metrics)
        self._previous: Plan | None = None
        self._previous_shown: Plan | None = None
        self._missed = False
        self._expected_s: dict[str, float] = {}
        self._beat_told = ""
        if observe_only and self.memory.holds_anything:
            _log.warning(
                "an acting daemon left writes behind, and --observe changes nothing: run"
                " slurm-ext release"
            )

    def close(self) -> None:
        """Close the journal. What is ours stays: a restarted daemon goes on with it."""
        self.memory.close()

    def reconfigure(self, config: Config) -> None:
        """Take over a new configuration between two cycles."""
        self.config = config
        self._policy = self._given_policy or policy_from(config)
        self.memory.reconfigure(config)
        self._teller.reconfigure(config)
        self._observer.reconfigure(config, self._teller.spool)

    def cycle(self) -> Report:
        """Run one cycle. A missing source gives a report; anything else that fails is raised."""
        self._cycle += 1
        with self.metrics.cycle_seconds.time():
            try:
                report = self._run()
            except SourceMissingError as exc:
                self._missed = True
                self.metrics.skipped.labels(exc.source.rsplit("/", 1)[-1][:40] or "unknown").inc()
                self.metrics.cycles.labels("skipped").inc()
                _log.warning("cycle %d skipped: %s", self._cycle, exc)
                return Report(self._cycle, skipped=str(exc))
        self.metrics.cycles.labels("complete").inc()
        return report

    def _run(self) -> Report:
        memory, teller = self.memory, self._teller
        memory.check()
        if teller.spool is None and teller.prepare():
            self._observer.reconfigure(self.config, teller.spool)
        with self._stage("observe"):
            learnt = memory.habits, memory.calibrator.current
            seen = self._observer.observe(self._clock(), *learnt)
        mode = self._mode()
        rules = replace(rules_from(self.config), requeue_hold_s=seen.slurm.requeue_hold_s)
        if mode is not Mode.ACTING:
            rules = replace(rules, acts={})
        with self._stage("remember"):
            memory.notice(seen, self._expected_s, teller.spool)
        if self._missed:
            self._previous = _without_silence(self._previous, seen.now)
            self._missed = False
        with self._stage("decide"):
            decided, shown = self._decide(seen, rules)
        changed = teller.news(shown)
        with self._stage("journal"):
            self._store(decision_rows(changed, self._cycle, seen.now))
        with self._stage("announce"):
            teller.announce(seen, shown, memory.ledger, mode, rules)
        acted = Acted()
        # What is ours is taken back when acting was switched off, but not by a mere observer.
        if mode is Mode.ACTING or (memory.holds_anything and not self.observe_only):
            with self._stage("act"):
                acted = self._act(seen, decided, rules)
        notes: Mapping[str, tuple[str, ...]] = {}
        if self._mover is not None and teller.spool is not None:
            with self._stage("pause"):
                notes = self._mover.run(
                    seen, decided, memory.ledger, rules, teller.spool, self._store, self._cycle
                )
        with self._stage("tell"):
            teller.documents(
                seen, shown, memory.ledger, mode, rules, self._cycle, acted.refusals, notes
            )
            teller.measure(seen, shown, memory.ledger)
            self._forget(seen)
        self._previous = decided.plan
        self._expected_s = _expected(shown)
        with self._stage("beat"):
            self._beat()
        return Report(
            self._cycle,
            jobs=len(shown.plan.decisions),
            writes=acted.writes,
            failed=acted.failed,
            changed=len(changed),
            mode=mode,
        )

    def _beat(self) -> None:
        """Beat; a file that cannot be written is told once, and the release timer will act."""
        try:
            beat(self.config.heartbeat, self._clock(), self.config.lease_s, self._cycle)
        except DataError as exc:
            if str(exc) != self._beat_told:
                _log.error("heartbeat: %s; slurm-ext release --if-stale takes us for gone", exc)
            self._beat_told = str(exc)
        else:
            self._beat_told = ""

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Times one stage. Overridden in tests to end the process there."""
        with self.metrics.stage_seconds.labels(name).time():
            yield

    def _mode(self) -> Mode:
        if self.observe_only or not self.config.acting:
            return Mode.OBSERVE
        return Mode.RELEASED if is_released(self.config.journal) else Mode.ACTING

    def _store(self, rows: Sequence[JournalRow]) -> None:
        self.memory.store(rows, self._observer.take_new_texts())

    def _decide(self, seen: Observation, rules: ActingRules) -> tuple[Decided, Decided]:
        """The plan that is carried out, and the plan that is shown.

        They differ for partitions where nothing may be done: there the plan that is shown is the
        one that would be carried out, while the other leaves their jobs alone.
        """
        slurm = facts_from(seen.slurm)

        def under(some: ActingRules, previous: Plan | None, carried_out: bool) -> Decided:
            ledger, config = self.memory.ledger, self.config
            return decide(seen, ledger, some, slurm, config, self._policy, previous, carried_out)

        decided = under(rules, self._previous, True)
        observed = [
            job
            for job in seen.snapshot.pending()
            if job.job_id in seen.directives and not rules.acts.get(job.partition)
        ]
        if not observed:
            return decided, decided
        would = under(everything_allowed(rules, seen.snapshot), self._previous_shown, False)
        self._previous_shown = would.plan
        return decided, decided.overlaid(would, [job.job_id for job in observed])

    def _act(self, seen: Observation, decided: Decided, rules: ActingRules) -> Acted:
        """Carry the plan out, while nobody else (``slurm-ext release``) writes."""
        lock = FileLock(acting_lock(self.config.journal))
        if not lock.acquire():
            _log.info("somebody else writes to Slurm now; nothing is written in this cycle")
            self.metrics.refusals.labels("another writer").inc()
            return Acted()
        try:
            if rules.acts and is_released(self.config.journal):
                return Acted()  # released since this cycle began; the next one knows
            ledger = self.memory.ledger
            return self._actor.act(seen, decided, ledger, rules, self._cycle, self._store)
        finally:
            lock.release()

    def _forget(self, seen: Observation) -> None:
        """Drop documents and directives of jobs that the ledger has forgotten."""
        present = frozenset(job.base_id for job in seen.snapshot.jobs)
        remembered = present | self.memory.ledger.base_ids
        gone = (self._teller.known | self._observer.remembered) - remembered
        if gone:
            self._teller.forget(gone)
            self._observer.forget(gone)
            self.memory.forget_directives(gone)
        # A number that a job without a directive has now: what is told about the earlier job ends.
        foreign = frozenset(
            job.base_id
            for job in seen.snapshot.jobs
            if job.job_id not in seen.directives and job.job_id not in seen.broken
        )
        if stale := foreign & self._teller.known & self._observer.remembered:
            self._teller.forget(stale)
        if self._cycle % _COUNT_ROWS_EVERY == 1:
            self.metrics.journal_rows.set(self.memory.rows())


def _without_silence(plan: Plan | None, now: float) -> Plan | None:
    """The last plan before cycles were skipped, as if no time had passed since: that a start did
    not come about while Slurm did not answer says nothing against the start."""
    if plan is None:
        return None
    decisions = {
        key: decision
        if decision.wanted_since_s is None
        else replace(decision, wanted_since_s=decision.wanted_since_s + now - plan.made_s)
        for key, decision in plan.decisions.items()
    }
    return replace(plan, decisions=decisions)


def _expected(shown: Decided) -> dict[str, float]:
    """Run times that the table expects, for jobs that may start before the next cycle."""
    return {
        decision.job_id: decision.remaining_s.value
        for decision in shown.plan.decisions.values()
        if decision.remaining_s is not None and decision.remaining_s.source is not Source.DECLARED
    }

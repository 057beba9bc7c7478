"""Carries out moves, one at a time, and passes operators' requests on: the daemon as pauser.

A move is written into the journal before the job is asked, and its outcome when it is known; what
is remembered only here (which job was asked last) costs a restarted daemon nothing but one question
more, since requeues are in the ledger. Requests travel as anybody's do: a file, munge, the job's
own helper, whose pause either commits on all ranks or leaves the job as it was.

The choice a reader would question: after the job has left, nothing keeps its place or that of the
waiting one. Both are in the queue, and the plan of the next cycle, which made the move worth while,
seats them; a lease or pin of its own would be one more thing to take back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurm_ext.control.asks import AskDesk, Munge
from slurm_ext.control.decide import Decided
from slurm_ext.control.ledger import Ledger
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.moves import Move, find_move
from slurm_ext.control.observe import Observation
from slurm_ext.control.rules import MOVE, ActingRules
from slurm_ext.control.spool import SpoolThread
from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.journal import JournalRow
from slurm_ext.domain.pausing import ENDED_SAVED, PauseAsk
from slurm_ext.slurm.backend import Backend

_log = logging.getLogger(__name__)

# How long a rank may take to come to the end of a step.
WAIT_S = 60.0
# The job's helper looks for requests every two seconds.
_FIRST_S = 30.0
# Beyond the time until the first rank is at a safe point: acknowledging and saving.
_BEYOND_S = 600.0
# What became of a move is told for so long.
_TOLD_S = 3600.0

Store = Callable[[Sequence[JournalRow]], None]


@dataclass(slots=True)
class _UnderWay:
    """A move that was asked for and has not ended."""

    move: Move
    ask: PauseAsk
    uid: int
    at_s: float
    heard: bool = False


class Mover:
    """Requests of one daemon. ``store`` of each call writes rows to the journal."""

    def __init__(self, munge: Munge, backend: Backend, metrics: Metrics) -> None:
        self._desk = AskDesk(munge, backend.operators)
        self._metrics = metrics
        self._under_way: _UnderWay | None = None
        self._rested: dict[str, float] = {}
        self._told: dict[str, tuple[float, str]] = {}
        self._refusals: Mapping[str, str] = {}
        self._complained = ""

    def run(
        self,
        seen: Observation,
        decided: Decided,
        ledger: Ledger,
        rules: ActingRules,
        spool: SpoolThread,
        store: Store,
        cycle: int,
    ) -> dict[str, tuple[str, ...]]:
        """One cycle's part; what is to be told about jobs, by job id.

        ``rules`` allow no moves where the daemon does not act. A spool, munge or accounting that
        does not answer is logged once and tried again in the next cycle.
        """
        try:
            self._pass_on(seen, spool, store, cycle)
            self._follow(seen, spool, store, cycle)
            self._begin(seen, decided, ledger, rules, spool, store, cycle)
            self._complained = ""
        except SourceMissingError as exc:
            if str(exc) != self._complained:
                _log.warning("pause: %s", exc)
            self._complained = str(exc)
        return self._notes(seen.now)

    # -- operators' requests ---------------------------------------------------------------------

    def _pass_on(self, seen: Observation, spool: SpoolThread, store: Store, cycle: int) -> None:
        running = {job.job_id for job in seen.snapshot.running()}
        for passed in self._desk.pass_on(spool, running, seen.now):
            ask = passed.ask
            words = f"{ask.verb} asked by {passed.user}, an operator"
            outcome = f"refused: {passed.refusal}" if passed.refusal else "passed on"
            data = {"job": ask.job_id, "action": ask.verb, "reason": words, "outcome": outcome}
            _log.info("request", extra={"data": data})
            store([JournalRow(seen.now, cycle, ask.job_id, "request", words, outcome=outcome)])

    # -- moves -----------------------------------------------------------------------------------

    def _follow(self, seen: Observation, spool: SpoolThread, store: Store, cycle: int) -> None:
        """See what has become of the move under way."""
        found = self._under_way
        if found is None:
            return
        answer = self._desk.answer(spool, found.uid, found.ask)
        job = seen.snapshot.job(found.move.job_id)
        passed_s = seen.now - found.at_s
        found.heard |= answer is not None
        if answer is not None and answer.end:
            outcome = "ok" if answer.end == ENDED_SAVED else f"{answer.end}: {answer.reason}"
        elif job is None or not job.running:
            # Gone without a last word: saved and requeued, or ended by itself.
            outcome = "ok" if job is not None else "the job ended"
        elif answer is None and not found.heard and passed_s > _FIRST_S:
            outcome = "nobody answered"
        elif passed_s > WAIT_S + _BEYOND_S:
            outcome = "no end in time"
        else:
            return
        self._desk.withdraw(spool, found.ask)
        self._under_way = None
        self._row(found.move, outcome, seen.now, store, cycle)
        said = f"{found.move.words}: {'done' if outcome == 'ok' else outcome}"
        self._tell(found.move, said, seen.now)

    def _begin(
        self,
        seen: Observation,
        decided: Decided,
        ledger: Ledger,
        rules: ActingRules,
        spool: SpoolThread,
        store: Store,
        cycle: int,
    ) -> None:
        """Ask for the best move, where one is worth it and none is under way."""
        self._rested = {j: until for j, until in self._rested.items() if until > seen.now}
        self._refusals = {}
        if self._under_way is not None or not any(MOVE in acts for acts in rules.acts.values()):
            return
        found = find_move(seen, decided, ledger, rules, self._rested)
        self._refusals = found.refusals
        move = found.move
        job = seen.snapshot.job(move.job_id) if move is not None else None
        if move is None or job is None or job.uid is None:
            return
        self._rested[move.job_id] = seen.now + rules.move.cooldown_s
        self._row(move, "", seen.now, store, cycle)
        by = f"slurm-ext, so that job {move.for_job} can start"
        ask = self._desk.ask_to_leave(spool, move.job_id, by=by, wait_s=WAIT_S, now=seen.now)
        self._under_way = _UnderWay(move, ask, job.uid, seen.now)
        self._tell(move, f"{move.words}: asked", seen.now)

    def _row(self, move: Move, outcome: str, now: float, store: Store, cycle: int) -> None:
        data = {"job": move.job_id, "action": "move", "reason": move.words, "outcome": outcome}
        level = logging.INFO if outcome in ("", "ok") else logging.WARNING
        _log.log(level, "move", extra={"data": data})
        word = outcome.partition(":")[0].replace(" ", "_") or "asked"
        self._metrics.moves.labels(word).inc()
        store([JournalRow(now, cycle, move.job_id, "move", move.words, outcome=outcome)])

    # -- telling ---------------------------------------------------------------------------------

    def _tell(self, move: Move, words: str, now: float) -> None:
        for job_id in (move.job_id, move.for_job):
            self._told[job_id] = (now, words)

    def _notes(self, now: float) -> dict[str, tuple[str, ...]]:
        self._told = {j: t for j, t in self._told.items() if now - t[0] < _TOLD_S}
        notes: dict[str, tuple[str, ...]] = {
            job_id: (why,) for job_id, why in self._refusals.items()
        }
        for job_id, (_, words) in self._told.items():
            notes[job_id] = (words, *notes.get(job_id, ()))
        return notes

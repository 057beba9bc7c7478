"""Takes back everything of ours at once: leases, shapes, limits, pins, places.

What is written is `slurm_ext.control.undo`'s business; this is the part with I/O: is the daemon
really gone, what is ours, wave after wave until nothing is left. It needs neither the daemon nor
its memory: a lost ledger is rebuilt from the spool, and what even the spool does not know expires
by itself (leases) or is seen on the jobs (places, sizes).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slurm_ext.control.config import Config
from slurm_ext.control.files import is_there
from slurm_ext.control.heartbeat import is_stale
from slurm_ext.control.journal import Journal, open_journal
from slurm_ext.control.ledger import Ledger, holds_something
from slurm_ext.control.locks import FileLock, acting_lock, daemon_lives
from slurm_ext.control.reconcile import Reconciled
from slurm_ext.control.recover import recover
from slurm_ext.control.released import set_released
from slurm_ext.control.resume import REVOKED_S, revoking
from slurm_ext.control.rules import ActingRules, rules_from
from slurm_ext.control.spool import Spool, SpoolThread
from slurm_ext.control.undo import release_actions
from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.directive import Directive, extract_from_admin_comment
from slurm_ext.domain.errors import DataError, ProtocolError, SourceMissingError
from slurm_ext.domain.journal import JournalRow
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.backend import Backend

_log = logging.getLogger(__name__)

# Lease, restore, lift, factors, and again for what was refused half-way; with a write limit per
# wave a long queue needs more of them.
MAX_WAVES = 50
# Every job at once, however small the daemon's own limit per cycle is.
_ALL = 1_000_000


class Outcome(StrEnum):
    """How a release ended."""

    ALIVE = "the daemon is alive: nothing was done"
    NOTHING = "nothing of ours is out"
    DONE = "everything of ours was taken back"
    LEFT = "something is left"


@dataclass(frozen=True, slots=True)
class Released:
    """What was done. ``left`` are the writes that Slurm did not carry out."""

    outcome: Outcome
    writes: Mapping[str, int] = field(default_factory=dict)
    left: Sequence[Action] = ()
    marked: bool = False


def release(
    backend: Backend,
    config: Config,
    clock: Callable[[], float],
    *,
    if_stale: bool = False,
    who: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> Released:
    """Give every job back. Raises SourceMissingError where Slurm cannot be seen.

    A job that came back a moment ago is waited for (``sleep``), as it must not start yet.

    ``if_stale`` does nothing while the daemon's heartbeat is fresh. Without it, a daemon that
    lives is told to observe from now on, else it would act again in its next cycle.
    """
    if if_stale and not is_stale(config.heartbeat, clock()):
        return Released(Outcome.ALIVE)
    marked = not if_stale and _daemon_lives(config) and _mark(config, clock(), who)
    journal, ledger, rebuild = _open(config, clock())
    try:
        if if_stale and not rebuild and not any(holds_something(e) for e in ledger.values()):
            return Released(Outcome.NOTHING, marked=marked)
        lock = FileLock(acting_lock(config.journal))
        if journal is not None:
            _wait_for_others(lock, 2 * config.command_timeout_s)
        try:
            found = _give_back(backend, config, clock, journal, ledger, sleep, rebuild=rebuild)
        finally:
            lock.release()
    finally:
        if journal is not None:
            journal.close()
    return replace(found, marked=marked)


def _wait_for_others(lock: FileLock, limit_s: float) -> None:
    """Neither a daemon that hangs while it acts nor wrong rights are a reason to keep jobs."""
    try:
        if not lock.acquire(limit_s):
            _log.warning("somebody else writes to Slurm and does not end; releasing beside it")
    except DataError as exc:
        _log.error("released without a lock: %s", exc)


def _mark(config: Config, now: float, who: str) -> bool:
    """Tell the daemon that lives; false where that cannot be written, as on a full disk."""
    try:
        set_released(config.journal, f"released at {now:.0f} by {who or 'slurm-ext release'}")
    except DataError as exc:
        _log.error(
            "%s; the daemon that runs is not told, and will plan these jobs again: stop it", exc
        )
        return False
    return True


def _daemon_lives(config: Config) -> bool:
    try:
        return daemon_lives(config.journal)
    except DataError as exc:
        _log.warning("whether a daemon runs is not known: %s", exc)
        return False


def _open(config: Config, now: float) -> tuple[Journal | None, Ledger, bool]:
    """Journal and ledger, and whether the ledger has to be rebuilt.

    A journal that cannot even be opened (a full disk, wrong rights) is no reason to keep jobs.
    """
    try:
        existed = is_there(config.journal)
        journal, told = open_journal(config.journal, config.journal_max_rows, now)
    except DataError as exc:
        _log.error("released without a journal: %s", exc)
        return None, Ledger(), True
    if told and existed:
        _log.error("journal: %s", told)
    return journal, Ledger(journal.ledger()), bool(told)


def _give_back(
    backend: Backend,
    config: Config,
    clock: Callable[[], float],
    journal: Journal | None,
    ledger: Ledger,
    sleep: Callable[[float], None],
    *,
    rebuild: bool,
) -> Released:
    snapshot = backend.snapshot()
    directives = _directives(backend, snapshot)
    ours = [job for job in snapshot.jobs if job.job_id in directives]
    if rebuild:
        _rebuild(config, ledger, snapshot, directives)
    ledger.forget_given_away(snapshot.jobs)
    ledger.meet(ours, clock())
    rules = replace(rules_from(config), acts={}, max_writes_per_cycle=_ALL)
    counts: Counter[str] = Counter()
    attempted: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
    left: list[Action] = []
    waited = False
    for _ in range(MAX_WAVES):
        found = _wave(snapshot, ledger, directives, rules, clock())
        left = [a for a in found.actions if attempted[a.job_id, a.fields] > 1]
        actions = [a for a in found.actions if attempted[a.job_id, a.fields] <= 1]
        _note(journal, ledger, ())
        if not actions:
            if waited or not _came_back(snapshot, found, clock()):
                break
            # Nobody comes after us who would let it go.
            waited = True
            sleep(REVOKED_S)
        attempted.update((a.job_id, a.fields) for a in actions)
        results = backend.apply(actions) if actions else ()
        _note(journal, ledger, [_row(result, clock()) for result in results])
        counts.update(result.action.kind.value for result in results if result.ok)
        snapshot = replace(snapshot, jobs=backend.jobs(), taken_s=clock())
    if left:
        return Released(Outcome.LEFT, dict(counts), tuple(left))
    return Released(Outcome.DONE if counts else Outcome.NOTHING, dict(counts))


def _row(result: ActionResult, now: float) -> JournalRow:
    action = result.action
    return JournalRow(
        at_s=now,
        cycle=0,
        job_id=action.job_id,
        event=f"release:{action.kind.value}",
        reason=action.reason,
        fields=" ".join(f"{key}={value}" for key, value in action.fields),
        outcome="ok" if result.ok else f"refused: {result.message}",
    )


def _note(journal: Journal | None, ledger: Ledger, rows: Sequence[JournalRow]) -> None:
    """Write down what is done, where that is possible: giving back does not wait for it."""
    if journal is None:
        return
    try:
        journal.store(*ledger.staged(), rows)
    except DataError as exc:
        _log.error("released without writing it down: %s", exc)
    else:
        ledger.settle()


def _wave(
    snapshot: Snapshot,
    ledger: Ledger,
    directives: Mapping[str, Directive],
    rules: ActingRules,
    now: float,
) -> Reconciled:
    """The next writes that give jobs back; the ledger takes over what they change."""
    found = release_actions(snapshot, ledger, directives, rules, now)
    for entry in found.entries.values():
        ledger.put(entry)
    return found


def _came_back(snapshot: Snapshot, found: Reconciled, now: float) -> bool:
    """Whether a job is kept only because it came back a moment ago."""
    refused = {refusal.job_id for refusal in found.refusals}
    return any(job.job_id in refused and revoking(job, now) for job in snapshot.pending())


def _directives(backend: Backend, snapshot: Snapshot) -> dict[str, Directive]:
    """Directives of the jobs in the queue, to know ours even when the ledger is lost."""
    texts = backend.admin_comments([job.job_id for job in snapshot.pending()])
    found: dict[str, Directive] = {}
    for job_id, text in texts.items():
        try:
            directive = extract_from_admin_comment(text)
        except ProtocolError as exc:
            _log.warning("job %s: its directive is unusable: %s", job_id, exc)
            continue
        if directive is not None:
            found[job_id] = directive
    return found


def _rebuild(
    config: Config, ledger: Ledger, snapshot: Snapshot, directives: Mapping[str, Directive]
) -> None:
    spool = SpoolThread(Spool(config.spool), config.command_timeout_s)
    try:
        plans = spool.call(lambda s: s.read_plans())
    except SourceMissingError as exc:
        _log.warning("the ledger cannot be rebuilt from the spool: %s", exc)
        return
    recover(ledger, plans, [job for job in snapshot.jobs if job.job_id in directives])

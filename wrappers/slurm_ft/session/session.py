"""The session: what a training loop sees of the product.

Everything that ranks do together, they do in `Session.step`, at a step that all of them agreed on,
with no exchange of the program's under way. What happens between two steps (a signal, the time for
a checkpoint, a request from outside) only leaves a wish. Every call belongs to the thread that
trains, but for `want` and `ask_to_leave`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft import exits, status
from slurm_ft.checkpoint.commit import Saved
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session import comms
from slurm_ft.session import departure as departing
from slurm_ft.session.abandon import abandon
from slurm_ft.session.agreement import Agreed, Agreement, Kind
from slurm_ft.session.departure import Word
from slurm_ft.session.errors import SessionError
from slurm_ft.session.guard import Guard, Leaving, asked_again, stuck_limit_s
from slurm_ft.session.history import earlier_attempts, mtbf_s
from slurm_ft.session.lost import lost_peer
from slurm_ft.session.opening import (
    PlanDiffersError,
    check_alone,
    check_program,
    claim_directory,
    compare,
    open_store,
)
from slurm_ft.session.pace import Pace
from slurm_ft.session.record import Record
from slurm_ft.session.reporter import Reporter, rounded
from slurm_ft.session.saving import MODES, Saving, Store
from slurm_ft.session.settings import Settings, read_settings
from slurm_ft.session.signals import SignalWatch
from slurm_ft.session.wishes import Wishes
from slurm_ft.variables import SIGNALS

if TYPE_CHECKING:
    from slurm_ft.pause.participant import Participant

# The last report must not hold up a rank that leaves.
_LAST_REPORT_S = 2.0
# Key of the samples in a checkpoint's own part.
_SAMPLES = "slurm_ft.samples"

T = TypeVar("T")

_log = logging.getLogger(__name__)


def session(
    state: Mapping[str, Any] | None = None,
    *,
    total_steps: int | None = None,
    total_samples: int | None = None,
    save: Callable[[Path, int], object] | None = None,
    restore: Callable[[Path, int], object] | None = None,
    checkpoint: str = "async",
    keep: int = 2,
    group: Any = None,
) -> Session:
    """A session to be opened by ``with``; every rank opens it, after init_process_group.

    ``state`` maps names to objects with ``state_dict`` and ``load_state_dict``, or to nested
    dictionaries of tensors and plain values. ``save`` and ``restore`` are functions of the program
    instead: each is called on every rank with a directory and a step; then torch need not exist.
    ``checkpoint`` is "async", "sync" or "none"; ``keep`` complete checkpoints stay. ``group`` is
    the torch process group of the ranks that take part, all by default.
    """
    return Session(
        state,
        total_steps=total_steps,
        total_samples=total_samples,
        save=save,
        restore=restore,
        checkpoint=checkpoint,
        keep=keep,
        group=group,
    )


class Session:
    """See `session`. Attributes that a program may read are properties."""

    def __init__(
        self,
        state: Mapping[str, Any] | None,
        *,
        total_steps: int | None,
        total_samples: int | None,
        save: Callable[[Path, int], object] | None,
        restore: Callable[[Path, int], object] | None,
        checkpoint: str,
        keep: int,
        group: Any,
    ) -> None:
        if checkpoint not in MODES:
            raise SessionError(f"checkpoint={checkpoint!r}: give one of {', '.join(MODES)}")
        if keep < 1:
            raise SessionError(f"keep={keep}: at least one complete checkpoint must stay")
        self._state, self._save, self._restore = state, save, restore
        self._mode, self._keep, self._group = checkpoint, keep, group
        self._total_steps, self._total_samples = total_steps, total_samples
        # What is done when all ranks agree on a kind that the session itself knows nothing of.
        self.on_agreed: dict[Kind, Callable[[int], None]] = {}
        self._position: dict[str, Any] = {}
        self._leaving: Leaving | None = None
        self._lock = threading.Lock()
        self._noted: int | None = None
        self._code: int | None = None

    # --- what a program may read --------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this process in the session, from 0."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    @property
    def attempt(self) -> int:
        """0 in the job's first start, then counted up."""
        return self._settings.attempt

    @property
    def position(self) -> Mapping[str, Any]:
        """Place in the data: as restored, then as last given to `step`."""
        return self._position

    @property
    def stopping(self) -> bool:
        """Whether leaving was asked for on this rank: a long evaluation may want to stop early."""
        return self._leaving is not None or self._noted is not None

    @property
    def last_saved_step(self) -> int | None:
        """Step of the last complete checkpoint, ``None`` where there is none yet."""
        return self._saving.saved_step

    @property
    def comm(self) -> Comm:
        """All ranks of the session, for exchanges at agreed steps."""
        return self._comm

    @property
    def settings(self) -> Settings:
        """What the session has read from its environment."""
        return self._settings

    # --- from beginning to end ----------------------------------------------------------------

    def __enter__(self) -> Self:
        self._settings = read_settings(os.environ)
        self._limit_s = self._settings.collective_timeout_s
        self._comm: Comm = comms.choose(self._limit_s, self._group)
        self._record = Record(
            self._settings,
            self._comm,
            total_steps=self._total_steps,
            total_samples=self._total_samples,
        )
        try:
            store = self._checked_store()
        except ExchangeLostError:
            raise
        except SlurmExtError as exc:
            self._refuse(exc)
        self._saving = self._record.saving = Saving(store, self._mode)
        self._agreement = Agreement(self._comm)
        self._wishes = Wishes(
            self._agreement, self._settings.bounds, mtbf_s(self._settings), time.monotonic()
        )
        self._watch = SignalWatch(self._settings.signals, self._note_signal)
        self._guard = Guard(self._watch, self._heard, self._give_up, lambda: self._leaving)
        if signal.SIGUSR1 in self._settings.signals and not self._settings.under_ft_run:
            _log.warning("%s has USR1, which some releases of NCCL catch: use USR2", SIGNALS)
        self._reporter = Reporter(
            self._settings.progress,
            self._settings.progress_interval_s,
            self._record.progress,
            self._record.write_status,
        )
        self._record.write_status()
        self._watch.install()
        self._guard.start()
        if self.rank == 0:
            self._reporter.start()
        self._pace = self._record.pace = Pace(time.monotonic())
        self._stall_seen_s = 0.0
        self._pausing = self._become_pausable()
        self._alive("the program's preparations")
        return self

    def _checked_store(self) -> Store | None:
        """Find out now what would make the first save fail."""
        comm, settings = self._comm, self._settings
        check_alone(comm, os.environ)
        compare(comm, settings)
        keeps = self._state is not None or self._save is not None
        if keeps:
            check_program(comm, settings, self._state, writes=self._mode != "none")
            if self._mode != "none":
                claim_directory(comm, settings)
        return open_store(
            comm,
            settings,
            state=self._state,
            save=self._save,
            restore=self._restore,
            group=self._group,
            keep=self._keep,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._code is not None:
            # Left in order. Handlers and guard stay: another signal must not end the process
            # with another code, and its last moments are watched like all others.
            return
        if exc is None:
            self._finish()
        else:
            self._failing(exc)
        self._stop_reporter()
        if self._pausing is not None:
            self._pausing.stop()
        self._record.write_status()
        self._watch.restore()
        self._guard.stop()
        self._watch.close()

    def restore(self) -> int:
        """Load the newest complete checkpoint; the step it was made at, 0 where there is none.

        Sets the random states and `position` as well. A collective call.
        """
        self._alive("restore", longest=True)
        loaded = self._exchanged(self._saving.load)
        step = 0 if loaded is None else loaded.step
        self._record.began_at(step)
        # A task of a chain may well begin although another one has saved.
        if loaded is None and self.rank == 0 and not self._record.of_many:
            self._miss_checkpoint()
        if loaded is not None:
            self._position = dict(loaded.position)
            samples = loaded.extra.get(_SAMPLES, 0)
            self._record.samples = samples if isinstance(samples, int) else 0
            if loaded.world_size != self.size and self.rank == 0:
                _log.warning(
                    "step %d was saved by %d ranks and goes on with %d: the position in the data"
                    " is kept, random states are those of the ranks that both have",
                    loaded.step,
                    loaded.world_size,
                    self.size,
                )
        self._record.write_status()
        self._pace = self._record.pace = Pace(time.monotonic())
        self._alive("the first step")
        return step

    def _miss_checkpoint(self) -> None:
        """Nothing was found: worth a word where an earlier attempt has saved something."""
        saved = [a for a in earlier_attempts(self._settings) if a.saved_step is not None]
        if self._saving.possible and saved and saved[-1].number < self._settings.attempt:
            _log.warning(
                "%s holds no checkpoint, though attempt %d saved step %d: this one begins at step"
                " 0; was the directory removed, or its file system not mounted?",
                self._settings.checkpoint_dir,
                saved[-1].number,
                saved[-1].saved_step,
            )

    def step(
        self,
        step: int,
        *,
        samples: int = 0,
        position: Mapping[str, Any] | None = None,
        compute_s: float | None = None,
    ) -> None:
        """A step has ended: a safe point. Every rank calls it after each step.

        ``samples`` is what all ranks together consumed in it, ``position`` the place in the data
        to go on from, ``compute_s`` how long this rank computed before it waited for others. May
        save; may not return (SystemExit with `exits.REQUEUE`, after a save).
        """
        if self._code is not None:
            raise SystemExit(self._code)
        now_s = time.monotonic()
        self._record.step = step
        self._record.samples += samples
        if position is not None:
            self._position = dict(position)
        self._pace.stood_still(self._saving.stall_s - self._stall_seen_s)
        self._stall_seen_s = self._saving.stall_s
        self._pace.step(now_s, samples, compute_s)
        if self._record.first_step_s is None:
            self._record.first_step_s = time.time()
            self._reporter.ready()
        if self._noted is not None and self._leaving is None:
            # Where another library has taken the wake-up descriptor, this is how it is heard.
            self._heard(self._noted, now_s)
        if self._comm.rank == 0:
            self._wishes.ask(now_s, step, self._saving, self._pace)
        self._alive("a safe point")
        self._exchanged(self._together)
        self._alive("a step")

    def save(self, step: int | None = None) -> Saved:
        """A durable checkpoint now; every rank calls it at the same step.

        Raises CheckpointError on all ranks where it failed: older checkpoints are intact.
        """
        if not self._saving.possible:
            raise SessionError(
                "nothing to save: give the session state= or save=, and checkpoint= other than none"
            )
        step = self._record.step if step is None else step
        if step is None:
            raise SessionError("save() before the first step needs the step: save(0)")
        at = step
        self._alive("a save", longest=True)
        try:
            return self._exchanged(lambda: self._save_now(at))
        finally:
            self._after_save()
            self._alive("a step")

    # --- for other parts of the product -------------------------------------------------------

    def settle(self) -> None:
        """Finish the save under way, if there is one. Every rank calls it at the same step."""
        if self._saving.under_way:
            self._alive("the save under way", longest=True)
            self._exchanged(lambda: self._agreement.drain_done(self._limit_s))
            self._exchanged(lambda: self._saved(self._saving.finish))
            self._alive("a step")

    def next_task(
        self,
        directory: Path,
        *,
        state: Mapping[str, Any],
        step: int = 0,
        position: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        steps_before: int = 0,
    ) -> None:
        """Go on with another task, whose checkpoints lie in a directory of its own.

        ``step`` is where it stands in its own count, which `restore` overrides. ``total_steps`` and
        ``steps_before`` are of the whole job: of all tasks, and of those before this one. No
        exchange: every rank calls it after the same step, with no save under way (`settle`).
        """
        self._saving.move(directory, state)
        self._record.begin(step, total_steps, steps_before)
        self._position = dict(position or {})

    def meta(self) -> Meta:
        """What a checkpoint of this step says about itself."""
        return self._meta()

    def want(self, kind: Kind, payload: int = 0) -> None:
        """Ask all ranks for something at the next safe points. From any thread."""
        self._agreement.want(kind, payload)

    def ask_to_leave(self, why: str) -> None:
        """Ask all ranks to save and leave, to be requeued. From any thread."""
        with self._lock:
            if self._leaving is None:
                self._leaving = Leaving(time.monotonic(), status.ASKED, why)
        self._agreement.want(Kind.LEAVE)
        self._watch.wake()

    def leave(self, code: int, word: str, note: str) -> NoReturn:
        """Leave at once, without another exchange; the caller knows that all ranks do."""
        self._record.word, self._record.note, self._code = word, status.shorten(note), code
        self._stop_reporter()
        self._record.write_status()
        if self.rank == 0:
            _log.warning("all ranks leave with exit code %d: %s, %s", code, word, note)
        raise SystemExit(code)

    def _become_pausable(self) -> Participant | None:
        """Listen for pauses where a store of this attempt may announce itself."""
        if self._settings.state_dir is None:
            return None
        from slurm_ft.pause.binding import attach

        return attach(self, self._state, longest_step_s=lambda: self._pace.longest_recent_s)

    # --- at a safe point ----------------------------------------------------------------------

    def _together(self) -> None:
        agreed = self._agreement.safe_point(self._limit_s)
        if (
            self._saving.under_way
            and self._agreement.in_round
            and self._agreement.all_done(self._saving.done(), self._limit_s)
        ):
            self._saved(self._saving.finish)
        if agreed.kind is not Kind.NOTHING:
            self._act(agreed)

    def _act(self, agreed: Agreed) -> None:
        hook = self.on_agreed.get(agreed.kind)
        if hook is not None:
            began_s = time.monotonic()
            self._alive(f"what was agreed on ({agreed.kind.name.lower()})", longest=True)
            hook(agreed.payload)
            self._pace.stood_still(time.monotonic() - began_s)
        elif agreed.kind is Kind.LEAVE:
            self._depart()
        elif agreed.kind is Kind.SAVE:
            step = self._record.step
            assert step is not None
            if self._saving.possible and not self._saving.under_way:
                self._alive("a save", longest=True)
                self._saved(lambda: self._saving.begin(step, self._meta()))
        elif agreed.kind is Kind.REPORT:
            mine = self._pace.take_compute_s()
            said = self._comm.gather(mine, self._limit_s)
            if said is not None and None not in said:
                self._record.rank_compute_s = tuple(rounded(seconds) for seconds in said)
        elif agreed.kind is Kind.PAUSE:
            _log.warning("a pause was asked for, and nothing here can pause: going on")

    def _saved(self, save: Callable[[], object]) -> None:
        """A save by the clock: where it fails, the job goes on with its older checkpoints."""
        try:
            save()
        except ExchangeLostError:
            raise
        except SlurmExtError as exc:
            self._record.note = self._record.save_error = status.shorten(str(exc))
            if self.rank == 0:
                _log.error("%s; training goes on, the next save is tried in time", exc)
        self._after_save()

    def _save_now(self, step: int) -> Saved:
        self._agreement.drain_done(self._limit_s)
        if self._saving.under_way:
            self._saved(self._saving.finish)
        return self._made(step)

    def _made(self, step: int) -> Saved:
        """A durable save; where it fails, that is kept for those who ask why the job lost work."""
        try:
            return self._saving.save(step, self._meta())
        except ExchangeLostError:
            raise
        except SlurmExtError as exc:
            self._record.save_error = status.shorten(str(exc))
            raise

    def _after_save(self) -> None:
        self._wishes.saved(self._saving)
        if not self._saving.under_way:
            self._record.write_status()

    def _meta(self) -> Meta:
        return Meta(
            attempt=self._settings.attempt,
            plan=self._settings.plan,
            position=self._position,
            extra={_SAMPLES: self._record.samples},
        )

    # --- leaving ------------------------------------------------------------------------------

    def _depart(self) -> NoReturn:
        """All ranks are at this step and leave: save where there is time, then requeue."""
        self._alive("the save before leaving", longest=True)
        self._agreement.drain(self._limit_s)
        leaving, step = self._leaving, self._record.step
        assert step is not None
        left_s = None
        if leaving is not None and leaving.deadline_s is not None:
            left_s = leaving.deadline_s - time.monotonic()
        word = Word(
            step=step,
            why=None if leaving is None else leaving.why,
            what="" if leaving is None else leaving.what,
            left_s=left_s,
            again=leaving is not None and leaving.again_s is not None,
        )
        saving = self._saving
        departure = departing.agree(
            self._comm, word, saving.save_s, under_way=saving.under_way, limit_s=self._limit_s
        )
        note = departure.note
        try:
            if departure.finish:
                saving.finish(left_s)
            if departure.save and saving.possible and saving.saved_step != step:
                self._made(step)
        except ExchangeLostError:
            raise
        except SlurmExtError as exc:
            self._record.save_error = status.shorten(str(exc))
            note = f"{note}: not saved, because {exc}"
        # Nobody's end may take the others' exchange, or the whole step of srun, down with it.
        self._comm.barrier(self._limit_s)
        saving.close()
        self._comm.close()
        self.leave(exits.REQUEUE, departure.why, note)

    def _note_signal(self, number: int) -> None:
        """In the signal handler: a flag and nothing else."""
        if self._leaving is None:
            self._noted = number

    def _heard(self, number: int, now_s: float) -> None:
        """A signal of ours came, in the guard's thread or at a safe point."""
        with self._lock:
            self._noted = None
            present = self._leaving
            name = signal.Signals(number).name
            if present is None or present.why != status.SIGNALLED:
                self._record.heard = name
                self._leaving = Leaving(now_s, status.SIGNALLED, name, self._settings.grace_s)
            elif asked_again(present, now_s):
                self._leaving = replace(present, again_s=now_s)
            else:
                return
        self._agreement.want(Kind.LEAVE)

    def _give_up(self, word: str, note: str) -> None:
        """In the guard's thread: the thread that trains comes to no safe point in time."""
        self._abandon(word, note)

    def _abandon(self, word: str, note: str) -> NoReturn:
        if self._code is None:
            self._record.word, self._record.note = word, status.shorten(note)
        # A rank that left in order and hangs on its way out keeps its word and its code.
        code = exits.ABANDONED if self._code is None else self._code
        abandon(code, f"rank {self.rank}: {word}: {note}", self._record.write_status)

    def _exchanged(self, call: Callable[[], T]) -> T:
        """Run what ranks do together; a lost peer ends this rank, for the job to come back."""
        try:
            return call()
        except ExchangeLostError as exc:
            if self._settings.under_ft_run:
                self._abandon(status.LOST_PEER, str(exc))
            raise

    def _refuse(self, exc: SlurmExtError) -> NoReturn:
        """The session cannot be opened. Under ft-run one line a rank, and no traceback each."""
        told = status.shorten(str(exc))
        code = exits.ABANDONED
        if isinstance(exc, PlanDiffersError):
            self._record.word, self._record.note = status.PLAN_DIFFERS, told
        else:
            # Another start would end the same way.
            self._record.failed, code = told, exits.REFUSED
        if not self._settings.under_ft_run:
            raise exc
        self._record.write_status()
        sys.stderr.write(f"slurm_ft: {exc}\n")
        raise SystemExit(code) from exc

    def _finish(self) -> None:
        """The loop ended: what is under way is ended with it."""
        self._alive("the session's end", longest=True)

        def end() -> None:
            agreed = self._agreement.drain(self._limit_s)
            if self._saving.under_way:
                self._saved(self._saving.finish)
            if agreed.kind is Kind.LEAVE and self.rank == 0:
                _log.warning("the program ended before it could leave")

        self._exchanged(end)
        self._record.done = True
        self._saving.close()
        self._comm.close()

    def _failing(self, exc: BaseException) -> None:
        """The loop ended by an exception: nothing that needs a peer is done any more."""
        if isinstance(exc, SystemExit) and exc.code in (None, 0):
            self._record.done = True
            return
        words = status.shorten(f"{type(exc).__name__}: {exc}")
        if self.size > 1 and self._settings.under_ft_run and lost_peer(exc):
            traceback.print_exception(exc)
            self._abandon(status.LOST_PEER, words)
        self._record.failed = words

    # --- what others are told -----------------------------------------------------------------

    def _alive(self, where: str, *, longest: bool = False) -> None:
        typical_s = self._saving.save_s if longest else self._pace.median_step_s
        at = f"{where} after step {self._record.step}" if self._record.step is not None else where
        self._guard.alive(at, stuck_limit_s(typical_s, self._limit_s))

    def _stop_reporter(self) -> None:
        if self.rank == 0:
            self._reporter.stop(_LAST_REPORT_S)

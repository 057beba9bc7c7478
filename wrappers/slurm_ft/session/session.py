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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.progress import Hold
from slurm_ft.checkpoint.commit import Saved
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session import comms
from slurm_ft.session.agreement import Agreement, Kind
from slurm_ft.session.ending import Ending, refuse
from slurm_ft.session.errors import SessionError
from slurm_ft.session.guard import Guard, stuck_limit_s
from slurm_ft.session.history import earlier_attempts, mtbf_s
from slurm_ft.session.opening import (
    check_alone,
    check_program,
    claim_directory,
    compare,
    open_store,
)
from slurm_ft.session.pace import Pace
from slurm_ft.session.record import Record
from slurm_ft.session.reporter import Reporter
from slurm_ft.session.saving import MODES, Saving, Store
from slurm_ft.session.settings import Settings, read_settings
from slurm_ft.session.signals import SignalWatch
from slurm_ft.session.together import Together
from slurm_ft.session.wishes import Wishes
from slurm_ft.variables import SIGNALS

if TYPE_CHECKING:
    from slurm_ft.pause.participant import Participant

# Key of the samples in a checkpoint's own part.
_SAMPLES = "slurm_ft.samples"

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
        return self._ending.asked

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
        self._pid = os.getpid()
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
            refuse(self._settings, self._record, exc)
        self._saving = self._record.saving = Saving(store, self._mode)
        self._agreement = Agreement(comms.for_agreement(self._comm, self._limit_s))
        self._wishes = Wishes(
            self._agreement, self._settings.bounds, mtbf_s(self._settings), time.monotonic()
        )
        self._reporter = Reporter(
            self._settings.progress,
            self._settings.progress_interval_s,
            self._record.progress,
            self._record.write_status,
        )
        self._ending = ending = Ending(
            self._settings,
            self._comm,
            self._record,
            agreement=self._agreement,
            saving=self._saving,
            reporter=self._reporter,
        )
        self._watch = SignalWatch(self._settings.signals, ending.note)
        self._guard = Guard(self._watch, ending.heard, ending.give_up, lambda: ending.leaving)
        self._together = Together(
            self._comm,
            self._limit_s,
            record=self._record,
            saving=self._saving,
            agreement=self._agreement,
            wishes=self._wishes,
            ending=ending,
            guard=self._guard,
            meta=self.meta,
            on_agreed=self.on_agreed,
        )
        if signal.SIGUSR1 in self._settings.signals and not self._settings.under_ft_run:
            _log.warning("%s has USR1, which some releases of NCCL catch: use USR2", SIGNALS)
        self._record.write_status()
        self._watch.install()
        self._guard.start()
        if self.rank == 0:
            self._reporter.start()
        self._record.pace = Pace(time.monotonic())
        self._stall_seen_s = 0.0
        self._pausing = self._become_pausable()
        self._together.alive("the program's preparations")
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
        if os.getpid() != self._pid:
            # A forked child runs out of the block: whatever is to be ended here is its parent's.
            return
        if self._ending.code is not None:
            # Left in order. Handlers and guard stay: another signal must not end the process
            # with another code, and its last moments are watched like all others.
            return
        if exc is None:
            self._together.finish()
        else:
            self._ending.failed(exc)
        self._ending.stop_reporter()
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
        self._check_process()
        self._together.alive("restore", longest=True)
        loaded = self._ending.exchanged(self._saving.load)
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
        self._record.pace = Pace(time.monotonic())
        self._together.alive("the first step")
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
        ending, record = self._ending, self._record
        self._check_process()
        if ending.code is not None:
            raise SystemExit(ending.code)
        now_s = time.monotonic()
        record.step = step
        record.samples += samples
        if position is not None:
            self._position = dict(position)
        stall_s = self._saving.stall_s
        if stall_s != self._stall_seen_s:
            self._together.pace.stood_still(stall_s - self._stall_seen_s)
            self._stall_seen_s = stall_s
        self._together.pace.step(now_s, samples, compute_s)
        if record.first_step_s is None:
            record.first_step_s = time.time()
            self._reporter.ready()
        ending.look(now_s)
        if self._comm.rank == 0:
            self._wishes.ask(now_s, step, self._saving, self._together.pace)
        limit_s = stuck_limit_s(self._together.pace.median_step_s, self._limit_s)
        self._guard.alive("a safe point", limit_s, step)
        try:
            self._together.safe_point()
        except ExchangeLostError as exc:
            ending.lost(exc)
            raise
        self._guard.alive("a step", limit_s, step)

    def save(self, step: int | None = None) -> Saved:
        """A durable checkpoint now; every rank calls it at the same step.

        Raises CheckpointError on all ranks where it failed: older checkpoints are intact.
        """
        if not self._saving.possible:
            raise SessionError(
                "nothing to save: give the session state= or save=, and checkpoint= other than none"
            )
        self._check_process()
        step = self._record.step if step is None else step
        if step is None:
            raise SessionError("save() before the first step needs the step: save(0)")
        return self._together.save(step)

    # --- for other parts of the product -------------------------------------------------------

    def settle(self) -> None:
        """Finish the save under way, if there is one. Every rank calls it at the same step."""
        self._together.settle()

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
        return Meta(
            attempt=self._settings.attempt,
            plan=self._settings.plan,
            position=self._position,
            extra={_SAMPLES: self._record.samples},
        )

    def want(self, kind: Kind, payload: int = 0) -> None:
        """Ask all ranks for something at the next safe points. From any thread."""
        self._agreement.want(kind, payload)

    def ask_to_leave(self, why: str) -> None:
        """Ask all ranks to save and leave, to be requeued. From any thread."""
        self._ending.ask(why)
        self._watch.wake()

    def held(self, hold: Hold | None) -> None:
        """All ranks are paused, or (``None``) go on. From the thread that trains."""
        self._record.held(hold)
        self._reporter.soon()

    def leave(self, code: int, word: str, note: str) -> NoReturn:
        """Leave at once, without another exchange; the caller knows that all ranks do."""
        self._ending.leave(code, word, note)

    def _become_pausable(self) -> Participant | None:
        """Listen for pauses where a store of this attempt may announce itself."""
        if self._settings.state_dir is None:
            return None
        from slurm_ft.pause.binding import attach

        return attach(
            self, self._state, longest_step_s=lambda: self._together.pace.longest_recent_s
        )

    def _check_process(self) -> None:
        """A child shares its parent's connections: one word of it there would ruin the exchange."""
        if os.getpid() != self._pid:
            raise SessionError(
                f"process {os.getpid()} was forked by rank {self.rank}: the session belongs to the"
                " process that opened it; end a forked child with os._exit, or start it by"
                " multiprocessing"
            )

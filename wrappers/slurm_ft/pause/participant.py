"""A rank's part in pauses: hears of them, and goes through one when all ranks have agreed to.

Hearing is a thread's: it asks the store for the newest epoch and is answered when there is one, so
being pausable costs the training loop nothing but the flag that travels with the agreement. Going
through a pause is the training thread's own, at the safe point; it does not return before the
rank may take its next step, and it says when it must not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.comm import ExchangeLostError
from slurm_ft.pause.controller import settled
from slurm_ft.pause.drive import Drive
from slurm_ft.pause.ladder import LostStateError
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.member import Member, Phase, on_member
from slurm_ft.pause.protocol import (
    Agreed,
    Board,
    Effect,
    End,
    Exit,
    Interrupt,
    Key,
    Release,
    Released,
    Request,
    Restore,
    Restored,
    Rung,
    Step,
    abort,
)
from slurm_ft.pause.table import StoreLostError

_log = logging.getLogger(__name__)

# Without news a paused rank looks at the board so often; also how soon it notices an interrupt.
_LOOK_S = 1.0
# How long one question for a new epoch may stay unanswered.
_LISTEN_S = 60.0
_RETRY_FIRST_S = 0.5
_RETRY_LONGEST_S = 30.0
# Until a store has announced itself: looking for its file costs little, and a job that has begun
# to train shall be pausable at once.
_ANNOUNCED_LONGEST_S = 3.0


class NetLike(Protocol):
    """What a participant needs of a store: `slurm_ft.pause.table.Store`, and to wait for epochs."""

    def newest_after(self, epoch: int, limit_s: float) -> int: ...

    def join(self, rank: int, size: int) -> None: ...

    def newest(self) -> int: ...

    def read(self, epoch: int) -> Board: ...

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board: ...

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None: ...

    def close(self) -> None: ...


Connect = Callable[[], NetLike | None]


class Actions(Protocol):
    """What the program lets be done to it in a pause."""

    def release(self, rung: Rung, limit_s: float) -> None:
        """Give back what the rung names; a SlurmExtError says why not, with nothing given back."""
        ...

    def restore(self, limit_s: float) -> None:
        """Take it back; a SlurmExtError means that this rank's state is lost."""
        ...


class Participant:
    """One rank. ``connect`` gives a new connection, ``None`` where no store is known (yet).

    ``heard`` is called in a thread of its own with each new epoch, ``held`` when this rank begins
    to hold and, with ``None``, when it does no more. ``urgent`` says why a pause must end soon,
    empty where nothing presses. ``give_up`` ends the process; it is called from a watching thread
    when a release or restore hangs.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        limits: Limits,
        connect: Connect,
        actions: Actions,
        *,
        heard: Callable[[int], None],
        held: Callable[[Request | None], None] = lambda request: None,
        urgent: Callable[[], str] = lambda: "",
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        self._member = Member(rank, size)
        self._limits = limits
        self._connect = connect
        self._actions = actions
        self._heard = heard
        self._held = held
        self._urgent = urgent
        self._give_up = give_up or _end_process
        # Why this rank's state is lost although nobody has asked for it back yet.
        self._lost = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="slurm-ft-pause", daemon=True)
        self._newest = 0

    def start(self) -> None:
        """Begin to listen for pauses."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no longer. The thread may still wait for an answer; it does no harm.

        Whoever has asked for a pause that will not come is told, instead of waiting for it.
        """
        self._stopped.set()
        if self._newest > self._member.epoch:
            # Not acknowledged, so nobody can have committed to it.
            reason = f"rank {self._member.rank} has finished"
            self._tell(self._newest, Key.DECISION, abort(reason))

    # --- the thread -----------------------------------------------------------------------------

    def _listen(self) -> None:
        seen = 0
        retry_s = _RETRY_FIRST_S
        known = False
        store: NetLike | None = None
        while not self._stopped.is_set():
            try:
                if store is None:
                    store = self._connect()
                    known = known or store is not None
                    if store is not None:
                        store.join(self._member.rank, self._member.size)
                        seen = max(seen, self._over(store))
                if store is not None:
                    newest = store.newest_after(seen, _LISTEN_S)
                    retry_s = _RETRY_FIRST_S
                    if newest > seen:
                        seen = self._newest = newest
                        self._heard(newest)
                    continue
            except StoreLostError as exc:
                _log.debug("pause: %s", exc)
                store = None
            except SlurmExtError as exc:
                _log.warning("pause: this rank cannot be paused: %s", exc)
                return
            self._stopped.wait(retry_s)
            retry_s = min(retry_s * 2, _RETRY_LONGEST_S if known else _ANNOUNCED_LONGEST_S)
        if store is not None:
            store.close()

    @staticmethod
    def _over(store: NetLike) -> int:
        """The last epoch that ended before this process could take part."""
        newest = store.newest()
        return newest if newest and settled(store.read(newest)) else max(0, newest - 1)

    # --- at the safe point ----------------------------------------------------------------------

    def pause(self, epoch: int) -> Step | Exit:
        """Go through the pause that all ranks agreed on."""
        store = _Reconnecting(self._connect)
        drive = Drive(
            self._member,
            on_member,
            epoch=epoch,
            limits=self._limits,
            store=store,
            clock=time.monotonic,
        )
        try:
            return self._go_through(drive, epoch)
        finally:
            self._held(None)
            store.close()

    def _go_through(self, drive: Drive[Member], epoch: int) -> Step | Exit:
        todo = drive.feed(Agreed(epoch))
        interrupted = False
        while True:
            end = self._do(drive, todo)
            if drive.state.phase is Phase.HELD and self._member.phase is not Phase.HELD:
                self._held(drive.state.request)
            self._member = drive.state
            if end is not None:
                return end
            if not interrupted and (why := self._urgent()):
                interrupted = True
                drive.feed(Interrupt(why))
            before = drive.state
            # The first look is at once; then the store answers when there is news.
            waits = before.phase is not Phase.ENTERING and not interrupted
            began_s = time.monotonic()
            todo = drive.poll(_LOOK_S if waits else 0.0)
            quick = time.monotonic() - began_s < self._limits.poll_s
            if not todo and drive.state == before and quick:
                time.sleep(self._limits.poll_s)

    def _do(self, drive: Drive[Member], effects: list[Effect]) -> Step | Exit | None:
        todo = list(effects)
        while todo:
            effect = todo.pop(0)
            match effect:
                case Release(rung):
                    todo += drive.feed(Released(self._release(rung)))
                case Restore():
                    todo += drive.feed(Restored(self._restore()))
                case Step() | Exit():
                    return effect
        return None

    def _release(self, rung: Rung) -> str:
        limit_s = self._limits.release_s
        watch = _Watch(limit_s + self._limits.restore_s, "release", self._give_up)
        # All ranks are in a save together, whose exchanges have limits of their own; one that only
        # takes long is a checkpoint in the end, and the job then goes on with it.
        with contextlib.nullcontext() if rung is Rung.JOB else watch:
            try:
                self._actions.release(rung, limit_s)
            except ExchangeLostError:
                # The ranks' own exchange is gone: there is nothing to roll back to.
                raise
            except LostStateError as exc:
                self._lost = str(exc)
                return self._lost
            except Exception as exc:
                return _failure(exc)
        return ""

    def _restore(self) -> str:
        if self._lost:
            return self._lost
        limit_s = self._limits.restore_s
        with _Watch(limit_s + self._limits.up_s, "restore", self._give_up):
            try:
                self._actions.restore(limit_s)
            except Exception as exc:
                return _failure(exc)
        return ""

    def tell_gone(self) -> None:
        """Best effort: this rank ends for good, nobody needs to wait for it."""
        self._tell(max(1, self._member.epoch), Key.GONE, self._member.bit)

    def _tell(self, epoch: int, key: Key, value: str | int) -> None:
        store = _Reconnecting(self._connect)
        try:
            store.write(epoch, key, value)
        except StoreLostError as exc:
            _log.debug("pause: nobody heard of %s by rank %d: %s", key, self._member.rank, exc)
        finally:
            store.close()


class _Reconnecting:
    """A store whose connection, and whose address, may only appear or change later."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._store: NetLike | None = None

    def _reach(self) -> NetLike:
        if self._store is None:
            try:
                self._store = self._connect()
            except StoreLostError:
                raise
            except SlurmExtError as exc:
                raise StoreLostError(str(exc)) from exc
        if self._store is None:
            raise StoreLostError("no store of pauses is known in this attempt")
        return self._store

    def newest(self) -> int:
        return self._reach().newest()

    def read(self, epoch: int) -> Board:
        return self._reach().read(epoch)

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        return self._reach().wait(epoch, seen, limit_s)

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        self._reach().write(epoch, key, value)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class _Watch:
    """Ends the process where a call that nobody can interrupt does not come back."""

    def __init__(self, limit_s: float, what: str, give_up: Callable[[str], None]) -> None:
        self._timer = threading.Timer(
            limit_s, give_up, (f"the {what} of a pause did not end within {limit_s:g} s",)
        )
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def _failure(exc: Exception) -> str:
    """The words for the board. An error that nobody has foreseen, as of a program's own function,
    is a failure like any other: this rank must not leave the others behind by it."""
    if isinstance(exc, SlurmExtError):
        return str(exc)[:200] or type(exc).__name__
    _log.error("pause: %s", exc, exc_info=exc)
    return f"{type(exc).__name__}: {exc}"[:200]


def _end_process(reason: str) -> None:
    from slurm_ft import exits

    sys.stderr.write(f"slurm_ft: {reason}; ending for requeue\n")
    sys.stderr.flush()
    os._exit(exits.UNDECIDED)


def outcome_text(end: Step | Exit) -> str:
    """One line for the log."""
    went_on = isinstance(end, Step)
    verb = "goes on" if went_on else "leaves for requeue"
    detail = f" ({end.reason})" if end.reason else ""
    return f"pause {end.end}: {verb}{detail}" if end.end is not End.SKIPPED else f"no pause{detail}"

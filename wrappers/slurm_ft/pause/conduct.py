"""Runs the controller beside the table: takes pauses and resumes, one at a time.

It reads the table directly, so it sees every write at once, and it keeps what became of each pause
for whoever asks later. No I/O and no clock of its own; the server calls `look` after each change
and now and then.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.pausing import UNDER_WAY
from slurm_ft.pause.controller import Controller, Stage, on_controller, settled
from slurm_ft.pause.drive import Drive
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.protocol import (
    Ask,
    Board,
    Effect,
    End,
    Key,
    Request,
    Resume,
    Rung,
    Tell,
    name_ranks,
)
from slurm_ft.pause.table import Table

_MOST_KEPT = 64
# A board of more does not fit into a line of the wire, nor into the digits that json writes.
_MOST_RANKS = 1 << 13


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known about one pause. Times are seconds since it was asked for.

    ``epoch`` is 0 where it was refused. ``end`` is ``None`` while it lasts; ``bound_s`` is when the
    first rank was at its safe point, ``committed_s`` when all were, ``paused_s`` when the last one
    was paused.
    """

    epoch: int
    id: str
    rung: Rung
    stage: Stage
    end: End | None = None
    reason: str = ""
    ranks: str = ""
    bound_s: float | None = None
    committed_s: float | None = None
    paused_s: float | None = None
    ended_s: float | None = None
    by: str = ""
    hold_s: float = 0.0


class _Beside:
    """The store as the controller has it: the table itself, with no way to lose it."""

    def __init__(self, table: Table, changed: Callable[[], None]) -> None:
        self._table = table
        self._changed = changed

    def newest(self) -> int:
        return self._table.newest()

    def read(self, epoch: int) -> Board:
        return self._table.read(epoch)

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        return self._table.read(epoch)

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        if self._table.write(epoch, key, value):
            self._changed()

    def close(self) -> None:
        """Nothing to close."""


class Conductor:
    """All pauses of one attempt. ``changed`` is called after each write to the table."""

    def __init__(
        self,
        table: Table,
        limits: Limits,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._size = 0
        self._table = table
        self._limits = limits
        self._clock = clock
        self._store = _Beside(table, changed)
        self._drive: Drive[Controller] | None = None
        self._asked_s = 0.0
        self._outcomes: list[Outcome] = []

    @property
    def active(self) -> bool:
        """Whether a pause is under way that this controller made."""
        return self._drive is not None

    def join(self, rank: int, size: int) -> None:
        """A rank listens for pauses; it knows how many there are."""
        if not 0 <= rank < size <= _MOST_RANKS:
            raise ProtocolError(f"pause: rank {rank} of {size} is none")
        if self._drive is None:
            self._size = size

    def outcomes(self) -> tuple[Outcome, ...]:
        """The last pauses, the oldest first."""
        return tuple(self._outcomes)

    def last(self) -> Outcome | None:
        """The pause under way, else the last one that there was, else the last refusal."""
        if self._drive is not None:
            return self._latest()
        real = [outcome for outcome in self._outcomes if outcome.end is not End.REFUSED]
        known = real or self._outcomes
        return known[-1] if known else None

    def ask(
        self,
        rung: Rung,
        *,
        wait_s: float,
        hold_s: float,
        by: str,
        request_id: str = "",
        objection: str = "",
    ) -> Outcome:
        """Begin a pause, or say why not; ``objection`` is what the caller has against it."""
        request_id = request_id or secrets.token_hex(8)
        last = self._table.newest()
        refusal = ""
        if not self._size:
            refusal = (
                "no rank of this attempt listens for pauses: the program has no slurm_ft.session, "
                "or has not come to it yet"
            )
        elif last and not settled(self._table.read(last)):
            refusal = f"pause {last} {UNDER_WAY}"
        else:
            refusal = objection
        if refusal:
            return self._keep(
                Outcome(0, request_id, rung, Stage.DONE, End.REFUSED, refusal, ended_s=0.0, by=by)
            )
        request = Request(last + 1, request_id, rung, wait_s, hold_s, by)
        self._drive = Drive(
            Controller(self._size),
            on_controller,
            epoch=request.epoch,
            limits=self._limits,
            store=self._store,
            clock=self._clock,
        )
        self._asked_s = self._clock()
        outcome = self._keep(
            Outcome(request.epoch, request_id, rung, Stage.ASKING, by=by, hold_s=hold_s)
        )
        self._do(self._drive.feed(Ask(request)))
        self.look()
        return outcome

    def resume(self, reason: str) -> Outcome | None:
        """End the pause under way; ``None`` where there is none."""
        if self._drive is None:
            return None
        wanted = self._latest().id
        self._do(self._drive.feed(Resume(reason)))
        self.look()
        return next(outcome for outcome in self._outcomes if outcome.id == wanted)

    def look(self) -> None:
        """Let the controller see what has changed."""
        # A write of its own is a change again; it ends because entries are written once.
        for _ in range(16):
            drive = self._drive
            if drive is None:
                return
            before = (drive.state, drive.board)
            self._do(drive.poll())
            if self._drive is None or (self._drive.state, self._drive.board) == before:
                return

    def _keep(self, outcome: Outcome) -> Outcome:
        self._outcomes.append(outcome)
        del self._outcomes[:-_MOST_KEPT]
        return outcome

    def _do(self, effects: list[Effect]) -> None:
        assert self._drive is not None
        since_s = self._clock() - self._asked_s
        last = replace(self._latest(), stage=self._drive.state.stage)
        if last.bound_s is None and last.stage not in (Stage.IDLE, Stage.ASKING):
            last = replace(last, bound_s=since_s)
        if last.committed_s is None and last.stage in (Stage.RELEASING, Stage.HELD):
            last = replace(last, committed_s=since_s)
        for effect in effects:
            if isinstance(effect, Tell):
                last = replace(last, end=effect.end, reason=effect.reason)
                if effect.ranks:
                    last = replace(last, ranks=name_ranks(effect.ranks))
                if effect.end is not None:
                    last = replace(last, ended_s=since_s)
                elif last.stage is Stage.HELD:
                    last = replace(last, paused_s=since_s)
        for index in range(len(self._outcomes) - 1, -1, -1):
            if self._outcomes[index].id == last.id:
                self._outcomes[index] = last
                break
        if self._drive.state.stage is Stage.DONE:
            self._drive = None

    def _latest(self) -> Outcome:
        assert self._drive is not None
        request = self._drive.state.request
        for outcome in reversed(self._outcomes):
            if request is not None and outcome.id == request.id:
                return outcome
        return self._outcomes[-1]

"""What the ranks of a session do together, at steps that all of them agreed on.

`slurm_ft.session.session` is what a program sees; this is what happens at its safe points: agree,
save, finish a save that is under way, report, leave, and whatever else another part of the product
has put there. Everything here is collective and belongs to the thread that trains. It keeps no
state of its own but what was wished for: how far the rank is stands in the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft import status
from slurm_ft.checkpoint.commit import Saved
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session.agreement import NOTHING, Agreed, Agreement, Kind
from slurm_ft.session.ending import Ending
from slurm_ft.session.guard import Guard, stuck_limit_s
from slurm_ft.session.pace import Pace
from slurm_ft.session.record import Record
from slurm_ft.session.reporter import rounded
from slurm_ft.session.saving import Saving
from slurm_ft.session.wishes import Wishes

_log = logging.getLogger(__name__)


class Together:
    """The safe points of one session. ``meta`` is what a checkpoint made now says about itself.

    ``on_agreed`` are the hooks for kinds that the session itself knows nothing of.
    """

    def __init__(
        self,
        comm: Comm,
        limit_s: float,
        *,
        record: Record,
        saving: Saving,
        agreement: Agreement,
        wishes: Wishes,
        ending: Ending,
        guard: Guard,
        meta: Callable[[], Meta],
        on_agreed: Mapping[Kind, Callable[[int], None]],
    ) -> None:
        self._comm, self._limit_s = comm, limit_s
        self._record, self._saving = record, saving
        self._agreement, self._wishes = agreement, wishes
        self._ending, self._guard = ending, guard
        self._meta, self._on_agreed = meta, on_agreed

    @property
    def pace(self) -> Pace:
        """How fast this rank is, since it began or restored."""
        pace = self._record.pace
        assert pace is not None  # a session has one from its beginning
        return pace

    def alive(self, where: str, *, longest: bool = False) -> None:
        """Tell the guard what this rank does from now on, and by that how long it may take."""
        typical_s = self._saving.save_s if longest else self.pace.median_step_s
        self._guard.alive(where, stuck_limit_s(typical_s, self._limit_s), self._record.step)

    def safe_point(self) -> None:
        """Do what the ranks agreed on for this step. Raises ExchangeLostError."""
        agreed = self._agreement.safe_point(self._limit_s)
        if (
            self._saving.under_way
            and self._agreement.in_round
            and self._agreement.all_done(self._saving.done(), self._limit_s)
        ):
            self._saved(self._saving.finish)
        if agreed is not NOTHING:
            self._act(agreed)

    def save(self, step: int) -> Saved:
        """A durable save now, after the one that is under way."""
        self.alive("a save", longest=True)
        try:
            return self._ending.exchanged(lambda: self._save_now(step))
        finally:
            self._after_save()
            self.alive("a step")

    def settle(self) -> None:
        """Finish the save under way, if there is one."""
        if self._saving.under_way:
            self.alive("the save under way", longest=True)
            self._ending.exchanged(lambda: self._agreement.drain_done(self._limit_s))
            self._ending.exchanged(lambda: self._saved(self._saving.finish))
            self.alive("a step")

    def finish(self) -> None:
        """The loop ended: what is under way is ended with it."""
        self.alive("the session's end", longest=True)

        def end() -> None:
            agreed = self._agreement.drain(self._limit_s)
            if self._saving.under_way:
                self._saved(self._saving.finish)
            if agreed.kind is Kind.LEAVE and self._comm.rank == 0:
                _log.warning("the program ended before it could leave")

        self._ending.exchanged(end)
        self._record.done = True
        self._ending.close()

    def _act(self, agreed: Agreed) -> None:
        hook = self._on_agreed.get(agreed.kind)
        if hook is not None:
            began_s = time.monotonic()
            self.alive(f"what was agreed on ({agreed.kind.name.lower()})", longest=True)
            hook(agreed.payload)
            self.pace.stood_still(time.monotonic() - began_s)
        elif agreed.kind is Kind.LEAVE:
            step = self._record.step
            assert step is not None
            self.alive("the save before leaving", longest=True)
            self._ending.depart(step, self._made)
        elif agreed.kind is Kind.SAVE:
            step = self._record.step
            assert step is not None
            if self._saving.possible and not self._saving.under_way:
                self.alive("a save", longest=True)
                self._saved(lambda: self._saving.begin(step, self._meta()))
        elif agreed.kind is Kind.REPORT:
            mine = self.pace.take_compute_s()
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
            if self._comm.rank == 0:
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

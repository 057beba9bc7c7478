"""How a rank's part in a session ends: with all others, alone, by an error, or at the door.

In order, all ranks leave at a step they agreed on, after a save where there is time for one. Alone,
a rank leaves when it must: its grace is over, or a peer is gone; then nothing that needs a peer is
done any more, and its last complete checkpoint is the truth. Each end leaves a word in the rank's
status, by which its ft-run decides. That leaving was asked for is kept here as well, since it is
what all of this is about.

`Ending.heard` and `Ending.give_up` run in the guard's thread, `Ending.note` in the signal handler;
the rest belongs to the thread that trains.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, TypeVar

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft import exits, status
from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session import departure as departing
from slurm_ft.session.abandon import abandon
from slurm_ft.session.agreement import Agreement, Kind
from slurm_ft.session.departure import Word
from slurm_ft.session.guard import Leaving, asked_again
from slurm_ft.session.lost import lost_peer
from slurm_ft.session.opening import PlanDiffersError
from slurm_ft.session.record import Record
from slurm_ft.session.reporter import Reporter
from slurm_ft.session.saving import Saving
from slurm_ft.session.settings import Settings

# The last report must not hold up a rank that leaves.
_LAST_REPORT_S = 2.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Ending:
    """What ends this rank, and what is done then."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        record: Record,
        *,
        agreement: Agreement,
        saving: Saving,
        reporter: Reporter,
    ) -> None:
        self._settings = settings
        self._comm = comm
        self._record = record
        self._agreement = agreement
        self._saving = saving
        self._reporter = reporter
        self._limit_s = settings.collective_timeout_s
        self._lock = threading.Lock()
        self._noted: int | None = None
        self.leaving: Leaving | None = None
        self.code: int | None = None  # with which the rank leaves in order

    # --- that it was asked for ----------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """Whether leaving was asked for on this rank."""
        return self.leaving is not None or self._noted is not None

    def note(self, number: int) -> None:
        """In the signal handler: a flag and nothing else."""
        if self.leaving is None:
            self._noted = number

    def look(self, now_s: float) -> None:
        """At a safe point: hear the flag.

        Where another library has taken the wake-up descriptor, this is how a signal is heard.
        """
        if self._noted is not None and self.leaving is None:
            self.heard(self._noted, now_s)

    def heard(self, number: int, now_s: float) -> None:
        """A signal of ours came, in the guard's thread or at a safe point."""
        with self._lock:
            self._noted = None
            present = self.leaving
            name = signal.Signals(number).name
            if present is None or present.why != status.SIGNALLED:
                self._record.heard = name
                self.leaving = Leaving(now_s, status.SIGNALLED, name, self._settings.grace_s)
            elif asked_again(present, now_s):
                self.leaving = replace(present, again_s=now_s)
            else:
                return
        self._agreement.want(Kind.LEAVE)

    def ask(self, why: str) -> None:
        """Another part of the product asks for it. From any thread."""
        with self._lock:
            if self.leaving is None:
                self.leaving = Leaving(time.monotonic(), status.ASKED, why)
        self._agreement.want(Kind.LEAVE)

    # --- with all others ----------------------------------------------------------------------

    def depart(self, step: int, save: Callable[[int], object]) -> NoReturn:
        """All ranks are at this step and leave: save where there is time, then requeue."""
        self._agreement.drain(self._limit_s)
        leaving = self.leaving
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
                save(step)
        except ExchangeLostError:
            raise
        except SlurmExtError as exc:
            self._record.save_error = status.shorten(str(exc))
            note = f"{note}: not saved, because {exc}"
        # Nobody's end may take the others' exchange, or the whole step of srun, down with it.
        self._comm.barrier(self._limit_s)
        self.close()
        self.leave(exits.REQUEUE, departure.why, note)

    def leave(self, code: int, word: str, note: str) -> NoReturn:
        """Leave at once, without another exchange; the caller knows that all ranks do."""
        self._record.word, self._record.note, self.code = word, status.shorten(note), code
        self.stop_reporter()
        self._record.write_status()
        if self._comm.rank == 0:
            _log.warning("all ranks leave with exit code %d: %s, %s", code, word, note)
        raise SystemExit(code)

    def close(self) -> None:
        """Free what saves and exchanges are made with; no rank needs this one any more."""
        self._saving.close()
        self._agreement.close()
        self._comm.close()

    def stop_reporter(self) -> None:
        """Let rank 0 write its last report."""
        if self._comm.rank == 0:
            self._reporter.stop(_LAST_REPORT_S)

    # --- alone --------------------------------------------------------------------------------

    def exchanged(self, call: Callable[[], T]) -> T:
        """Run what ranks do together; a lost peer ends this rank, for the job to come back."""
        try:
            return call()
        except ExchangeLostError as exc:
            self.lost(exc)
            raise

    def lost(self, exc: ExchangeLostError) -> None:
        """A peer is gone; without ft-run to come back by, that is for the program to know."""
        if self._settings.under_ft_run:
            self.give_up(status.LOST_PEER, str(exc))

    def give_up(self, word: str, note: str) -> NoReturn:
        """End this process now; also in the guard's thread, when no safe point comes in time."""
        if self.code is None:
            self._record.word, self._record.note = word, status.shorten(note)
        # A rank that left in order and hangs on its way out keeps its word and its code.
        code = exits.ABANDONED if self.code is None else self.code
        abandon(code, f"rank {self._comm.rank}: {word}: {note}", self._record.write_status)

    def failed(self, exc: BaseException) -> None:
        """The loop ended by an exception: nothing that needs a peer is done any more."""
        if isinstance(exc, SystemExit) and exc.code in (None, 0):
            self._record.done = True
            return
        words = status.shorten(f"{type(exc).__name__}: {exc}")
        if self._comm.size > 1 and self._settings.under_ft_run and lost_peer(exc):
            traceback.print_exception(exc)
            self.give_up(status.LOST_PEER, words)
        self._record.failed = words


def refuse(settings: Settings, record: Record, exc: SlurmExtError) -> NoReturn:
    """The session cannot be opened. Under ft-run one line a rank, and no traceback each."""
    told = status.shorten(str(exc))
    code = exits.ABANDONED
    if isinstance(exc, PlanDiffersError):
        record.word, record.note = status.PLAN_DIFFERS, told
    else:
        # Another start would end the same way.
        record.failed, code = told, exits.REFUSED
    if not settings.under_ft_run:
        raise exc
    record.write_status()
    sys.stderr.write(f"slurm_ft: {exc}\n")
    raise SystemExit(code) from exc

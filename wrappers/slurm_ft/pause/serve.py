"""The helper process of rank 0's ft-run: serves the store, conducts pauses, answers requests.

    python -m slurm_ft.pause.serve --state-dir DIR --attempt N --job-id ID --parent PID

It writes where it listens and the key into the state directory, and ends with its ft-run: a store
that outlived it would hold a port, and the job's output, for nothing. It is no part of starting
the job: ranks that do not find it train without being pausable. Requests are looked for when a
signal wakes the job (SIGCONT, which harms no program) and now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.pausing import LONGEST_HOLD_S, PAUSE, RESUME, PauseAnswer, PauseAsk
from slurm_ext.domain.request import PLANS
from slurm_ft.launch.processes import control
from slurm_ft.pause.address import Address, address_path, new_key, read_address, write_address
from slurm_ft.pause.conduct import Outcome
from slurm_ft.pause.controller import Stage
from slurm_ft.pause.limits import DEFAULT_MOVE_S, Limits, fitting_limits
from slurm_ft.pause.protocol import End, Rung
from slurm_ft.pause.requests import (
    Letterbox,
    answer_path,
    write_private,
)
from slurm_ft.pause.server import BoardServer
from slurm_ft.requeue import act
from slurm_ft.requeue.record import parse_record

_log = logging.getLogger(__name__)

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_LOOK_S = 2.0
# Slurm sends SIGSTOP two seconds after SIGTSTP.
_SUSPEND_S = 1.8
_ANSWER_S = 0.1
_MOST_ANSWERS = 32
_RECORD_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until ft-run ends."""
    parser = argparse.ArgumentParser(prog="slurm_ft.pause.serve", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--spool", type=Path, help="the daemon's; requests of operators lie there")
    parser.add_argument("--host", default="", help="name under which ranks reach this node")
    parser.add_argument("--stays", default="", help="why ft-run would not requeue the job")
    parser.add_argument("--collective-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--move-limit", type=float, default=DEFAULT_MOVE_S, metavar="S")
    args = parser.parse_args(argv)
    logging.basicConfig(format="ft-run: pause: %(message)s", level=logging.WARNING)
    prctl = control()
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        limits = fitting_limits(args.collective_timeout, 0.0, args.move_limit)
        helper = Helper(args.state_dir, args.attempt, args.job_id, args.spool, limits, args.stays)
        asyncio.run(helper.run(args.host, args.parent))
    except (SlurmExtError, OSError) as exc:
        print(f"ft-run: this attempt cannot be paused: {exc}", file=sys.stderr)
        return 1
    return 0


class Helper:
    """Store, controller and letterbox of one attempt."""

    def __init__(
        self,
        state_dir: Path,
        attempt: int,
        job_id: str,
        spool: Path | None,
        limits: Limits,
        stays: str = "",
    ) -> None:
        self._stays = stays
        self._state_dir = state_dir
        self._attempt = attempt
        self._key = new_key()
        self._server = BoardServer(self._key, limits)
        plans = None if spool is None else spool / PLANS
        self._letters = Letterbox(job_id, state_dir, plans, _log.warning, since_s=time.time())
        # Operators cannot look into the state directory; the user's part of the spool they can.
        self._answers = [state_dir]
        if spool is not None and spool.is_dir():
            self._answers.append(spool / str(os.getuid()))
        self._open: dict[str, str] = {}
        self._told: dict[str, PauseAnswer] = {}
        self._suspension = ""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self, host: str, parent: int) -> None:
        """Serve until the parent ends."""
        port = await self._server.start()
        path = address_path(self._state_dir, self._attempt)
        address = Address(host or socket.gethostname(), port, self._attempt, self._key)
        write_address(path, address)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGCONT, self._woken)
        loop.add_signal_handler(signal.SIGTSTP, self._suspending)
        try:
            # A parent that ended before the kernel was asked to tell us is seen here.
            while not self._ended.is_set() and os.getppid() == parent:
                self._wake.clear()
                self._look()
                self._tell()
                limit_s = _ANSWER_S if self._open else _LOOK_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limit_s):
                        await self._either()
        finally:
            # A job that saved and left takes this process along before it has looked again.
            self._tell()
            await self._server.stop()
            # Another process of the same attempt may have replaced it; ranks find that one.
            if read_address(path) == address:
                path.unlink(missing_ok=True)

    async def _either(self) -> None:
        tasks = [asyncio.create_task(event.wait()) for event in (self._wake, self._ended)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    # --- Slurm's suspend: SIGTSTP, two seconds, SIGSTOP, and SIGCONT when it is over -------------

    def _suspending(self) -> None:
        """Bring all ranks to a safe point in the two seconds that there are."""
        outcome = self._server.pause(
            Rung.HOLD, wait_s=_SUSPEND_S, hold_s=LONGEST_HOLD_S, by="Slurm's suspend"
        )
        if outcome.end is None:
            self._suspension = outcome.id

    def _woken(self) -> None:
        """Also how a request is announced: then there is nothing to end."""
        self._wake.set()
        wanted, self._suspension = self._suspension, ""
        for outcome in self._server.conductor.outcomes():
            if wanted and outcome.id == wanted:
                where = (
                    "all ranks were at a safe point"
                    if outcome.stage is Stage.HELD
                    else f"not all ranks were at a safe point ({outcome.reason or outcome.stage}):"
                    " should a collective have been cut, the job comes back from its checkpoint"
                )
                _log.warning("the job was suspended and wakes; %s", where)
                if outcome.end is None:
                    self._server.conductor.resume("the job was woken")

    # --- requests -------------------------------------------------------------------------------

    def _look(self) -> None:
        for ask in self._letters.take():
            self._obey(ask)

    def _obey(self, ask: PauseAsk) -> None:
        conductor = self._server.conductor
        outcome: Outcome | None
        if ask.verb == PAUSE and ask.rung is Rung.JOB and (why := self._lost()):
            answer = PauseAnswer(ask.id, "refused", end=End.REFUSED.value, reason=why)
            self._write(ask.id, answer)
            return
        if ask.verb == PAUSE:
            outcome = self._server.pause(
                ask.rung, wait_s=ask.wait_s, hold_s=ask.hold_s, by=ask.by, request_id=ask.id
            )
        elif ask.verb == RESUME:
            outcome = conductor.resume(f"asked by {ask.by or 'the user'}")
        else:
            outcome = conductor.outcomes()[-1] if conductor.outcomes() else None
        if outcome is None:
            self._write(ask.id, PauseAnswer(ask.id, "none", reason="no pause is under way"))
            return
        self._open[ask.id] = outcome.id
        self._write(ask.id, _answer(ask.id, outcome))

    def _lost(self) -> str:
        """Why the job would end, instead of coming back, if it left now; empty where it would not.

        Nothing is paused yet, so nobody waits for this process meanwhile.
        """
        if self._stays:
            return f"the job would not come back: {self._stays}"
        name = os.environ.get("SLURM_JOB_ID", "")
        try:
            record = parse_record(act.ask(act.show_job(name), _RECORD_S), int(name))
        except (SlurmExtError, ValueError) as exc:
            return f"nothing tells whether the job would come back: {exc}"
        if not record.batch:
            return "the job would not come back: Slurm requeues batch jobs only"
        return "" if record.requeue else "the job would not come back: it has --no-requeue"

    def _tell(self) -> None:
        """Keep the answers up to date until their pauses are over."""
        known = {outcome.id: outcome for outcome in self._server.conductor.outcomes()}
        for ask_id, outcome_id in list(self._open.items()):
            outcome = known.get(outcome_id)
            if outcome is not None:
                self._write(ask_id, _answer(ask_id, outcome))
            if outcome is None or outcome.end is not None:
                del self._open[ask_id]

    def _write(self, ask_id: str, answer: PauseAnswer) -> None:
        if self._told.get(ask_id) == answer:
            return
        self._told[ask_id] = answer
        for directory in self._answers:
            try:
                own = directory == self._state_dir
                if not own:
                    directory.mkdir(mode=0o755, exist_ok=True)
                write_private(answer_path(directory, ask_id), answer, 0o600 if own else 0o644)
            except OSError as exc:
                _log.warning("%s: no answer can be left there: %s", directory, exc.strerror)
        while len(self._told) > _MOST_ANSWERS:
            oldest = next(iter(self._told))
            del self._told[oldest]
            for directory in self._answers:
                answer_path(directory, oldest).unlink(missing_ok=True)


def _answer(ask_id: str, outcome: Outcome) -> PauseAnswer:
    return PauseAnswer(
        id=ask_id,
        stage=outcome.stage.value,
        epoch=outcome.epoch,
        end="" if outcome.end is None else outcome.end.value,
        reason=outcome.reason,
        ranks=outcome.ranks,
        paused_s=outcome.paused_s,
        ended_s=outcome.ended_s,
    )


if __name__ == "__main__":
    sys.exit(main())

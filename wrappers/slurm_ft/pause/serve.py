"""The helper process of rank 0's ft-run: serves the store, conducts pauses, answers requests.

    python -m slurm_ft.pause.serve --state-dir DIR --attempt N --job-id ID --parent PID

It writes where it listens and the key into the state directory, and ends with its ft-run: a store
that outlived it would hold a port, and the job's output, for nothing. It is no part of starting
the job: ranks that do not find it train without being pausable. Requests are looked for when a
signal wakes the job (SIGCONT, which harms no program) and now and then.

Slurm gives a signal to every process of a step, this one included. Whatever it means to the
ranks, they need their store to get out of a pause and to save: so nothing but its ft-run ends this
process, and SIGTERM counts by who sent it.

Whatever may hang (files on a dead server, munge, the controller) is done in a thread: paused ranks
whose store does not answer would leave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from slurm_ext.domain.duration import parse_duration
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.pausing import (
    ANSWER_PREFIX,
    LONGEST_HOLD_S,
    PAUSE,
    RESUME,
    STATUS,
    PauseAnswer,
    PauseAsk,
)
from slurm_ext.domain.request import PLANS
from slurm_ft import status
from slurm_ft.launch.processes import control
from slurm_ft.pause.address import (
    Address,
    address_path,
    address_paths,
    new_key,
    read_address,
    step_of,
    write_address,
)
from slurm_ft.pause.client import NetStore
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

T = TypeVar("T")

_log = logging.getLogger(__name__)

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_LOOK_S = 2.0
# Not ignored: what cannot be, what tells of an error in this process, and what has a meaning here.
_KEPT = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP),
        *(signal.SIGABRT, signal.SIGSYS),
        *(signal.SIGCHLD, signal.SIGTERM, signal.SIGCONT, signal.SIGTSTP),
    }
)
# Slurm sends SIGSTOP two seconds after SIGTSTP.
_SUSPEND_S = 1.8
_ANSWER_S = 0.1
_MOST_ANSWERS = 32
_RECORD_S = 5.0
# Nobody waits any more for an answer of this age: left by helpers that are gone.
_OLD_S = 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until ft-run ends."""
    parser = argparse.ArgumentParser(prog="slurm_ft.pause.serve", description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process to end with")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--spool", type=Path, help="the daemon's; requests of operators lie there")
    parser.add_argument("--host", default="", help="name under which ranks reach this node")
    parser.add_argument("--status", type=Path, help="of rank 0's session, which tells the step")
    parser.add_argument("--stays", default="", help="why ft-run would not requeue the job")
    parser.add_argument("--collective-timeout", type=parse_duration, default=600.0, metavar="TIME")
    parser.add_argument("--move-limit", type=parse_duration, default=DEFAULT_MOVE_S, metavar="TIME")
    args = parser.parse_args(argv)
    logging.basicConfig(format="ft-run: pause: %(message)s", level=logging.WARNING)
    _outlive_signals()
    prctl = control()
    if prctl is not None:
        # Sent by the parent that dies, as the kernel fills it in.
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _raise_file_limit()
    try:
        limits = fitting_limits(args.collective_timeout, 0.0, args.move_limit)
        helper = Helper(
            args.state_dir,
            args.attempt,
            args.job_id,
            args.spool,
            limits,
            stays=args.stays,
            status_file=args.status,
        )
        asyncio.run(helper.run(args.host, args.parent))
    except (SlurmExtError, OSError) as exc:
        print(f"ft-run: this attempt cannot be paused: {exc}", file=sys.stderr)
        return 1
    return 0


def _outlive_signals() -> None:
    """Ignore what would end or stop this process; SIGTERM waits for `Helper._hear_parent`."""
    for number in signal.valid_signals() - _KEPT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _raise_file_limit() -> None:
    """Two connections for each rank; login shells often hand on a soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Helper:
    """Store, controller and letterbox of one attempt."""

    def __init__(
        self,
        state_dir: Path,
        attempt: int,
        job_id: str,
        spool: Path | None,
        limits: Limits,
        *,
        stays: str = "",
        status_file: Path | None = None,
    ) -> None:
        self._stays = stays
        self._status_file = status_file
        self._state_dir = state_dir
        self._job_id = job_id
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
        # When each pause was asked for, in seconds since the epoch.
        self._asked_s: dict[str, float] = {}
        self._told: dict[str, PauseAnswer] = {}
        self._path = address_path(state_dir, job_id, attempt, step_of(os.environ))
        self._writing = threading.Lock()
        self._swept = False
        self._step: int | None = None
        self._suspension = ""
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self, host: str, parent: int) -> None:
        """Serve until the parent ends."""
        port = await self._server.start()
        address = Address(host or socket.gethostname(), port, self._attempt, self._key)
        write_address(self._path, address)
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._hear_parent, args=(parent, loop), name="slurm-ft-parent", daemon=True
        ).start()
        loop.add_signal_handler(signal.SIGCONT, self._woken)
        loop.add_signal_handler(signal.SIGTSTP, self._suspending)
        letters = asyncio.create_task(self._read_letters())
        try:
            # A parent that ended before the kernel was asked to tell us is seen here.
            while not self._ended.is_set() and os.getppid() == parent and not letters.done():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._ended.wait()
            if letters.done():
                letters.result()
        finally:
            letters.cancel()
            # A job that saved and left takes this process along before it has looked again.
            self._write(self._news() | self._last_words())
            await self._server.stop()
            # Another process of the same step may have replaced it; ranks find that one.
            if read_address(self._path) == address:
                self._path.unlink(missing_ok=True)

    def _hear_parent(self, parent: int, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: ft-run says that the attempt is over, or has died. Others are not heard."""
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
            _log.debug("SIGTERM of somebody else")
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended.set)

    async def _read_letters(self) -> None:
        complained = ""
        while True:
            self._wake.clear()
            try:
                await self._round()
                complained = ""
            except Exception as exc:
                # Requests wait; the store of paused ranks must stay, whatever this is.
                if str(exc) != complained:
                    _log.warning("requests: %s", exc, exc_info=not isinstance(exc, OSError))
                complained = str(exc)
            limit_s = _ANSWER_S if self._open else _LOOK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._wake.wait()

    async def _round(self) -> None:
        if not self._swept:
            self._swept = True
            await _aside(self._sweep)
        for ask in await _aside(lambda: list(self._letters.take())):
            await self._obey(ask)
        for ask_id, why in self._letters.unchecked().items():
            await self._refuse(ask_id, why)
        if news := self._news():
            await _aside(partial(self._write, news))

    def _last_step(self) -> int | None:
        said = None if self._status_file is None else status.read(self._status_file)
        return said.step if said is not None and said.attempt == self._attempt else None

    # --- Slurm's suspend: SIGTSTP, two seconds, SIGSTOP, and SIGCONT when it is over -------------

    def _suspending(self) -> None:
        """Bring all ranks to a safe point in the two seconds that there are."""
        outcome = self._server.pause(
            Rung.HOLD, wait_s=_SUSPEND_S, hold_s=LONGEST_HOLD_S, by="Slurm's suspend"
        )
        self._asked_s[outcome.id] = time.time()
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

    async def _obey(self, ask: PauseAsk) -> None:
        conductor = self._server.conductor
        outcome: Outcome | None
        if ask.verb == PAUSE:
            why = await _aside(self._others)
            if not why and ask.rung is Rung.JOB:
                why = await _aside(self._lost)
            if why:
                await self._refuse(ask.id, why)
                return
            outcome = self._server.pause(
                ask.rung, wait_s=ask.wait_s, hold_s=ask.hold_s, by=ask.by, request_id=ask.id
            )
            self._asked_s[outcome.id] = time.time()
        elif ask.verb == RESUME:
            outcome = conductor.resume(f"asked by {ask.by or 'the user'}")
        else:
            outcome = conductor.last()
            self._step = await _aside(self._last_step)
        if outcome is None:
            answer = PauseAnswer(ask.id, "none", reason="no pause is under way")
            await _aside(partial(self._write, {ask.id: answer}))
            return
        if ask.verb == STATUS:
            answer = self._answer(ask.id, outcome)
            await _aside(partial(self._write, {ask.id: answer}))
            return
        self._open[ask.id] = outcome.id

    async def _refuse(self, ask_id: str, why: str) -> None:
        answer = PauseAnswer(ask_id, "refused", end=End.REFUSED.value, reason=why)
        await _aside(partial(self._write, {ask_id: answer}))

    def _others(self) -> str:
        """Whether another step of this attempt has a store: a request cannot reach both."""
        for path in address_paths(self._state_dir, self._job_id, self._attempt):
            try:
                address = None if path == self._path else read_address(path)
                if address is None:
                    continue
                store = NetStore(address, 1.0)
                store.newest()
                store.close()
            except SlurmExtError:
                continue  # left by one that was killed
            return (
                "several steps of this job run under ft-run at the same time, and a request reaches"
                " one of them only: give each a --state-dir of its own, and name it to slurm-ext"
            )
        return ""

    def _lost(self) -> str:
        """Why the job would end, instead of coming back, if it left now; empty if not."""
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

    def _news(self) -> dict[str, PauseAnswer]:
        """What is known about open requests now; those whose pauses are over are closed."""
        known = {outcome.id: outcome for outcome in self._server.conductor.outcomes()}
        self._asked_s = {key: at for key, at in self._asked_s.items() if key in known}
        news = {}
        for ask_id, outcome_id in list(self._open.items()):
            outcome = known.get(outcome_id)
            if outcome is not None:
                answer = self._answer(ask_id, outcome)
                if self._told.get(ask_id) != answer:
                    news[ask_id] = answer
            if outcome is None or outcome.end is not None:
                del self._open[ask_id]
        return news

    def _last_words(self) -> dict[str, PauseAnswer]:
        """For requests that no rank has acknowledged, and none will: the attempt is over."""
        asking = {o.id for o in self._server.conductor.outcomes() if o.stage is Stage.ASKING}
        words = "the program ended before its ranks came to a safe point"
        return {
            ask_id: PauseAnswer(ask_id, "refused", end=End.REFUSED.value, reason=words)
            for ask_id, outcome_id in self._open.items()
            if outcome_id in asking
        }

    def _answer(self, ask_id: str, outcome: Outcome) -> PauseAnswer:
        asked_s, paused_s = self._asked_s.get(outcome.id), outcome.paused_s
        since_s = None if asked_s is None or paused_s is None else asked_s + paused_s
        held = outcome.end is None and outcome.stage is Stage.HELD
        return PauseAnswer(
            id=ask_id,
            stage=outcome.stage.value,
            epoch=outcome.epoch,
            end="" if outcome.end is None else outcome.end.value,
            reason=outcome.reason,
            ranks=outcome.ranks,
            paused_s=paused_s,
            ended_s=outcome.ended_s,
            rung=outcome.rung.value,
            by=outcome.by,
            since_s=since_s,
            until_s=since_s + outcome.hold_s if held and since_s is not None else None,
            step=self._step if held else None,
        )

    def _write(self, answers: Mapping[str, PauseAnswer]) -> None:
        # At the end another thread may still be writing what was known before.
        with self._writing:
            self._write_alone(answers)

    def _write_alone(self, answers: Mapping[str, PauseAnswer]) -> None:
        for ask_id, answer in answers.items():
            if (before := self._told.get(ask_id)) is not None and before.end:
                continue
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
                with contextlib.suppress(OSError):
                    answer_path(directory, oldest).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove answers that earlier helpers of this user have left."""
        before_s = time.time() - _OLD_S
        for directory in self._answers:
            for path in directory.glob(f"{ANSWER_PREFIX}*"):
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < before_s:
                        path.unlink()


async def _aside(call: Callable[[], T]) -> T:
    """The call's result, from a thread that this process does not wait for when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, failed: Exception | None) -> None:
        if done.cancelled():
            return
        if failed is not None:
            done.set_exception(failed)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = call()
        except Exception as exc:
            failed = exc
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="slurm-ft-aside", daemon=True).start()
    return await done


if __name__ == "__main__":
    sys.exit(main())

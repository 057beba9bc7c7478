"""``slurm-ext pause JOBID``: all ranks of a running job hold together, or all go on.

The request goes to the job's own ft-run through a file, which wakes it by a signal through Slurm
that harms no program; ft-run answers through a file. Slurm is asked for the job's state first, so
that nobody waits for the answer of a job that does not run, and for the owner of somebody else's.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_ext.cli import standing
from slurm_ext.control.config import load_config
from slurm_ext.control.spool import read_cluster
from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.duration import FORMS, parse_duration
from slurm_ext.domain.errors import (
    DataError,
    ProtocolError,
    SlurmCommandError,
    SourceMissingError,
)
from slurm_ext.domain.pausing import (
    LONGEST_HOLD_S,
    PAUSE,
    STATUS,
    UNDER_WAY,
    PauseAnswer,
    PauseAsk,
    Rung,
    last_pause,
)
from slurm_ext.domain.spans import moment, span
from slurm_ext.domain.walltime import parse_walltime
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import CommandRunner
from slurm_ft.pause import asking
from slurm_ft.pause.protocol import End

_JOB = re.compile(r"\d+(_\d+)?\Z")
# ft-run looks by itself every few seconds where the signal was lost.
FIRST_ANSWER_S = 15.0
# Beyond the time until the first rank is at a safe point: acknowledging, releasing, saving.
_BEYOND_S = 300.0
# A requeued job is COMPLETING for a while, in which Slurm takes no change.
_PENDING_S = 90.0
# One in which the request is just missed, one that may be skipped, and the one that sees it.
_CYCLES = 3.0
# For what only adds words, or what ft-run finds out by itself: a controller that is away answers
# nothing, and a signal to a suspended job waits for its end.
_SOON_S = 5.0
# A job with a signal on its way runs all the same.
_RUNNING = frozenset({"RUNNING", "SIGNALING"})
_AS_ROOT = "start it, or ask as root or as the daemon's user"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "pause",
        help="let a running job hold, and give back memory or GPUs meanwhile",
        description="Pause a running job that was started by ft-run: all its ranks stop between"
        " two steps, or all go on. Users pause their own jobs, operators of Slurm anybody's.",
    )
    parser.add_argument("job", metavar="JOBID", help="a running job, or one task of an array")
    parser.add_argument(
        "--for",
        dest="hold",
        metavar="TIME",
        help="resume by itself after this time, e.g. 90s, 10m, 2h (default: 10m)",
    )
    parser.add_argument(
        "--release",
        choices=[rung.value for rung in Rung],
        help="what is given back meanwhile: nothing, device memory, or the job's GPUs; job saves,"
        " requeues the job and keeps it from starting for the time of --for (default: memory)",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="how long a rank may take to come to the end of a step (default: 60s)",
    )
    parser.add_argument("--status", action="store_true", help="tell about the last pause instead")
    add_place(parser)
    parser.set_defaults(run=run)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Options that say where requests are left."""
    parser.add_argument(
        "--state-dir", metavar="DIR", type=Path, help="the job's, where ft-run was given another"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")


def run(args: argparse.Namespace) -> int:
    """Ask, and tell how it went; 1 where the job is not paused."""
    job_id = check_job(args.job)
    given = {"--for": args.hold, "--release": args.release, "--timeout": args.timeout}
    if args.status and (unused := [name for name, value in given.items() if value is not None]):
        raise DataError("--status", f"pauses nothing, so {unused[0]} means nothing", "leave it out")
    rung = Rung(args.release or Rung.MEMORY.value)
    hold_s = seconds("--for", args.hold or "10m")
    wait_s = seconds("--timeout", args.timeout or "60s")
    runner = CommandRunner()
    found = standing.look(job_id, runner)
    if args.status and found.state == standing.PENDING:
        return _tell_pending(args, found, runner)
    if found.obstacle:
        raise standing.refusal(found, PAUSE, runner)
    place, first_s = find_place(args, job_id, runner)
    verb = STATUS if args.status else PAUSE
    ask = asking.new_ask(job_id, verb, rung=rung, wait_s=wait_s, hold_s=hold_s)
    asking.send(place, ask, lambda: wake(job_id, runner))
    if args.status:
        answer = asking.wait(place, ask, lambda _: True, first_s=first_s, limit_s=first_s)
        return _tell_status(job_id, answer, runner, time.time())
    answer = asking.wait(
        place,
        ask,
        lambda answer: bool(answer.end) or answer.stage == "held",
        first_s=first_s,
        limit_s=wait_s + _BEYOND_S,
        over=lambda: standing.over(job_id, runner),
    )
    if answer is not None and answer.end == End.SAVED:
        return _keep_waiting(job_id, hold_s, runner)
    return _tell(job_id, ask, answer, runner)


def find_place(
    args: argparse.Namespace, job_id: str, runner: CommandRunner
) -> tuple[asking.Place, float]:
    """Where the request goes, and how long its first answer may take; DataError for others.

    The owner writes to the job itself, root and the daemon's user to the daemon's part of the
    spool, an operator to the own part, from which the daemon passes it on.
    """
    own = asking.own_place(job_id, args.state_dir, Path.home())
    if own is not None:
        return own, FIRST_ANSWER_S
    owner, uid = owner_of(job_id, runner), os.getuid()
    if owner == uid:
        raise DataError(
            f"job {job_id}",
            f"has no state directory of ft-run below {Path.home()}",
            "only what srun ft-run starts can be paused: start its program so, or name the"
            " directory with --state-dir",
        )
    config = load_config(args.config)
    spool = Path(config.spool)
    place = asking.daemons_place(spool, owner, uid)
    if place is not None:
        return place, FIRST_ANSWER_S
    try:
        operator = CliBackend(runner).identity().operator
    except SourceMissingError as exc:
        print(f"slurm-ext: warning: Slurm does not tell who you are: {exc}", file=sys.stderr)
        operator = False
    if not operator:
        raise DataError(
            f"job {job_id}",
            f"belongs to {_name_of(owner)}: only that user and operators of Slurm may do that",
            "ask one of them (AdminLevel in sacctmgr show user)",
        )
    return asking.operators_place(spool, owner, uid), FIRST_ANSWER_S + _passing_s(spool)


def attempts_of(
    args: argparse.Namespace, job_id: str, runner: CommandRunner
) -> tuple[Attempt, ...]:
    """What ft-run kept about the job's attempts; empty where it has not run under ft-run yet."""
    own = asking.own_place(job_id, args.state_dir, Path.home())
    if own is not None:
        return standing.own_attempts(own.asks, job_id)
    owner = owner_of(job_id, runner)
    if owner == os.getuid():
        return ()
    return standing.told_attempts(Path(load_config(args.config).spool), owner, job_id)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _passing_s(spool: Path) -> float:
    """How long the daemon may take to pass a request on; DataError where none is at work."""
    try:
        whole = read_cluster(spool)
    except (SourceMissingError, ProtocolError) as exc:
        raise DataError(
            "daemon", f"passes requests of operators on, and is not there: {exc}", _AS_ROOT
        ) from exc
    if time.time() - whole.made_s > whole.lease_s:
        raise DataError(
            "daemon", "passes requests of operators on, and has been silent for too long", _AS_ROOT
        )
    return _CYCLES * whole.cycle_s


def owner_of(job_id: str, runner: CommandRunner) -> int:
    """User id of the job's owner, by Slurm. Raises DataError for what is no single job there."""
    rows = runner.run(["squeue", "-h", "-j", job_id, "-o", "%U %i"]).stdout.splitlines()
    fields = [row.split() for row in rows if row.strip()]
    if not fields or not fields[0][0].isdigit():
        raise DataError(
            f"job {job_id}",
            "is not in the queue",
            f"only a running job can be paused; sacct -j {job_id} tells how it ended",
        )
    names = [row[1] for row in fields if len(row) > 1]
    if names and names != [job_id]:
        raise DataError(
            f"job {job_id}",
            f"is {', '.join(names[:4])}{' and more' if len(names) > 4 else ''} to Slurm",
            "name one task of the array, as in 123_4",
        )
    return int(fields[0][0])


def wake(job_id: str, runner: CommandRunner) -> None:
    """SIGCONT does nothing to a program that runs; ft-run's helper looks for requests at once."""
    try:
        runner.run(["scancel", "--signal=CONT", job_id], timeout_s=_SOON_S)
    except SlurmCommandError as exc:
        # ft-run finds the request by itself, only later.
        print(f"slurm-ext: warning: the job cannot be woken: {exc}", file=sys.stderr)


def check_job(text: str) -> str:
    """A job id or one task of an array."""
    if not _JOB.match(text):
        raise DataError(f"JOBID={text}", "is not a job id", "give one as in 123 or 123_4")
    return text


def seconds(option: str, text: str) -> float:
    """A time above 0 that a pause may last."""
    longest = span(LONGEST_HOLD_S)
    try:
        found = parse_duration(text)
    except ValueError as exc:
        raise DataError(f"{option}={text}", f"is refused: {exc}", f"write {FORMS}") from exc
    if not 0 < found <= LONGEST_HOLD_S:
        raise DataError(
            f"{option}={text}", "is out of bounds", f"give more than 0 and at most {longest}"
        )
    return found


def silence(job_id: str, runner: CommandRunner) -> str:
    """What is said where nobody answers: a job that does not run cannot."""
    try:
        done = runner.run(
            ["squeue", "-h", "-j", job_id, "-o", "%T"], timeout_s=_SOON_S, check=False
        )
    except SlurmCommandError:
        return "nobody answers. Does it run under ft-run?"
    states = sorted(set(done.stdout.split()))
    if done.rc:
        return f"nobody answers: {done.stderr.strip()[:200]}"
    if set(states) <= _RUNNING and states:
        return "nobody answers. Does it run under ft-run?"
    return f"nobody answers: it is {' and '.join(states) or 'not in the queue'}"


def _warn_of_limit(job_id: str, hold_s: float, runner: CommandRunner) -> None:
    """A pause stops no clock of Slurm's."""
    try:
        text = runner.run(["squeue", "-h", "-j", job_id, "-o", "%L"], timeout_s=_SOON_S).stdout
        left_s = parse_walltime(text.strip())
    except (SlurmCommandError, ValueError):
        return  # not known, or without a limit
    if left_s < hold_s:
        print(
            f"slurm-ext: warning: job {job_id} comes to its time limit in {span(left_s)}, before"
            " the pause is over; a pause does not stop that clock",
            file=sys.stderr,
        )


def _tell(job_id: str, ask: PauseAsk, answer: PauseAnswer | None, runner: CommandRunner) -> int:
    if answer is None:
        words = silence(job_id, runner)
        print(f"slurm-ext: job {job_id}: not paused; {words}", file=sys.stderr)
        return 1
    if answer.stage == "held" and not answer.end:
        took = "" if answer.paused_s is None else f" after {answer.paused_s:.2f} s"
        print(
            f"job {job_id}: all ranks are paused{took}; they go on in {span(ask.hold_s)}, or by"
            f" slurm-ext resume {job_id}"
        )
        _warn_of_limit(job_id, ask.hold_s, runner)
        return 0
    word = {
        End.ABORTED.value: "rolled back, the job goes on",
        End.RESUMED.value: "rolled back after the commit, the job goes on",
        End.REFUSED.value: "refused",
        End.ABANDONED.value: "given up, the job comes back from its last checkpoint",
        End.UNDECIDED.value: "not known: the store of the job does not answer",
    }.get(answer.end, f"still {answer.stage}")
    who = f" ({answer.ranks})" if answer.ranks else ""
    why = answer.reason
    if not answer.end and (gone := standing.look(job_id, runner).obstacle):
        # It said that it was asked, and was gone before it could say what came of it.
        word, why = "not paused", why or f"the job {gone}"
    if answer.end == End.REFUSED and why.endswith(UNDER_WAY):
        why += (
            f"; slurm-ext resume {job_id} ends it, and slurm-ext pause --status {job_id} tells how"
            " long it lasts"
        )
    print(f"slurm-ext: job {job_id}: {word}{': ' if why else ''}{why}{who}", file=sys.stderr)
    return 1


def _tell_status(job_id: str, answer: PauseAnswer | None, runner: CommandRunner, now: float) -> int:
    if answer is None:
        print(f"slurm-ext: job {job_id}: {silence(job_id, runner)}", file=sys.stderr)
        return 1
    for line in status_lines(job_id, answer, now):
        print(line)
    return 0


def status_lines(job_id: str, answer: PauseAnswer, now: float) -> Iterator[str]:
    """The pause under way, or what became of the last one of this attempt."""
    if answer.stage == "none":
        yield f"job {job_id}: no pause in this attempt"
        return
    number = f"pause {answer.epoch}" if answer.epoch else "the last request"
    reason = f": {answer.reason}" if answer.reason else ""
    if answer.end:
        by = f" by {answer.by}" if answer.by else ""
        yield f"job {job_id}: {number}{by}: {answer.end}{reason}"
        return
    if answer.stage != "held" or answer.since_s is None:
        yield f"job {job_id}: {number} {answer.stage}{reason}"
        return
    step = "" if answer.step is None else f" after step {answer.step}"
    yield (
        f"job {job_id}: {number}: all ranks are paused{step} since {moment(answer.since_s, now)},"
        f" by {answer.by or 'the user'}, release={answer.rung}"
    )
    if answer.until_s is not None:
        yield (
            f"job {job_id}: they go on at {moment(answer.until_s, now)}, in"
            f" {span(max(0.0, answer.until_s - now))}, or by slurm-ext resume {job_id}"
        )


def _tell_pending(args: argparse.Namespace, found: standing.Standing, runner: CommandRunner) -> int:
    job_id = found.job_id
    left = last_pause(attempts_of(args, job_id, runner))
    if left is None:
        print(f"job {job_id}: {found.obstacle}; no pause has put its start off")
        return 0
    at = moment(left.until_s(found.begin_s), time.time())
    saved = left.attempt.saved_step
    step = "" if saved is None else f" at step {saved}"
    print(
        f"job {job_id}: {left.paused.words}: saved{step} and requeued; it starts at {at} at the"
        f" earliest, or by slurm-ext resume {job_id}"
    )
    return 0


def _keep_waiting(job_id: str, hold_s: float, runner: CommandRunner) -> int:
    """The job is saved and on its way to the queue: it must not start again at once."""
    end_s = time.monotonic() + _PENDING_S
    argv = ["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{int(hold_s)}"]
    while True:
        try:
            state = runner.run(["squeue", "-h", "-j", job_id, "-o", "%T"]).stdout.split()
            if state == ["PENDING"]:
                runner.run(argv)
                print(
                    f"job {job_id}: saved and requeued; it starts in {span(hold_s)} at the"
                    f" earliest, or by slurm-ext resume {job_id}"
                )
                return 0
            words = f"it is {' '.join(state) or 'gone'}"
        except SlurmCommandError as exc:
            words = str(exc)
        if time.monotonic() > end_s:
            print(
                f"slurm-ext: job {job_id}: saved, but its start cannot be put off: {words}",
                file=sys.stderr,
            )
            return 1
        time.sleep(1.0)

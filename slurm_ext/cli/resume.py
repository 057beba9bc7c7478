"""``slurm-ext resume JOBID``: end a pause before its time."""

from __future__ import annotations

import argparse
import sys

from slurm_ext.cli import standing
from slurm_ext.cli.pause import add_place, attempts_of, check_job, find_place, silence, wake
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.pausing import RESUME, last_pause
from slurm_ext.slurm.process import CommandRunner
from slurm_ft.pause import asking
from slurm_ft.pause.protocol import End

# Taking memory back and waiting until every rank is there.
_UP_S = 600.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "resume",
        help="let a paused job go on",
        description="End a pause before its time. A job that gave its GPUs back may start again.",
    )
    parser.add_argument("job", metavar="JOBID", help="a paused job")
    add_place(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and tell how it went; 1 where the job does not go on."""
    job_id = check_job(args.job)
    runner = CommandRunner()
    found = standing.look(job_id, runner)
    if found.state == standing.PENDING:
        return _let_start(args, found, runner)
    if found.obstacle:
        raise standing.refusal(found, RESUME, runner)
    place, first_s = find_place(args, job_id, runner)
    ask = asking.new_ask(job_id, RESUME)
    asking.send(place, ask, lambda: wake(job_id, runner))
    answer = asking.wait(
        place,
        ask,
        lambda answer: bool(answer.end) or answer.stage == "none",
        first_s=first_s,
        limit_s=_UP_S,
        over=lambda: standing.over(job_id, runner),
    )
    if answer is None:
        print(f"slurm-ext: job {job_id}: {silence(job_id, runner)}", file=sys.stderr)
        return 1
    if answer.end in (End.RESUMED, End.ABORTED):
        print(f"job {job_id}: all ranks go on")
        return 0
    if answer.stage == "none" and not answer.end:
        raise DataError(
            f"job {job_id}",
            f"is not paused: {answer.reason or 'no pause is under way'}",
            f"slurm-ext pause {job_id} pauses it, and slurm-ext pause --status {job_id} tells how"
            " its last pause ended",
        )
    words = answer.reason or answer.end or standing.look(job_id, runner).obstacle or answer.stage
    print(f"slurm-ext: job {job_id}: {words}", file=sys.stderr)
    return 1


def _let_start(args: argparse.Namespace, found: standing.Standing, runner: CommandRunner) -> int:
    """Bring a start forward that a pause has put off, and no other: that one is not ours."""
    job_id = found.job_id
    if last_pause(attempts_of(args, job_id, runner)) is None:
        hint = (
            f"scontrol release {job_id}"
            if found.held
            else f"scontrol update JobId={job_id} StartTime=now brings a later start forward"
        )
        because = f" ({found.reason})" if found.reason else ""
        print(
            f"slurm-ext: job {job_id}: is pending{because}, and no pause has put its start off;"
            f" nothing is changed ({hint})",
            file=sys.stderr,
        )
        return 1
    runner.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])
    if found.held:
        print(
            f"job {job_id}: its start is not put off any more, but it is held ({found.reason}):"
            f" scontrol release {job_id}"
        )
    else:
        print(f"job {job_id}: may start")
    return 0

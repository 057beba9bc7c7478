"""``slurm-ext resume JOBID``: end a pause before its time."""

from __future__ import annotations

import argparse
import sys

from slurm_ext.cli.pause import add_place, check_job, find_place, wake
from slurm_ext.domain.pausing import RESUME
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
    state = runner.run(["squeue", "-h", "-j", job_id, "-o", "%T"]).stdout.split()
    if state == ["PENDING"]:
        runner.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])
        print(f"job {job_id}: may start")
        return 0
    place, first_s = find_place(args, job_id, runner)
    ask = asking.new_ask(job_id, RESUME)
    asking.send(place, ask, lambda: wake(job_id, runner))
    answer = asking.wait(
        place,
        ask,
        lambda answer: bool(answer.end) or answer.stage == "none",
        first_s=first_s,
        limit_s=_UP_S,
    )
    if answer is None:
        print(f"slurm-ext: job {job_id}: nobody answers", file=sys.stderr)
        return 1
    if answer.end in (End.RESUMED, End.ABORTED):
        print(f"job {job_id}: all ranks go on")
        return 0
    words = answer.reason or answer.end or answer.stage
    print(f"slurm-ext: job {job_id}: {words}", file=sys.stderr)
    return 1

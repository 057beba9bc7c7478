"""What Slurm, and the job's own attempts, say of a job before it is asked to pause or to go on.

A job that does not run cannot answer, so nobody should wait for it. Only a start that a pause has
put off is ours to bring forward: the attempts say which one that is. Where Slurm does not answer,
the job is taken to run: then it answers itself, which needs no controller.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.cli import past
from slurm_ext.control.spool import Spool
from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.errors import (
    NO_SUCH_COMMAND,
    DataError,
    ProtocolError,
    SlurmCommandError,
    SourceMissingError,
)
from slurm_ext.domain.pausing import PAUSE
from slurm_ext.slurm.parse_jobs import epoch
from slurm_ext.slurm.process import CommandRunner
from slurm_ft.requeue import attempts as ledger

# Its answer saves a person from waiting; without it things go on.
_ANSWER_S = 5.0
_ID = re.compile(r"\d+(_\S+)?\Z")
_ENDED = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
        *("DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
    }
)
_GONE = "GONE"
PENDING = "PENDING"


@dataclass(frozen=True, slots=True)
class Standing:
    """Slurm's state of a job, its reason for it, and when it lets a waiting one start."""

    job_id: str
    state: str
    reason: str = ""
    begin_s: float | None = None

    @property
    def gone(self) -> bool:
        """Whether it has ended, or there is no such job."""
        return self.state == _GONE or self.state in _ENDED

    @property
    def waits(self) -> bool:
        """Whether it is in the queue, and starts again or for the first time."""
        return self.state in (PENDING, "CONFIGURING", "REQUEUED")

    @property
    def obstacle(self) -> str:
        """Why the job cannot answer; empty where it may."""
        if self.state == _GONE:
            return "is not in the queue: it has ended, or there is no such job"
        if self.state in _ENDED:
            return f"has ended ({self.state})"
        if self.state == PENDING:
            return f"is pending{self._because}"
        if self.state == "SUSPENDED":
            return "is suspended by Slurm"
        if self.state in ("COMPLETING", "CONFIGURING", "REQUEUED", "STOPPED"):
            return f"is {self.state}"
        return ""

    @property
    def _because(self) -> str:
        return f" ({self.reason})" if self.reason not in ("", "None", "(null)") else ""

    @property
    def held(self) -> bool:
        """Whether somebody holds the job, so that no start time lets it go."""
        return self.reason.startswith("JobHeld")


def look(job_id: str, runner: CommandRunner, *, warn: bool = True) -> Standing:
    """Ask Slurm once. Raises DataError for what is no single job to Slurm."""
    argv = ["squeue", "-h", "-j", job_id, "-t", "all", "-o", "%T %r %S %i"]
    try:
        found = runner.run(argv, timeout_s=_ANSWER_S, check=False)
        if found.rc and "invalid job id" not in found.stderr.lower():
            raise SlurmCommandError(argv, found.rc, found.stderr)
    except SlurmCommandError as exc:
        # Without Slurm's commands only the job's owner gets further, and others are told so then.
        if warn and exc.rc != NO_SUCH_COMMAND:
            print(f"slurm-ext: warning: job {job_id} is taken to run: {exc}", file=sys.stderr)
        return Standing(job_id, "")
    rows = [words for line in found.stdout.splitlines() if (words := line.split())]
    if not rows:
        return Standing(job_id, _GONE)
    names = [words[-1] for words in rows if len(words) > 1 and _ID.match(words[-1])]
    if names and names != [job_id]:
        array = all(name.startswith(f"{job_id}_") for name in names)
        raise DataError(
            f"job {job_id}",
            "is an array" if array else f"is {', '.join(names[:4])} to Slurm",
            f"name one task of the array, as in {names[0] if _single(names[0]) else f'{job_id}_1'}",
        )
    state, *more = rows[0]
    # %S is a forecast unless it is the begin time that the job waits for.
    begin_s = epoch(more[1]) if len(more) > 2 and more[0] == "BeginTime" else None
    return Standing(job_id, state, more[0] if more else "", begin_s)


def refusal(found: Standing, verb: str, runner: CommandRunner) -> DataError:
    """What a person is told who wants to pause or resume a job that cannot answer."""
    job_id, place = found.job_id, f"job {found.job_id}"
    only = f"only a {'running' if verb == PAUSE else 'paused'} job can be {verb}d"
    if not found.gone:
        fix = f"{only}; squeue -j {job_id} tells when it runs"
        if found.state == "SUSPENDED":
            fix = f"scontrol resume {job_id} lets it go on; {only}"
        elif found.state == PENDING:
            fix = f"{only}; scontrol hold {job_id} keeps it from starting"
        return DataError(place, found.obstacle, fix)
    rows = past.ask(job_id, runner)
    if rows:
        words = rows[0].words(time.time()) if len(rows) == 1 else "has ended"
        return DataError(place, words, f"{only}; slurm-ext explain {job_id} tells more")
    if found.state == _GONE and rows is not None:
        return DataError(
            place,
            "is not in the queue, and Slurm's accounting has no such job",
            "squeue --me lists yours",
        )
    return DataError(place, found.obstacle, f"{only}; sacct -j {job_id} may tell more")


def _single(name: str) -> bool:
    return name.partition("_")[2].isdecimal()


def over(job_id: str, runner: CommandRunner) -> bool:
    """Whether Slurm knows that nothing of the job runs any more: nobody is left who could answer.

    Suspended it may still answer, and while Slurm does not answer it is taken to run.
    """
    found = look(job_id, runner, warn=False)
    return bool(found.obstacle) and found.state != "SUSPENDED"


def own_attempts(directory: Path, job_id: str) -> tuple[Attempt, ...]:
    """From the state directory of one's own job; empty (and a warning) where they are not there."""
    path = directory / ledger.file_name(job_id)
    try:
        return ledger.load(path, job_id).attempts
    except (ProtocolError, OSError) as exc:
        print(f"slurm-ext: warning: {path} cannot be read: {exc}", file=sys.stderr)
        return ()


def told_attempts(spool: Path, owner: int, job_id: str) -> tuple[Attempt, ...]:
    """From the owner's part of the spool, for everybody else."""
    try:
        known = Spool(spool).read_about(owner, (job_id,)).attempts.get((owner, job_id))
    except SourceMissingError as exc:
        print(f"slurm-ext: warning: {exc}", file=sys.stderr)
        return ()
    return () if known is None else known.attempts

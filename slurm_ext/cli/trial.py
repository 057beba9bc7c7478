"""``sbatch --test-only``: whether Slurm itself would accept a script, and what it fills in.

sbatch runs the SPANK plugin and slurmctld runs job_submit.lua on it, but no job comes to be. The
script, the user's own environment and time zone count as they would at a real submission. Slurm's
expected start is for the job as submitted, from the ends of running jobs; for waiting ones of the
partition that are not behind it Slurm adds their time limits, spread over all CPUs, also for those
that never start (seen on 24.11.5).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.control.whatif import Submitter
from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.process import CommandRunner

# Slurm 26.05 writes "at TIME a using".
_STARTS = re.compile(
    r"Job \d+ to start at (?P<at>\S+)(?: a)? using \d+ processors on nodes (?P<nodes>\S+)"
    r" in partition (?P<partition>\S+)"
)
_REFUSED = re.compile(r"^(?:sbatch: error: |allocation failure: |sbatch: fatal: )(?P<words>.+)$")
_SAID = re.compile(r"^sbatch: (?P<words>.+)$")


@dataclass(frozen=True, slots=True)
class Trial:
    """What sbatch answered. ``accepted`` is ``None`` where it could not be asked.

    ``words`` are its messages: the reasons of a refusal, or remarks on an accepted job.
    """

    accepted: bool | None
    words: tuple[str, ...] = ()
    start_s: float | None = None
    nodes: str = ""
    partition: str = ""


def try_out(runner: CommandRunner, script: Path, environ: Mapping[str, str] | None = None) -> Trial:
    """Ask sbatch about a script."""
    environ = os.environ if environ is None else environ
    # The runner sets UTC for what it parses; a --begin=16:00 means the user's own clock.
    zone = [f"TZ={environ['TZ']}"] if "TZ" in environ else ["-u", "TZ"]
    try:
        answer = runner.run(
            ["env", *zone, "sbatch", "--test-only", str(script.resolve())], check=False
        )
    except SourceMissingError as exc:
        return Trial(None, (exc.reason,))
    lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines()]
    if answer.rc == 127:
        return Trial(None, tuple(line for line in lines if line) or ("there is no sbatch here",))
    found = next((match for line in lines if (match := _STARTS.search(line))), None)
    if answer.rc == 0:
        said = [m["words"] for line in lines if (m := _SAID.match(line))]
        remarks = tuple(words for words in said if not _STARTS.search(words))
        if found is None:
            return Trial(True, remarks)
        at = found["at"]
        start_s = float(at) if at.isdigit() else None
        return Trial(True, remarks, start_s, found["nodes"], found["partition"])
    refused = [m["words"] for line in lines if (m := _REFUSED.match(line))]
    if any("Unable to contact slurm controller" in words for words in lines):
        return Trial(None, tuple(refused))
    return Trial(False, tuple(dict.fromkeys(refused)) or (f"sbatch ended with {answer.rc}",))


def submitter(runner: CommandRunner, user: str, uid: int, cluster: str) -> tuple[Submitter, str]:
    """Account and QOS that Slurm would fill in for a user, and a note where that is not known."""
    argv = ["sacctmgr", "-nP", "show", "user", user, "withassoc"]
    argv.append("format=DefaultAccount,Account,DefaultQOS,QOS")
    if cluster:
        argv.append(f"cluster={cluster}")
    try:
        answer = runner.run(argv)
    except SourceMissingError as exc:
        return Submitter(user, uid), f"account and QOS are not known: {exc.reason}"
    for line in answer.stdout.splitlines():
        default, account, default_qos, all_qos = [*line.split("|"), "", "", "", ""][:4]
        if account == default:
            offered = all_qos.split(",")
            qos = default_qos or (
                "normal" if "normal" in offered else offered[0] if len(offered) == 1 else ""
            )
            return Submitter(user, uid, account, qos), ""
    return Submitter(user, uid), ""

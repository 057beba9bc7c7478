"""Runs the real ``ft-run`` in a made-up Slurm: variables of a step, and commands that record.

The commands are executables on PATH, so that what ft-run really executes is what is tested. The
record that ``scontrol`` shows is a line of the real one, changed where a test wants it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from slurm_ext.domain.attempt import Attempt, Attempts, parse_attempts

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("launch_program.py")
FT_RUN = (sys.executable, "-m", "slurm_ft.launch.main")
LIMIT_S = 30.0
SHOW_ENVIRONMENT = (
    "--",
    sys.executable,
    "-c",
    "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], sys.stdout)",
)

RECORD = (
    "JobId={raw} {array}JobName=job.sh UserId=alice(2001) GroupId=research(2000) MCS_label=N/A"
    " Priority=11100 Nice=0 Account=vision QOS=normal JobState={state} Reason={reason}"
    " Dependency=(null) Requeue={requeue} Restarts={restarts} BatchFlag={batch} Reboot=0"
    " ExitCode=0:0 RunTime=00:00:02 TimeLimit=UNLIMITED TimeMin=N/A"
    " SubmitTime=2026-11-29T21:56:51 EligibleTime=2026-11-29T21:56:51"
    " AccrueTime=2026-11-29T21:56:51 StartTime=2026-11-29T21:56:52 EndTime={end}"
    " Deadline=N/A PreemptEligibleTime=2026-11-29T21:56:52 {preempt}SuspendTime=None"
    " SecsPreSuspend=0 Partition={partition} NodeList=n2 BatchHost=n2 NumNodes=1 NumCPUs=1"
    " StdOut=/home/alice/j-1.out TresPerNode=gres/gpu:4"
)
_SCONTROL = """#!/bin/sh
echo "scontrol $*" >> "$FAKE/calls"
if [ -e "$FAKE/away" ]; then
    left=$(cat "$FAKE/away")
    if [ "$left" -gt 0 ]; then
        echo $((left - 1)) > "$FAKE/away"
        echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
        exit 1
    fi
fi
case "$*" in
    *"show job"*) cat "$FAKE/record" ;;
    *"show config"*) echo "PreemptType             = preempt/partition_prio" ;;
    *"show partition"*) echo "PartitionName=preempt GraceTime=20 PreemptMode=$(cat "$FAKE/mode")" ;;
    requeue*)
        if [ -e "$FAKE/refuse" ]; then cat "$FAKE/refuse" >&2; exit 1; fi
        # What Slurm does then: everything of the job gets TERM.
        (sleep 0.3; kill -TERM $PPID) >/dev/null 2>&1 &
        ;;
    *) echo "unknown: $*" >&2; exit 1 ;;
esac
"""
_SACCT = """#!/bin/sh
echo "sacct $*" >> "$FAKE/calls"
cat "$FAKE/sacct"
"""


class Slurm:
    """One made-up job. ``variables`` is the environment of its steps."""

    def __init__(self, root: Path, raw: int = 77, **variables: str) -> None:
        self.root = root
        self.raw = raw
        self.home = root / "home"
        self.state = self.home / ".slurm-ext" / "state" / f"lab-{raw}"
        bin_dir = root / "bin"
        for path in (self.home, bin_dir):
            path.mkdir()
        for name, text in (("scontrol", _SCONTROL), ("sacct", _SACCT)):
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
        (root / "sacct").write_text("")
        (root / "mode").write_text("REQUEUE")
        self.variables = {
            "PATH": f"{bin_dir}:/usr/bin:/bin",
            "HOME": str(self.home),
            "PYTHONPATH": f"{ROOT / 'wrappers'}:{ROOT}",
            "FAKE": str(root),
            "FT_SPOOL": str(root / "spool"),
            "SLURM_CONF": "/nonexistent",
            "SLURM_JOB_ID": str(raw),
            "SLURM_CLUSTER_NAME": "lab",
            "SLURM_SUBMIT_DIR": str(root),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NODELIST": "n[07-08]",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "ENVIRONMENT": "BATCH",
            "SLURM_OPEN_MODE": "a",
            **variables,
        }
        self.record()

    def array(self) -> str:
        """What the record says of the array that the environment names."""
        job = self.variables.get("SLURM_ARRAY_JOB_ID")
        task = self.variables.get("SLURM_ARRAY_TASK_ID")
        return f"ArrayJobId={job} ArrayTaskId={task} " if job else ""

    def record(self, **fields: str) -> None:
        """What scontrol shows from now on."""
        values = {
            "raw": str(self.raw),
            "state": "RUNNING",
            "reason": "None",
            "requeue": "1",
            "restarts": "0",
            "batch": "1",
            "end": "Unknown",
            "preempt": "",
            "array": self.array(),
            "partition": "preempt",
            **fields,
        }
        (self.root / "record").write_text(RECORD.format(**values) + "\n")

    def calls(self, command: str = "") -> list[str]:
        """What was executed so far, or those calls that contain ``command``."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if command in line]

    def start(self, *argv: str, **variables: str) -> subprocess.Popen[str]:
        """ft-run with these arguments. Its output is collected."""
        return subprocess.Popen(
            [*FT_RUN, *argv],
            env={**self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **variables: str) -> tuple[int, str, str]:
        """The same to its end: code, output, messages."""
        return finish(self.start(*argv, **variables))


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for an ft-run: code, output, messages."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def program(*options: str) -> tuple[str, ...]:
    """Command of the program of the tests."""
    return ("--", sys.executable, str(PROGRAM), *options)


def await_true(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition, or fail saying what was waited for."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"no {what} within {limit_s} s"
        time.sleep(0.02)


def ready(path: Path) -> int:
    """Wait for the program; returns its process id."""
    await_true(lambda: path.exists() and path.read_text().endswith("\n"), "program")
    return int(path.read_text())


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def clean_environment() -> dict[str, str]:
    """The environment without Slurm and without ft-run."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "FT_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))
    }


def ledger(slurm: Slurm, job_id: str = "77") -> tuple[Attempt, ...]:
    """The attempts that ft-run has kept."""
    path = slurm.home / ".slurm-ext" / "state" / f"lab-{job_id}" / f"attempts-{job_id}.json"
    return parse_attempts(path.read_text(), str(path)).attempts


def environment_of(slurm: Slurm, *options: str, **variables: str) -> dict[str, str]:
    """The environment that ft-run gives its program."""
    code, out, err = slurm.run(*options, *SHOW_ENVIRONMENT, **variables)
    assert code == 0, err
    found: dict[str, str] = json.loads(out)[0]
    return found


def leave(
    slurm: Slurm,
    *options: str,
    number: int = signal.SIGUSR2,
    behave: tuple[str, ...] = (),
    **variables: str,
) -> tuple[int, str, str]:
    """Start the program, signal its ft-run, and wait for the end."""
    mark = slurm.root / "ready"
    mark.unlink(missing_ok=True)
    process = slurm.start(*options, *program(f"--ready={mark}", *behave), **variables)
    ready(mark)
    process.send_signal(number)
    return finish(process)


def began_long_ago(slurm: Slurm) -> None:
    """An attempt that goes on since longer than one that had no time to save anything."""
    slurm.state.mkdir(parents=True, exist_ok=True)
    begun = Attempts("77", (Attempt(0, time.time() - 1000.0, 1),))
    (slurm.state / "attempts-77.json").write_text(begun.to_json())


def soon(seconds: float) -> str:
    """A time to come, as Slurm writes it."""
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")

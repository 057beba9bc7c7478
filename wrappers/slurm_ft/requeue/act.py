"""What is asked of Slurm and told to it: the record, the preemption mode, the requeue.

Only rank 0 comes here, once per end of a job: a read, seldom two more, and one requeue. A
controller that does not answer is asked again until a limit: it may be restarting, and a job that
gave up would be lost. An answer that will not change is not asked for twice.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_ext.domain.errors import ProtocolError, SlurmCommandError
from slurm_ft.requeue.attempts import SACCT_COLUMNS
from slurm_ft.requeue.record import JobRecord, fields, parse_record

COMMAND_LIMIT_S = 30.0
# Slurm's default of MaxBatchRequeue.
MAX_BATCH_REQUEUE = 5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
# What scontrol says while it cannot reach the controller, or the controller is not ready.
_PASSING = (
    "unable to contact",
    "connection refused",
    "connection timed out",
    "socket timed out",
    "transient error",
    "zero bytes",
    "try again",
    "slurm backup controller in standby",
    "communication connection failure",
    "insane message length",
    "in some state",
)


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """For Slurm's commands: times in one form, nothing that changes what they print."""
    return {**base, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "64"}


def show_job(job_id: str) -> list[str]:
    """Command that prints the record of a job or of one task of an array."""
    return ["scontrol", "-o", "show", "job", job_id]


def ends_of_attempts(job_id: str) -> list[str]:
    """Command that prints how each attempt ended, as far as the accounting knows."""
    return ["sacct", "-D", "-X", "-P", "-n", "-j", job_id, "-o", SACCT_COLUMNS]


def ask(argv: Sequence[str], limit_s: float = COMMAND_LIMIT_S) -> str:
    """The command's output. Raises SlurmCommandError."""
    try:
        done = subprocess.run(
            argv,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise SlurmCommandError(argv, None, f"no answer within {limit_s:g} s") from exc
    except OSError as exc:
        raise SlurmCommandError(argv, 127, exc.strerror or str(exc)) from exc
    errors = done.stderr.decode(errors="replace")
    if done.returncode:
        raise SlurmCommandError(argv, done.returncode, errors)
    return done.stdout.decode(errors="replace")


def ask_again(
    argv: Sequence[str],
    until: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """As `ask`, again while the controller is away, until the time ``until`` of ``clock``.

    Raises the last SlurmCommandError.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return ask(argv)
        except SlurmCommandError as exc:
            if not _passes(exc) or clock() + pause_s >= until:
                raise
        pause(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def read_record(job_id: str, slurm_id: int, until: float) -> JobRecord:
    """The job's record. Raises SlurmCommandError or ProtocolError."""
    return parse_record(ask_again(show_job(job_id), until), slurm_id)


def requeue(job_id: str, until: float) -> None:
    """Send the job back to the queue. Raises SlurmCommandError where Slurm refuses.

    Not sent twice when the answer was lost: the second would fail on a job that is pending, which
    is taken for success.
    """
    argv = ["scontrol", "requeue", job_id]
    try:
        ask_again(argv, until)
    except SlurmCommandError as exc:
        # ESLURM_JOB_PENDING: an earlier request arrived, or somebody was faster.
        if "pending" not in exc.reason.lower():
            raise


def preempt_mode(partition: str, until: float) -> str:
    """What preemption does to jobs of a partition: REQUEUE, CANCEL...; empty where not certain.

    Under preempt/qos the QOS decides, which only the accounting could tell; then it is not.
    Raises SlurmCommandError or ProtocolError.
    """
    kind = _line_value(ask_again(["scontrol", "show", "config"], until), "PreemptType")
    if kind != "preempt/partition_prio":
        return ""
    words = fields(ask_again(["scontrol", "-o", "show", "partition", partition], until))
    mode = words.get("PreemptMode")
    if mode is None:
        raise ProtocolError(f"scontrol show partition {partition}: it tells no PreemptMode")
    return mode.partition(",")[0]


def most_own_requeues(until: float) -> int:
    """How often Slurm brings a job back by itself before it holds it (MaxBatchRequeue).

    Meant for launches that fail, but the end of a job within a preemption's grace counts as well.
    Raises SlurmCommandError.
    """
    text = _line_value(ask_again(["scontrol", "show", "config"], until), "MaxBatchRequeue")
    return int(text) if text.isdigit() else MAX_BATCH_REQUEUE


def _line_value(text: str, key: str) -> str:
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip() == key:
            return value.strip()
    return ""


def _passes(error: SlurmCommandError) -> bool:
    said = error.reason.lower()
    return error.rc is None or any(words in said for words in _PASSING)

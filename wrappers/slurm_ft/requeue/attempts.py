"""The attempts of a job, kept on disk by rank 0's ft-run.

The file in the state directory is the truth: it is the job's own and survives the spool. The copy
in the user's part of the spool is for the daemon and for ``slurm-ext queue``; where it cannot be
written the job goes on. Changes are pure functions of `Attempts`; only `load` and `store` touch
the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_ext.domain.attempt import (
    MAX_ATTEMPTS,
    MAX_ATTEMPTS_BYTES,
    Attempt,
    Attempts,
    Cause,
    parse_attempts,
)
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.request import ATTEMPTS_PREFIX, SUFFIX
from slurm_ft.status import Status

# States of sacct and the cause that they stand for.
_STATES = {
    "PREEMPTED": Cause.PREEMPTED,
    "TIMEOUT": Cause.TIME_LIMIT,
    "DEADLINE": Cause.TIME_LIMIT,
    "NODE_FAIL": Cause.NODE_FAIL,
    "BOOT_FAIL": Cause.NODE_FAIL,
    "REQUEUED": Cause.OPERATOR,
    "CANCELLED": Cause.CANCELLED,
    "FAILED": Cause.USER_ERROR,
    "OUT_OF_MEMORY": Cause.USER_ERROR,
    "COMPLETED": Cause.COMPLETED,
}
# `sacct` is asked for these columns, in this order.
SACCT_COLUMNS = "Restarts,State,End"


def file_name(job_id: str) -> str:
    """Name of the file, the same in the state directory and in the spool."""
    return f"{ATTEMPTS_PREFIX}{job_id}{SUFFIX}"


def load(path: Path, job_id: str) -> Attempts:
    """What is there so far. Raises ProtocolError or OSError where it cannot be used."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ATTEMPTS_BYTES + 1)
    except FileNotFoundError:
        return Attempts(job_id, ())
    return parse_attempts(data.decode(errors="replace"), str(path))


def store(path: Path, attempts: Attempts) -> None:
    """Replace the file, durably: the next attempt may run elsewhere within seconds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(_bounded(attempts) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def ended_well(path: Path, job_id: str, number: int) -> bool:
    """Whether the last that was heard of an attempt is that its program ended well.

    Of several steps in a script the last one speaks: where it did not end well, those before it are
    wanted again, such as one that had put data onto the nodes. Not known is no.
    """
    try:
        known = load(path, job_id).attempts
    except (ProtocolError, OSError):
        return False
    return any(a.number == number and a.cause is Cause.COMPLETED for a in known)


def begin(attempts: Attempts, attempt: Attempt) -> Attempts:
    """With one more attempt. What other steps of the same one keep is joined when it is stored."""
    earlier = [known for known in attempts.attempts if known.number != attempt.number]
    return replace(attempts, attempts=(*earlier, attempt)[-MAX_ATTEMPTS:])


def close(attempts: Attempts, attempt: Attempt) -> Attempts:
    """With the last attempt as it ended."""
    return replace(attempts, attempts=(*attempts.attempts[:-1], attempt))


def with_status(attempt: Attempt, status: Status | None) -> Attempt:
    """What the session told, in the attempt."""
    if status is None or status.attempt != attempt.number:
        return attempt
    return replace(
        attempt,
        first_step_s=status.first_step_s,
        restored_step=status.restored_step,
        last_step=status.step,
        saved_step=status.saved_step,
        save_s=status.save_s,
        stall_s=status.stall_s,
        paused_s=status.paused_s,
    )


# Causes that rank 0 wrote while Slurm was taking the job apart, when the record hides the reason.
_UNSURE = (None, Cause.UNKNOWN, Cause.OPERATOR, Cause.CANCELLED)


def unsure_before(attempts: Attempts, number: int) -> bool:
    """Whether the accounting may know more about the end of the attempt before ``number``."""
    return any(a.number < number and _open(a, number) for a in attempts.attempts)


def _open(attempt: Attempt, number: int) -> bool:
    return attempt.cause is None or (attempt.number == number - 1 and attempt.cause in _UNSURE)


def close_from_sacct(attempts: Attempts, number: int, rows: Sequence[str]) -> Attempts:
    """Ends of earlier attempts that Slurm's accounting knows; UNKNOWN for those it does not.

    ``rows`` are lines of ``sacct -D -X -P -n -o``, one per attempt, with SACCT_COLUMNS.
    """
    states: dict[int, str] = {}
    for row in rows:
        restarts, _, rest = row.partition("|")
        if restarts.isdigit():
            # "CANCELLED by 1000"
            states[int(restarts)] = rest.partition("|")[0].partition(" ")[0]
    ended = []
    for attempt in attempts.attempts:
        if attempt.number < number and _open(attempt, number):
            state = states.get(attempt.number, "")
            cause = _STATES.get(state, Cause.UNKNOWN)
            said = f"Slurm's accounting says {state}" if state else "nobody was left to say"
            if attempt.cause is None or cause not in _UNSURE:
                attempt = replace(attempt, cause=cause, reason=said)
            # It is here again, whatever it looked like.
            attempt = replace(attempt, requeued=True)
        ended.append(attempt)
    return replace(attempts, attempts=tuple(ended))


def _bounded(attempts: Attempts) -> str:
    """As text within the bound: node names of old attempts go first, then their further steps,
    then the attempts."""
    text = attempts.to_json()
    kept = list(attempts.attempts)
    named = whole = 0
    while len(text.encode()) >= MAX_ATTEMPTS_BYTES and kept:
        if named < len(kept):
            steps = tuple(replace(step, nodes=()) for step in kept[named].steps)
            kept[named] = replace(kept[named], nodes=(), steps=steps)
            named += 1
        elif whole < len(kept):
            kept[whole] = replace(kept[whole], steps=())
            whole += 1
        else:
            kept.pop(0)
        text = replace(attempts, attempts=tuple(kept)).to_json()
    return text

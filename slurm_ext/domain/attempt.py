"""Attempts of a job: when each began, what became of it, and why it ended.

Kept by rank 0's ``ft-run`` in the user's part of the spool, so the daemon reads it as it reads
progress: bounded, and believed about this job only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError

ATTEMPTS_VERSION = 1
MAX_ATTEMPTS = 64
MAX_ATTEMPTS_BYTES = 65536
# Of the steps beside the one that an attempt tells of; those that ended well are dropped first.
MAX_STEPS = 31
_MAX_NUMBER = 1e15


class Cause(StrEnum):
    """Why an attempt ended.

    COMPLETED    the program ended with 0
    PREEMPTED    Slurm preempted the job
    TIME_LIMIT   the time limit was near or reached
    NODE_FAIL    a node of the allocation failed
    DAEMON       the daemon asked for it: another configuration, or the place for another job
    OPERATOR     a person requeued the job
    USER_ERROR   the program ended with an error of its own
    NO_PROGRESS  attempts that saved nothing new, or a rank that was stuck
    LOST_PEER    an exchange between ranks was abandoned though no node is known to have failed
    CANCELLED    somebody cancelled the job
    UNKNOWN      nobody was left to say
    """

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NODE_FAIL = "node failure"
    DAEMON = "daemon"
    OPERATOR = "operator"
    USER_ERROR = "user error"
    NO_PROGRESS = "no progress"
    LOST_PEER = "lost peer"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One more step of an attempt, beside the one that the attempt itself tells of.

    A script may start several programs under ``ft-run``, one after the other or beside each other.
    The fields mean what they mean in `Attempt`; ``step`` is Slurm's number of the step.
    """

    step: int
    started_s: float
    gpus: int
    nodes: tuple[str, ...] = ()
    ended_s: float | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    restored_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None
    requeued: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job. Times are seconds since the epoch, durations seconds.

    ``number`` is Slurm's restart count. ``restored_step`` is the step of the checkpoint that it
    began from (0 = from the start, ``None`` = the program does not say), ``saved_step`` that of
    the last complete checkpoint, ``last_step`` the last one that ended. ``save_s`` is the measured
    time of a whole save, ``stall_s`` the time in which training stood still for saves,
    ``paused_s`` that in which all ranks were paused.
    ``requeued`` tells whether the job was sent back to the queue, ``reason`` says why or why not.
    Where a script has several steps under ``ft-run``, ``started_s`` is the start of the first one
    and the rest is told of one step, number ``step``: the one that sent the job back, else one
    that runs, else the last to end. ``steps`` are the others.
    """

    number: int
    started_s: float
    gpus: int
    nodes: tuple[str, ...] = ()
    ranks: int = 1
    first_step_s: float | None = None
    ended_s: float | None = None
    cause: Cause | None = None
    exit_code: int | None = None
    restored_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None
    save_s: float | None = None
    stall_s: float = 0.0
    paused_s: float = 0.0
    requeued: bool = False
    reason: str = ""
    step: int = 0
    steps: tuple[StepRecord, ...] = ()


def as_step(attempt: Attempt) -> StepRecord:
    """What an attempt tells of its one step, as one of several."""
    return StepRecord(**_shared(attempt))


def as_attempt(step: StepRecord, number: int) -> Attempt:
    """A step as if it were an attempt by itself."""
    return Attempt(number, **_shared(step))


def _shared(told: Attempt | StepRecord) -> dict[str, Any]:
    return {field.name: getattr(told, field.name) for field in fields(StepRecord)}


@dataclass(frozen=True, slots=True)
class Attempts:
    """All attempts of a job, the oldest first, at most MAX_ATTEMPTS (the oldest are dropped)."""

    job_id: str
    attempts: tuple[Attempt, ...]
    version: int = ATTEMPTS_VERSION

    def to_json(self) -> str:
        """One line of JSON."""
        return dumps(self)


def parse_attempts(text: str, place: str) -> Attempts:
    """Read what an untrusted writer made, or raise ProtocolError naming ``place``."""
    if len(text.encode(errors="replace")) > MAX_ATTEMPTS_BYTES:
        raise ProtocolError(f"{place}: longer than {MAX_ATTEMPTS_BYTES} bytes; not read")
    document = loads(Attempts, text, place)
    if document.version != ATTEMPTS_VERSION:
        raise ProtocolError(
            f"{place}: version {document.version}, this side knows {ATTEMPTS_VERSION}"
        )
    if not 0 < len(document.job_id) <= 64:
        raise ProtocolError(f"{place}: job_id={document.job_id[:64]!r} is not a job id")
    if len(document.attempts) > MAX_ATTEMPTS:
        raise ProtocolError(f"{place}: more than {MAX_ATTEMPTS} attempts; not read")
    for attempt in document.attempts:
        for name in ("number", "started_s", "gpus", "ranks", "first_step_s", "ended_s"):
            _bound(place, name, getattr(attempt, name))
        for name in ("restored_step", "last_step", "saved_step", "save_s", "stall_s", "paused_s"):
            _bound(place, name, getattr(attempt, name))
        _bound(place, "step", attempt.step)
        if len(attempt.steps) > MAX_STEPS:
            raise ProtocolError(f"{place}: more than {MAX_STEPS} further steps; not read")
        for step in attempt.steps:
            for name in ("step", "started_s", "gpus", "ended_s"):
                _bound(place, f"steps.{name}", getattr(step, name))
            for name in ("restored_step", "last_step", "saved_step"):
                _bound(place, f"steps.{name}", getattr(step, name))
    return document


def _bound(place: str, name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and 0 <= value <= _MAX_NUMBER):
        raise ProtocolError(f"{place}: {name}={value!r} is outside 0..{_MAX_NUMBER:g}")

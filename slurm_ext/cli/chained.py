"""How far each task of a chain is, of what the chain, its job's attempts and Slurm tell.

A chain that was killed has told nothing of it, so that a task runs is believed only while neither
the job's attempts nor Slurm say otherwise. No task is said to be lost: one that has begun is in its
last complete checkpoint, and the next start goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.cli import standing
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.errors import DataError, ProtocolError
from slurm_ext.domain.request import ATTEMPTS_PREFIX, SUFFIX
from slurm_ext.slurm.process import CommandRunner
from slurm_ft.requeue.attempts import load
from slurm_ft.switch.chain import ChainState, Done
from slurm_ft.switch.standing import ChainStanding, End, read_standing
from slurm_ft.train.task import Task

_JOB = re.compile(r"\d+(_\d+)?\Z", re.ASCII)
_SOON_S = 10.0


class State(StrEnum):
    """How far a task is.

    DONE         trained, saved, result and record written
    RUNS         being trained
    ENDS         its steps are made; it is being saved while the next one trains
    STOPPED      begun; the job left, and goes on from its last checkpoint when it comes back
    FAILED       trained and saved, and its result could not be written
    LEFT_OUT     these ranks cannot train it
    WAITS        not begun yet
    NOT_REACHED  not begun, and the job has ended
    """

    DONE = "done"
    RUNS = "runs"
    ENDS = "ends"
    STOPPED = "stopped"
    FAILED = "failed"
    LEFT_OUT = "left out"
    WAITS = "waits"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Row:
    """One task. ``kept`` tells whether its result keeps its target; ``None`` without either."""

    task: Task
    state: State
    done: Done | None
    why: str

    @property
    def kept(self) -> bool | None:
        """Whether the result keeps the target."""
        target = self.task.quality
        if self.done is None or target is None or target.metric not in self.done.metrics:
            return None
        return target.kept(self.done.metrics[target.metric])

    @property
    def words(self) -> str:
        """What the last column says."""
        if self.why or self.done is None:
            return self.why
        said = " ".join(f"{key}={value:.4g}" for key, value in self.done.metrics.items())
        if self.kept is None:
            return said
        return f"{said}; {self.task.quality} {'kept' if self.kept else 'MISSED'}"


@dataclass(frozen=True, slots=True)
class Gone:
    """A job's attempt that is over: whether the job comes back, and why it ended."""

    back: bool
    why: str = ""


def standings(
    chain: ChainState, tasks: Sequence[Task], now: ChainStanding | None, gone: Gone | None
) -> list[Row]:
    """One row for each task, in order. Pure but for what the chain keeps on disk."""
    done, begun = chain.done(), chain.claims.begun()
    rows = []
    for task in tasks:
        record = done.get(task.name)
        why = ""
        if record is not None and record.step >= task.steps:
            state = State.DONE
        elif now is not None and task.name in now.failed:
            state, why = State.FAILED, now.failed[task.name]
        elif now is not None and task.name in now.left_out:
            state = State.LEFT_OUT
            why = now.left_out[task.name].removeprefix(f"{task.name}: ")
        elif gone is None and now is not None and task.name == now.task:
            state = State.RUNS
        elif task.name in begun and now is not None and now.task:
            # The one before the present task, or the one that the chain goes over to.
            names = [other.name for other in tasks]
            later = now.task in names and names.index(task.name) > names.index(now.task)
            state = State.WAITS if later else State.ENDS
            if gone is not None:
                state, why = State.STOPPED, gone.why
        else:
            over = gone is not None and not gone.back
            state = State.NOT_REACHED if over else State.WAITS
        rows.append(Row(task, state, record, why))
    return rows


def gone(chain: ChainState, place: str, runner: CommandRunner | None = None) -> Gone | None:
    """Whether the chain's last attempt is over; ``None`` where it runs, for all that is known."""
    now = read_standing(chain.folder)
    if now is None:
        return None
    found = _attempt_gone(chain, now)
    if found is not None:
        return found
    if now.end is not End.RUNS:
        return Gone(now.end is End.LEFT, now.why)
    return _job_gone(place, runner or CommandRunner(_SOON_S)) if _JOB.match(place) else None


def _attempt_gone(chain: ChainState, now: ChainStanding) -> Gone | None:
    """By the job's own record of its attempts."""
    for path in chain.state_dir.glob(f"{ATTEMPTS_PREFIX}*{SUFFIX}"):
        job_id = path.name.removeprefix(ATTEMPTS_PREFIX).removesuffix(SUFFIX)
        try:
            record: Attempts = load(path, job_id)
        except (ProtocolError, OSError):
            continue  # only more precise than what the chain itself tells
        if not record.attempts:
            continue
        last = record.attempts[-1]
        if last.number > now.attempt:
            return Gone(back=True)
        if last.number == now.attempt and last.ended_s is not None:
            cause = "" if last.cause is None else last.cause.value
            return Gone(last.requeued, now.why or last.reason or cause)
    return None


def _job_gone(job_id: str, runner: CommandRunner) -> Gone | None:
    """By Slurm: a job that was killed with all that belongs to it has told nothing."""
    try:
        found = standing.look(job_id, runner, warn=False)
    except DataError:
        return None  # of an array's tasks nobody knows which one is meant
    return Gone(back=found.waits) if found.gone or found.waits else None

"""What each step of an attempt keeps about itself, and the attempt that they make together.

A script may start several programs under ``ft-run``, also beside each other. Rank 0 of each keeps
a file of its own, because two that changed one file would lose what the other one wrote. The
attempt in the ledger is made of all these files by whoever has changed one; a step that finds
another file changed meanwhile makes it once more, so that the last to write has seen everything.
Nothing is locked, since file servers lose locks in either direction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_ext.domain.attempt import MAX_STEPS, Attempt, Attempts, Cause, StepRecord, as_step
from slurm_ext.domain.errors import ProtocolError
from slurm_ft import status
from slurm_ft.requeue import attempts as ledger

# A session renews its status every few seconds.
_ALIVE_S = 60.0
# Many steps that begin in one moment; each try is a few small files.
_MOST_TRIES = 8
_MOST_WORDS = 500


def _prefix(job_id: str, number: int) -> str:
    return f"step-{job_id}-{number}-"


def _path(directory: Path, job_id: str, number: int, step: int) -> Path:
    return directory / f"{_prefix(job_id, number)}{step}"


def read(directory: Path, job_id: str, number: int, step: int) -> Attempt | None:
    """What a step has kept; ``None`` where there is nothing that can be used."""
    try:
        known = ledger.load(_path(directory, job_id, number, step), job_id).attempts
    except (ProtocolError, OSError):
        return None
    return known[0] if known else None


def store(directory: Path, whole: Attempts, write: Callable[[Attempts], None]) -> None:
    """Keep the last attempt of ``whole`` as this step's part, and write the ledger of all parts.

    Raises OSError where nothing can be kept; what of it can be written is written all the same.
    """
    mine = whole.attempts[-1]
    job_id, number = whole.job_id, mine.number
    failed: OSError | None = None
    try:
        ledger.store(_path(directory, job_id, number, mine.step), Attempts(job_id, (mine,)))
    except OSError as exc:
        failed = exc
    for _ in range(_MOST_TRIES):
        seen = _stamps(directory, job_id, number)
        others = [
            found
            for step in sorted(seen)
            if step != mine.step and (found := read(directory, job_id, number, step)) is not None
        ]
        alive = [other for other in others if _is_alive(directory, job_id, other)]
        joined = join(mine, others, alive)
        write(replace(whole, attempts=(*whole.attempts[:-1], joined)))
        if _stamps(directory, job_id, number) == seen:
            break
    if failed is not None:
        raise failed


def join(mine: Attempt, others: Sequence[Attempt], alive: Sequence[Attempt]) -> Attempt:
    """The attempt that these steps make together. Pure. ``alive`` are those that are at work.

    One that sent the job back tells of it first, since nothing comes after it. Of those that have
    ended the last one does: what a script does at the end is what it was for.
    """
    if not others:
        return mine
    every = [*others, mine]

    def weight(step: Attempt) -> tuple[bool, bool, float, int]:
        runs = step.ended_s is None and (step is mine or step in alive)
        at_s = step.started_s if step.ended_s is None else step.ended_s
        return step.requeued, runs, at_s, step.step

    told = max(every, key=weight)
    rest = sorted((s for s in every if s is not told), key=lambda s: (s.started_s, s.step))
    if len(rest) > MAX_STEPS:
        ranked = sorted(rest, key=lambda s: (s.cause is not Cause.COMPLETED, s.started_s))
        rest = sorted(ranked[-MAX_STEPS:], key=lambda s: (s.started_s, s.step))
    return replace(
        told,
        started_s=min(step.started_s for step in every),
        steps=tuple(_record(step) for step in rest),
    )


def _record(step: Attempt) -> StepRecord:
    return as_step(replace(step, reason=step.reason[:_MOST_WORDS]))


def _is_alive(directory: Path, job_id: str, step: Attempt) -> bool:
    """Whether rank 0 of a step without an end has said lately that it is at work."""
    if step.ended_s is not None:
        return False
    name = f"status-{job_id}-{step.number}-{step.step}-0.json"
    said = status.read(directory / name)
    if said is None or said.done or said.failed is not None or said.leaving is not None:
        return False
    return time.time() - said.at_s < _ALIVE_S


def _stamps(directory: Path, job_id: str, number: int) -> dict[int, tuple[int, int]]:
    """Which steps have kept something, and what changes when one of them does so again."""
    prefix = _prefix(job_id, number)
    found: dict[int, tuple[int, int]] = {}
    try:
        names = os.listdir(directory)
    except OSError:
        return found  # then this step's own file could not be kept either
    for name in names:
        step = name.removeprefix(prefix)
        if name.startswith(prefix) and step.isdecimal():
            try:
                info = os.stat(directory / name)
            except FileNotFoundError:
                continue  # of an attempt that somebody tidies away
            found[int(step)] = (info.st_ino, info.st_mtime_ns)
    return found

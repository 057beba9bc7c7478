"""One session at a time in a checkpoint directory.

Two steps of one job (``srun ft-run ... & srun ft-run ...``) have the same directory unless the user
says otherwise. Each would delete what the other is writing, and after a requeue both would load
whichever saved last: one model in the place of another. So rank 0 leaves its name in the directory,
and a session that finds the name of another step that is still at work is an error.

At work is who keeps renewing its status. A step that was killed does not, so it costs the next one
a wait and no more; nothing is locked, since locks of file servers are lost in either direction.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError
from slurm_ft import status, variables
from slurm_ft.session.settings import Settings

CLAIM = ".session.json"
_MOST_BYTES = 8192
# Rank 0 of a session renews its status this many times while another one watches it.
_RENEWALS = 2.5
_POLL_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who uses the directory: a step of an attempt of a job, and the status of its rank 0."""

    job_id: str
    attempt: int
    step_id: str
    status: str


def take(settings: Settings, environ: Mapping[str, str]) -> str:
    """Take the directory for this session, on rank 0. Returns who has it, empty where it is ours.

    A directory that cannot be written is found out by the first save, which tells it better.
    """
    step_id = environ.get("SLURM_STEP_ID", "")
    if settings.status is None or not step_id:
        return ""
    root = settings.checkpoint_dir
    mine = Claim(settings.job_id, settings.attempt, step_id, os.path.abspath(settings.status))
    other = _read(root / CLAIM)
    if other is not None and _is_beside(other, mine) and _at_work(other, settings):
        return (
            f"{root}: step {other.step_id} of this job keeps its checkpoints there: give each step"
            f" a directory of its own (ft-run --checkpoint-dir, or {variables.CHECKPOINT_DIR})"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        status.replace_text(root / CLAIM, dumps(mine) + "\n")
    except OSError as exc:
        _log.debug("%s: not claimed: %s", root, exc)
    return ""


def _is_beside(other: Claim, mine: Claim) -> bool:
    """Whether both belong to one attempt: whoever belongs to an earlier one is gone."""
    return (other.job_id, other.attempt) == (mine.job_id, mine.attempt) and (
        other.step_id != mine.step_id
    )


def _at_work(other: Claim, settings: Settings) -> bool:
    path = Path(other.status)
    end = time.monotonic() + _RENEWALS * settings.progress_interval_s
    first = status.read(path)
    last = first
    while last is not None and first is not None and time.monotonic() < end:
        if last.done or last.failed is not None or last.leaving is not None:
            return False
        if last.at_s != first.at_s:
            return True
        time.sleep(_POLL_S)
        last = status.read(path)
    return False


def _read(path: Path) -> Claim | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError:
        return None
    try:
        return loads(Claim, data.decode(errors="replace"), str(path))
    except ProtocolError:
        return None

"""One session at a time in a checkpoint directory.

Two steps of one job (``srun ft-run ... & srun ft-run ...``) have the same directory unless the user
says otherwise, and two jobs have where a script names one. Each would delete what the other is
writing, and after a requeue both would load whichever saved last: one model in the place of
another. So rank 0 leaves its name in the directory, and a session that finds the name of another
step or job that is still at work is an error.

Steps that a script starts with ``&`` come here in the same moment. So names are numbered, and
nobody overwrites one: of those that have found the same last name to be of no account, one makes
the next number, and the others look at what it says.

At work is who keeps renewing its status; one that has none yet is about to have it. A step that was
killed does not, so it costs the next one a wait and no more, and nothing where that was long ago;
nothing is locked, since locks of file servers are lost in either direction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.codec import dumps, loads
from slurm_ext.domain.errors import ProtocolError
from slurm_ft import status, variables
from slurm_ft.session.settings import Settings

CLAIM = ".session-{number}.json"
_CLAIM = re.compile(r"\.session-([0-9]{1,9})\.json")
_MOST_BYTES = 8192
# Rank 0 of a session renews its status this many times while another one watches it.
_RENEWALS = 2.5
_POLL_S = 0.2
# Whoever has said nothing for so long is gone. Clocks of nodes differ by less: munge sees to that.
_OLD_S = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who uses the directory since when (seconds since the epoch): a step of an attempt of a job,
    and the status of its rank 0.
    """

    job_id: str
    attempt: int
    step_id: str
    status: str
    at_s: float


def take(settings: Settings, environ: Mapping[str, str]) -> str:
    """Take the directory for this session, on rank 0. Returns who has it, empty where it is ours.

    A directory that cannot be written is found out by the first save, which tells it better.
    """
    step_id = environ.get("SLURM_STEP_ID", "")
    if settings.status is None or not step_id:
        return ""
    root = settings.checkpoint_dir
    status_path = os.path.abspath(settings.status)
    mine = Claim(settings.job_id, settings.attempt, step_id, status_path, time.time())
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            number, other = _newest(root)
            if other is not None and _is_beside(other, mine) and _at_work(other, settings):
                return _told(root, other, mine)
            # Whoever was slow may make a number that was made and removed meanwhile.
            if _made(root, number + 1, mine) and _newest(root)[0] == number + 1:
                _forget(root, number)
                return ""
    except OSError as exc:
        _log.debug("%s: not claimed: %s", root, exc)
        return ""


def _newest(root: Path) -> tuple[int, Claim | None]:
    """The last name and its number, 0 where there is none. Raises OSError."""
    matches = (_CLAIM.fullmatch(name) for name in os.listdir(root))
    number = max((int(match[1]) for match in matches if match), default=0)
    return number, _read(root / CLAIM.format(number=number)) if number else None


def _made(root: Path, number: int, mine: Claim) -> bool:
    """Leave the name under this number, whole and at once, unless somebody else has.

    Raises OSError, also where the file system knows no links.
    """
    written = root / f".session-{mine.job_id}-{mine.step_id}.new"
    status.replace_text(written, dumps(mine) + "\n")
    try:
        os.link(written, root / CLAIM.format(number=number))
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            written.unlink()
    return True


def _forget(root: Path, last: int) -> None:
    """Remove the names up to this number."""
    for name in os.listdir(root):
        match = _CLAIM.fullmatch(name)
        if match and int(match[1]) <= last:
            with contextlib.suppress(OSError):
                (root / name).unlink()


def _told(root: Path, other: Claim, mine: Claim) -> str:
    option = f"(ft-run --checkpoint-dir, or {variables.CHECKPOINT_DIR})"
    if other.job_id == mine.job_id:
        return (
            f"{root}: step {other.step_id} of this job keeps its checkpoints there: give each step"
            f" a directory of its own {option}"
        )
    return (
        f"{root}: job {other.job_id} is at work and keeps its checkpoints there: give each job a"
        f" directory of its own {option}, or start this one when that one has ended (sbatch"
        f" --dependency=afterany:{other.job_id})"
    )


def _is_beside(other: Claim, mine: Claim) -> bool:
    """Whether both can be at work: whoever belongs to an earlier attempt is gone."""
    if other.job_id == mine.job_id:
        return other.attempt == mine.attempt and other.step_id != mine.step_id
    return True


def _at_work(other: Claim, settings: Settings) -> bool:
    """Whether its status is renewed, or made, while we look."""
    path = Path(other.status)
    end = time.monotonic() + _RENEWALS * settings.progress_interval_s
    first = status.read(path)
    last = first
    while time.monotonic() < end:
        if time.time() - max(other.at_s, 0.0 if last is None else last.at_s) > _OLD_S:
            return False
        if last is not None:
            if last.done or last.failed is not None or last.leaving is not None:
                return False
            if first is None or last.at_s != first.at_s:
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

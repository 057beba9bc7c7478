"""Whether the checkpoint directory can be used, tried before the first step by rank 0.

Only what somebody has to mend is refused: rights, a name that is a file. A disk that is full or a
file server that is away may be well when the first save comes, and a job that has come back must
not end for good because of them.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from pathlib import Path

from slurm_ft import variables
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import TEMPORARY, names_in

_LASTS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
    }
)

_log = logging.getLogger(__name__)


def fault(root: Path, *, writes: bool) -> str:
    """Why nothing can be kept in the directory, empty where it can, or may later.

    What is made for the trial has the name of an unfinished save, which the next save removes
    where this process is killed in between.
    """
    try:
        names_in(root)
        if writes:
            root.mkdir(parents=True, exist_ok=True)
            probe = root / f"{TEMPORARY}trial-{secrets.token_hex(6)}"
            probe.mkdir(mode=0o700)
            os.rmdir(probe)
    except CheckpointError as exc:
        # Its cause is what the system said.
        number = exc.__cause__.errno if isinstance(exc.__cause__, OSError) else None
        return _told(root, number, str(exc))
    except OSError as exc:
        return _told(
            root,
            exc.errno,
            f"{root}: checkpoints cannot be written there ({exc.strerror}): mend its rights, or"
            f" name another directory (ft-run --checkpoint-dir, or {variables.CHECKPOINT_DIR})",
        )
    return ""


def _told(root: Path, number: int | None, words: str) -> str:
    if number in _LASTS:
        return words
    _log.warning("%s: no use at present; saves are tried all the same", words)
    return ""

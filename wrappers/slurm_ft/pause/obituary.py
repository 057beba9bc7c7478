"""What a rank's ft-run tells the store when its program has died: nobody needs to wait for it.

A program that leaves a pause in order tells it itself. This is for those that cannot: killed, or
ended by an error while the others are paused. Best effort and short: it must not hold up a requeue.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.pause.address import find_address, step_of
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.protocol import Key

_log = logging.getLogger(__name__)
_ANSWER_S = 1.0


def tell(state_dir: str, job_id: str, attempt: int, rank: int) -> bool:
    """Tell that this rank has ended; whether somebody was there to hear it."""
    if not state_dir:
        return False
    try:
        address = find_address(Path(state_dir), job_id, attempt, step_of(os.environ))
        if address is None:
            return False
        store = NetStore(address, _ANSWER_S)
        try:
            store.write(1, Key.GONE, 1 << rank)
        finally:
            store.close()
    except SlurmExtError as exc:
        _log.debug("pause: nobody heard that rank %d ended: %s", rank, exc)
        return False
    return True

"""``ft-run --after=CODE``: the batch script asks whether somebody has decided about its step.

Where Slurm kills a whole step at once (an MPI step that lost a rank, --kill-on-bad-exit), no
ft-run of the step is left to requeue the job; the batch script is. Nothing is done where the
attempt is closed, where its step ended well, or where no ft-run ever opened it: then there is
either nothing to decide or nothing known to decide from.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from slurm_ext.domain.errors import ProtocolError
from slurm_ft import status
from slurm_ft.launch import supervise
from slurm_ft.launch.environment import choose_paths, find_spool
from slurm_ft.launch.identity import Identity
from slurm_ft.launch.lead import Lead
from slurm_ft.launch.marks import MOST_TERMS, Marks
from slurm_ft.requeue import attempts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_ft.launch.options import Options


def conclude(options: Options, own: dict[str, str], tell: Callable[[str], None]) -> int:
    """Decide in the place of a step of which nobody is left. Returns the code of --after."""
    code = int(options["after"])
    identity = Identity(own, (), "no")
    if not code or not identity.job_id:
        return code
    paths = choose_paths(identity, options)
    if not _is_open(paths.state_dir, identity):
        return code
    step = _last_step(paths.state_dir, identity)
    marks = Marks(paths.state_dir, identity.job_id, identity.attempt, step)
    if marks.decided() or marks.stopped() is not None:
        return code
    # The requeue is followed by a TERM to this very process.
    supervise.block((signal.SIGTERM,))
    find_spool(paths, identity)
    ending = supervise.Ending()
    # Rank 0's ft-run has left nothing, so it was killed, whatever srun saw of the other ranks.
    ending.code = 128 + signal.SIGKILL
    ending.ended_s = time.time()
    lead = Lead(identity, options, paths, own, (), marks, tell)
    said = _last_word(paths.state_dir, identity, step)
    lead.stand_in(ending, MOST_TERMS - 1, "no ft-run of its step is left", said)
    return code


def _is_open(state_dir: str, identity: Identity) -> bool:
    """Whether the ledger has this attempt without an end, or with one that was to be requeued."""
    path = Path(state_dir, attempts.file_name(identity.job_id))
    try:
        known = attempts.load(path, identity.job_id).attempts
    except (ProtocolError, OSError):
        return False
    last = known[-1] if known else None
    if last is None or last.number != identity.attempt:
        return False
    return last.ended_s is None or last.requeued


def _last_step(state_dir: str, identity: Identity) -> int:
    """The newest step of this attempt under ft-run: steps have numbers that grow."""
    prefix = f"lead-{identity.job_id}-{identity.attempt}-"
    found = [
        name.removeprefix(prefix).partition("-")[0]
        for name in os.listdir(state_dir)
        if name.startswith(prefix)
    ]
    return max((int(step) for step in found if step.isdigit()), default=0)


def _last_word(state_dir: str, identity: Identity, step: int) -> status.Status | None:
    """What the sessions of the step said last; one that says why it left goes before others."""
    prefix = f"status-{identity.job_id}-{identity.attempt}-{step}-"
    said = [
        found
        for name in os.listdir(state_dir)
        if name.startswith(prefix) and (found := status.read(Path(state_dir, name))) is not None
    ]
    return max(said, key=lambda s: (s.leaving is not None, s.at_s), default=None)

"""``ft-run --after=CODE``: the batch script asks whether somebody has decided about its step.

Where Slurm kills a whole step at once (an MPI step that lost a rank, --kill-on-bad-exit), no
ft-run of the step is left to requeue the job; the batch script is. Nothing is done where the
attempt is closed, where its step ended well, or where no ft-run ever opened it: then there is
either nothing to decide or nothing known to decide from. But a step that Slurm could not start on
all of its nodes has failed by no fault of the program's, whether or not an ft-run got that far.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from slurm_ext.domain.errors import ProtocolError
from slurm_ft import status
from slurm_ft.launch import supervise
from slurm_ft.launch.environment import choose_paths, find_spool, prepare
from slurm_ft.launch.identity import Identity
from slurm_ft.launch.lead import Lead
from slurm_ft.launch.marks import MOST_TERMS, Marks
from slurm_ft.requeue import attempts, steps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from slurm_ext.domain.attempt import Attempt
    from slurm_ft.launch.options import Options

# What srun ends with where a node does not take the launch: the low byte of Slurm's own numbers
# for a connection, a message sent or received, a shut connection, an authentication that failed
# (1001-1004 and 1007; 233 seen on 24.11 with a dead slurmd). Above every 128 + signal.
_UNLAUNCHED = frozenset({233, 234, 235, 236, 239})


def conclude(options: Options, own: dict[str, str], tell: Callable[[str], None]) -> int:
    """Decide in the place of a step of which nobody is left. Returns the code of --after."""
    code = int(options["after"])
    identity = Identity(own, (), "no")
    if not code or not identity.job_id:
        return code
    paths = choose_paths(identity, options)
    step = _last_step(paths.state_dir, identity)
    kept = _kept(paths.state_dir, identity, step)
    if kept is None:
        if code not in _UNLAUNCHED:
            return code
        # Nobody was there to make the directories.
        prepare(paths, identity)
    if kept is not None and kept.ended_s is not None and not kept.requeued:
        return code
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
    ending.unlaunched = said is None and code in _UNLAUNCHED
    lead.stand_in(ending, MOST_TERMS - 1, "no ft-run of its step is left", said)
    return code


def _kept(state_dir: str, identity: Identity, step: int) -> Attempt | None:
    """What is kept of this step of the attempt; ``None`` where no ft-run has opened it."""
    last = steps.read(Path(state_dir), identity.job_id, identity.attempt, step)
    if last is None:
        path = Path(state_dir, attempts.file_name(identity.job_id))
        try:
            known = attempts.load(path, identity.job_id).attempts
        except (ProtocolError, OSError):
            return None
        last = known[-1] if known else None
    return last if last is not None and last.number == identity.attempt else None


def _last_step(state_dir: str, identity: Identity) -> int:
    """The newest step of this attempt under ft-run: steps have numbers that grow."""
    prefix = f"lead-{identity.job_id}-{identity.attempt}-"
    try:
        names = os.listdir(state_dir)
    except OSError:
        return 0
    found = [
        name.removeprefix(prefix).partition("-")[0] for name in names if name.startswith(prefix)
    ]
    return max((int(step) for step in found if step.isdigit()), default=0)


def _last_word(state_dir: str, identity: Identity, step: int) -> status.Status | None:
    """What the sessions of the step said last; one that says why it left goes before others."""
    prefix = f"status-{identity.job_id}-{identity.attempt}-{step}-"
    try:
        names = os.listdir(state_dir)
    except OSError:
        return None
    said = [
        found
        for name in names
        if name.startswith(prefix) and (found := status.read(Path(state_dir, name))) is not None
    ]
    return max(said, key=lambda s: (s.leaving is not None, s.at_s), default=None)

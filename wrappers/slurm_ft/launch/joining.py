"""Ranks that wait for each other, and one that will never come.

A program waits for the others of its own accord, a quarter of an hour by default. A rank that could
not start says so in the state directory, and every other rank's ft-run looks there until its own
program has met the others: a session is open, or the time for joining is over.
"""

from __future__ import annotations

import os
import time

from slurm_ft import variables
from slurm_ft.launch.limited import LateError, within
from slurm_ft.launch.pulse import BEAT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from slurm_ft.launch.environment import Paths
    from slurm_ft.launch.errors import LaunchError
    from slurm_ft.launch.identity import Identity
    from slurm_ft.launch.marks import Marks
    from slurm_ft.launch.options import Options
    from slurm_ft.launch.pulse import Pulse
    from slurm_ft.launch.supervise import Orders, Supervisor

# As many ranks add a second between two looks at what one of them may have said.
RANKS_PER_LOOK = 50
# What a look at the state directory may take.
FILES_S = 1.0


def await_others(
    orders: Orders,
    identity: Identity,
    paths: Paths,
    marks: Marks,
    environment: Mapping[str, str],
    pulse: Pulse | None = None,
) -> None:
    """Have the loop look whether a rank could not start, until the ranks have found each other.

    A program waits for the others of its own accord for a quarter of an hour.
    """
    if not paths.state_dir:
        return
    if pulse is not None:
        pulse.beat()
    if identity.size == 1:
        return
    joined = False
    end = time.monotonic() + float(environment[variables.INIT_TIMEOUT_S])
    under_way = False
    found: tuple[int, int, str] | None = None

    def ask_files() -> None:
        nonlocal joined, under_way, found
        under_way = True
        try:
            if pulse is not None:
                pulse.beat()
            joined = joined or time.monotonic() > end or has_session(paths.status)
            found = None if joined else marks.stopped()
        finally:
            under_way = False

    def look(supervisor: Supervisor) -> None:
        # A file server that hangs must not keep signals from the program.
        if not under_way:
            # Not by contextlib, which costs every rank an import at its start.
            try:  # noqa: SIM105
                within(FILES_S, ask_files)
            except (LateError, OSError):
                pass
        if found is not None:
            supervisor.end(found[1], found[2])
        elif joined and pulse is None:
            orders.look = None

    orders.look = look
    # Every look of every rank goes to one file server.
    orders.look_s = BEAT_S if pulse is not None else BEAT_S + identity.size / RANKS_PER_LOOK


def fail(
    error: LaunchError,
    identity: Identity,
    options: Options,
    paths: Paths,
    marks: Marks,
    tell: Callable[[str], None],
) -> int:
    """Tell the other ranks that this one will never come. Returns the exit code of ft-run."""
    if identity.size == 1 or not marks.hook:
        raise error
    node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    why = f"rank {identity.rank} on {node} could not start: {error}"
    if marks.stop(identity.rank, error.code, why):
        tell(f"{why}; the other ranks are ended")
    if identity.leads and identity.job_id:
        from slurm_ft.launch.lead import Lead

        Lead(identity, options, paths, {}, options.command, marks, tell).refuse(why, error.code)
    return error.code


def has_session(path: str) -> bool:
    """Whether a session has written its status, and so takes the signals itself."""
    from pathlib import Path

    from slurm_ft import status

    return bool(path) and status.exists(Path(path))

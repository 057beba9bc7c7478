"""Pictures of a replay in one directory, and whether they can be drawn before hours go into it.

``jct``: share of jobs that are done within a time. ``utilisation``: share of the GPUs in use over
time. ``gantt``: who held which GPUs when, and how many jobs waited; left out where a policy made
so many runs that it would be a grey block.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from slurm_ext.domain.errors import DataError, SlurmExtError
from slurm_ext.sim import curves, gantt
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.model import Schedule

FORMATS = ("png", "svg", "pdf")
GANTT_RUNS = 2000


def check_plots(folder: Path) -> None:
    """Raise where pictures cannot be drawn or the directory cannot be made."""
    if find_spec("matplotlib") is None:
        raise SlurmExtError(f"--plots {folder}: {curves.NO_MATPLOTLIB}")
    if folder.exists() and not folder.is_dir():
        raise _refused(folder, errno.ENOTDIR)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise _refused(folder, errno.EACCES if there.is_dir() else errno.ENOTDIR)


def check_file(path: Path) -> None:
    """Raise where the file cannot be written."""
    if path.is_dir():
        raise _refused(path, errno.EISDIR)
    if path.exists():
        if not os.access(path, os.W_OK):
            raise _refused(path, errno.EACCES)
    elif not path.parent.is_dir():
        raise _refused(path, errno.ENOENT)
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise _refused(path, errno.EACCES)


def _refused(path: Path, number: int) -> DataError:
    return DataError(str(path), f"cannot be written: {os.strerror(number)}", "name another")


def draw(
    folder: Path, suffix: str, schedules: Mapping[str, Schedule], hardware: Hardware, title: str
) -> list[str]:
    """Draw all pictures; what was left out, in words."""
    runs = {name: schedule.runs for name, schedule in schedules.items()}
    few = {name: found for name, found in runs.items() if len(found) <= GANTT_RUNS}
    try:
        curves.draw_jct(runs, folder / f"jct.{suffix}", title)
        curves.draw_utilisation(runs, hardware.gpus, folder / f"utilisation.{suffix}", title)
        if few:
            typed = len(hardware.gpu_types) > 1
            nodes = {node.name: node for node in hardware.inventory()}
            gantt.draw(
                few,
                {name: node.gpus for name, node in nodes.items()},
                folder / f"gantt.{suffix}",
                title,
                {name: f"{name} {node.gpu_type}" for name, node in nodes.items()} if typed else {},
            )
    except OSError as exc:
        raise DataError(str(folder), f"cannot be written: {exc.strerror}", "name another") from exc
    if len(few) == len(runs):
        return []
    missing = ", ".join(name for name in runs if name not in few)
    return [f"no Gantt chart of {missing}: more than {GANTT_RUNS} runs"]

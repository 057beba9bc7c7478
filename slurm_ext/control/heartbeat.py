"""The heartbeat: a small file that every complete cycle replaces, and the question of its age.

Only a cycle that saw Slurm completely and finished its writes beats. A daemon that hangs, crashes
in a loop or cannot see Slurm therefore grows stale, and the independent release timer gives every
job back. Starting up does not beat, else a daemon that crashes at each start would look alive.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.control.files import replace_file
from slurm_ext.domain.errors import DataError


@dataclass(frozen=True, slots=True)
class Beat:
    """What the daemon said at the end of its last complete cycle."""

    at_s: float
    pid: int
    lease_s: float
    cycle: int


def beat(path: Path, at_s: float, lease_s: float, cycle: int) -> None:
    """Say that a cycle has completed. Raises DataError where the file cannot be written.

    The directory is made where it is absent: the unit makes it, a daemon run by hand has none.
    """
    text = json.dumps({"at_s": at_s, "pid": os.getpid(), "lease_s": lease_s, "cycle": cycle})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(), mode=0o644)
    except OSError as exc:
        raise DataError(
            str(path),
            f"cannot be written: {exc.strerror}",
            f"install -d -o slurm-ext {path.parent}, or set heartbeat",
        ) from exc


def last_beat(path: Path) -> Beat | None:
    """The last beat, ``None`` where there is none or it cannot be understood."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Beat(
            at_s=float(raw["at_s"]),
            pid=int(raw["pid"]),
            lease_s=float(raw["lease_s"]),
            cycle=int(raw["cycle"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_stale(path: Path, now_s: float) -> bool:
    """Whether the daemon has to be taken for gone: no beat for longer than its lease.

    No beat at all is stale as well: the machine may have been rebooted. A beat from the future
    (a clock set back) counts as fresh for one lease at most.
    """
    last = last_beat(path)
    return last is None or abs(now_s - last.at_s) > last.lease_s

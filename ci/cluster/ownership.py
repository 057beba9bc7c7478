"""Who owns a cluster, so that one whose owner was killed can be recognised and removed.

The owner is a process, named by machine, PID namespace, PID and start time: a recycled PID is not
taken for the owner, and a process that we cannot see (another machine or container on the same
engine) is never declared dead.
"""

from __future__ import annotations

import os
from pathlib import Path

# Owner of clusters that people keep on purpose.
KEPT = "kept"


def this_process() -> str:
    return f"{_place()}:{os.getpid()}:{_start_time(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Whether the owner is certainly gone."""
    parts = owner.split(":")
    if owner == KEPT or len(parts) != 4 or ":".join(parts[:2]) != _place():
        return False
    return _start_time(int(parts[2])) != parts[3]


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}:{namespace}"


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat, or an empty string when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The command name, in parentheses, may hold spaces.
    return stat.rpartition(")")[2].split()[19]

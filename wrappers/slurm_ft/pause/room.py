"""How much host memory one rank may take for what a pause moves there.

All ranks of a node move at the same moment, and each sees the same free memory: what one may take
is its share. A job is bounded by Slurm's cgroup as well, often far below what the node has free,
and a process that goes over it is killed: the smallest bound on the way up counts. Reads the
kernel's files alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_ft.pause.ladder import PartError

# What the program itself takes meanwhile: data loaders, a page cache that is in use.
_SHARE = 0.9
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMORY_V1 = "memory"


def host_room(environ: Mapping[str, str], proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that this rank may allocate. Raises PartError where the kernel does not tell."""
    free = min([_available(proc / "meminfo"), *_bounds(proc / "self" / "cgroup", cgroups)])
    return max(0, int(free * _SHARE)) // ranks_here(environ)


def ranks_here(environ: Mapping[str, str]) -> int:
    """Ranks on this node, as the launcher or Slurm says; 1 where nobody does."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        number = environ.get(name, "")
        if number.isdecimal():
            return max(1, int(number))
    counts = _repeated(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    if node.isdecimal() and int(node) < len(counts):
        return max(1, counts[int(node)])
    return max(1, *counts) if counts else 1


def _repeated(text: str) -> list[int]:
    """``4(x2),3`` as 4, 4, 3; empty where it is nothing of the kind."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        number, _, times = part.partition("(x")
        times = times.removesuffix(")") or "1"
        if not number.isdecimal() or not times.isdecimal():
            return []
        found += [int(number)] * int(times)
    return found


def _available(meminfo: Path) -> int:
    """What could be allocated on the whole node without swapping."""
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise PartError(f"{meminfo} does not tell how much memory is available")


def _bounds(own: Path, cgroups: Path) -> Iterator[int]:
    """What is left below each limit of a memory cgroup from this process up to the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # a kernel without cgroups
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif _MEMORY_V1 in controllers.split(","):
            root = cgroups / _MEMORY_V1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = root / path.strip("/")
        while True:
            left = _left(here, *names)
            if left is not None:
                yield left
            if here == root or root not in here.parents:
                break
            here = here.parent


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """``None`` where this level has no limit, or is not visible from inside a container."""
    try:
        most = (folder / limit).read_text().strip()
        taken = int((folder / used).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not most.isdecimal():
        return None
    # Cached files count as used until the kernel needs their place.
    cached = sum(int(row.split()[1]) for row in stat if row.split()[:1] == [reclaimable])
    return max(0, int(most) - taken + cached)

"""How much memory a switch may take, on the host and on the device."""

from __future__ import annotations

from pathlib import Path

import torch

# Of what is free; the rest is for whatever else grows on the node while the switch runs.
_HOST_SHARE = 0.5
_DEVICE_SHARE = 0.8
_MEMINFO = Path("/proc/meminfo")


def host_free(ranks_on_node: int, meminfo: Path = _MEMINFO) -> int | None:
    """Bytes of host memory that each of a node's ranks may take; ``None`` where unknown.

    A cgroup's limit counts where it is below what the node has left.
    """
    free = _available(meminfo)
    for place in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.high")):
        limit = _number(place)
        if limit is not None:
            left = limit - (_number(Path("/sys/fs/cgroup/memory.current")) or 0)
            free = left if free is None else min(free, left)
    return None if free is None else max(0, int(free * _HOST_SHARE) // max(1, ranks_on_node))


def device_free(device: torch.device, ranks_on_node: int) -> int:
    """Bytes that a prefetch may take beside the task that still runs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return (host_free(ranks_on_node) or 0) // 2


def _available(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None

"""MASTER_PORT: the same on every rank without asking anybody.

A pure function of job, step and attempt. It stays out of the kernel's ephemeral range, where any
outgoing connection may already hold it, and changes with the attempt, because a killed attempt may
have left its port in TIME_WAIT or held by a process that is still being killed.
"""

from __future__ import annotations

# Above the ports of Slurm's own daemons (6817 to 6820) and of most services.
_LOWEST = 10_000
_HIGHEST = 65_535
# A slot holds MASTER_PORT and three more for whatever the program opens next to it.
_SLOT = 4
# Below this many slots jobs of one node would meet too often; then the ephemeral range is used.
_FEWEST_SLOTS = 64
_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_DEFAULT_RANGE = (32_768, 60_999)
# Primes, so that steps and attempts walk through all slots.
_STEP = 7_919
_ATTEMPT = 1_009


def ephemeral_range(path: str = _RANGE_FILE) -> tuple[int, int]:
    """The kernel's range, or its usual value where it cannot be read."""
    try:
        with open(path, encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        return _DEFAULT_RANGE
    return (low, high) if low <= high else _DEFAULT_RANGE


def choose_port(job: int, step: int, attempt: int, ephemeral: tuple[int, int]) -> int:
    """A port outside ``ephemeral``, another one for each attempt of a step.

    Jobs with neighbouring ids get different ports: they often share a node.
    """
    low, high = ephemeral
    slots = [range(_LOWEST, min(low, _HIGHEST + 1) - _SLOT + 1, _SLOT)]
    slots.append(range(max(high + 1, _LOWEST), _HIGHEST - _SLOT + 2, _SLOT))
    total = sum(len(part) for part in slots)
    if total < _FEWEST_SLOTS:
        slots = [range(_LOWEST, _HIGHEST - _SLOT + 2, _SLOT)]
        total = len(slots[0])
    while total % _STEP == 0 or total % _ATTEMPT == 0:
        total -= 1
    index = (job + step * _STEP + attempt * _ATTEMPT) % total
    for part in slots:
        if index < len(part):
            return part[index]
        index -= len(part)
    raise AssertionError("an index below the number of slots lies in one of the parts")

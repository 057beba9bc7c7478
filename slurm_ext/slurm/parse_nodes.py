"""``scontrol -o show node / partition / reservation / topology``: one line of key=value per thing.

A node's reason, comment and extra text are typed by administrators and may hold ``State=`` or
anything else; they come after the fields that matter, so the *first* occurrence of a key counts.
GPUs come from Gres and GresUsed as well as from CfgTRES and AllocTRES: where a site does not list
gres/gpu in AccountingStorageTRES, the TRES know nothing of them, and every GPU would look free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.node import Node, Partition, Reservation, Topology
from slurm_ext.domain.nodelist import expand
from slurm_ext.domain.tres import parse_gpu_request, parse_tres
from slurm_ext.domain.walltime import parse_slurm_limit
from slurm_ext.slurm.state import node_available

SOURCE = "scontrol"
_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w:/.]*)=(\S*)")
_REASON = re.compile(r"\sReason=(.*?)(?: \[[^\]]*\])?(?:\s+(?:Comment|Extra|InstanceId)=.*)?$")
_NONE = frozenset({"", "(null)", "N/A", "NONE", "None", "UNLIMITED"})


def pairs(line: str) -> dict[str, str]:
    """Keys and values of one line; of equal keys the first counts."""
    found: dict[str, str] = {}
    for key, value in _PAIR.findall(line):
        found.setdefault(key, value)
    return found


def _words(text: str) -> frozenset[str]:
    return frozenset(w for w in text.split(",") if w and w not in _NONE)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _need(found: dict[str, str], key: str, line: str) -> str:
    try:
        return found[key]
    except KeyError:
        raise SourceMissingError(SOURCE, f"no {key} in {line[:100]!r}: cut off?") from None


T = TypeVar("T")


def _whole(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A value that ends in its middle is a cut, like a line that lacks a key."""

    @wraps(parse)
    def checked(line: str) -> T:
        try:
            return parse(line)
        except (DataError, ValueError) as exc:
            raise SourceMissingError(SOURCE, f"{line[:100]!r}: {exc}: cut off?") from exc

    return checked


@_whole
def parse_node(line: str) -> Node:
    """One ``NodeName=`` line."""
    found = pairs(line)
    state = _need(found, "State", line)
    configured = parse_tres(_need(found, "CfgTRES", line))
    held = parse_tres(_need(found, "AllocTRES", line))
    gres = parse_gpu_request(found.get("Gres", ""))
    used = parse_gpu_request(found.get("GresUsed", ""))
    types = configured.gpu_types or gres.gpu_types
    reason = _REASON.search(line)
    return Node(
        name=_need(found, "NodeName", line),
        gpus=configured.gpus if configured.gpus is not None else (gres.gpus or 0),
        gpu_type=next(iter(types)) if len(types) == 1 else "",
        gpus_alloc=max(held.gpus or 0, used.gpus or 0),
        cpus=_number(found.get("CPUEfctv", "")) or _number(found.get("CPUTot", "")) or 1,
        cpus_alloc=_number(found.get("CPUAlloc", "")) or 0,
        memory_mib=_number(found.get("RealMemory", "")) or 0,
        memory_alloc_mib=_number(found.get("AllocMem", "")) or 0,
        features=_words(found.get("ActiveFeatures", "")),
        partitions=_words(found.get("Partitions", "")),
        available=node_available(state),
        state=state,
        reason=reason[1] if reason else "",
    )


@_whole
def parse_partition(line: str) -> Partition:
    """One ``PartitionName=`` line. "UNLIMITED" gives ``None``."""
    found = pairs(line)
    limit = _need(found, "MaxTime", line)
    return Partition(
        name=_need(found, "PartitionName", line),
        node_names=expand(_need(found, "Nodes", line)),
        available=_need(found, "State", line) == "UP",
        max_time_s=parse_slurm_limit(limit),
        max_nodes=_number(found.get("MaxNodes", "")),
        min_nodes=_number(found.get("MinNodes", "")) or None,
        priority_tier=_number(found.get("PriorityTier", "")) or 1,
        preempt_mode=found.get("PreemptMode", "OFF"),
        grace_s=float(_number(found.get("GraceTime", "")) or 0),
        default=found.get("Default") == "YES",
        qos="" if found.get("QoS", "") in _NONE else found["QoS"],
    )


@_whole
def parse_reservation(line: str) -> Reservation:
    """One ``ReservationName=`` line; times as epoch seconds."""
    found = pairs(line)
    return Reservation(
        name=_need(found, "ReservationName", line),
        node_names=expand(_need(found, "Nodes", line)),
        start_s=float(_need(found, "StartTime", line)),
        end_s=float(_need(found, "EndTime", line)),
    )


def parse_topology(lines: Iterable[str]) -> Topology:
    """``SwitchName=`` (tree) or ``BlockName=`` (block) lines.

    A leaf is the lowest switch that names nodes itself: Slurm lists the nodes of a higher switch
    too, so those with ``Switches=`` only give parents.
    """
    leaf_of: dict[str, str] = {}
    parent_of: dict[str, str] = {}
    for line in lines:
        found = pairs(line)
        name = found.get("SwitchName") or found.get("BlockName")
        if not name:
            continue
        children = found.get("Switches", "")
        if children and children not in _NONE:
            for child in expand(children):
                parent_of[child] = name
        else:
            for node in expand(found.get("Nodes", "")):
                leaf_of[node] = name
    return Topology(leaf_of, parent_of)

"""Which nodes a chosen configuration gets: fewest nodes, whole nodes first, best fit for the rest.

Pure: the free parts of nodes come in, seats go out. A configuration is seated exactly in the
placement that its estimate was made for (``(4, 4)`` is four GPUs on each of two nodes): spread
otherwise it would run at a speed that nobody measured. A candidate that finds no seat is told to
the caller, who removes it and solves again.

The choice a reader would question: requests are seated largest share per node first, not in queue
order. The caller only hands in jobs that all start now, so their order does not matter to them,
and seating small parts first would break up the whole nodes that large ones need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.domain.node import Node, Topology


class TopologyRule(StrEnum):
    """How strongly the nodes of one job should share a leaf switch."""

    IGNORE = "ignore"
    PREFERRED = "preferred"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Request:
    """One job to be seated. ``placement`` is GPUs per node, ``cpus`` and ``memory_mib`` per GPU.

    ``allowed`` restricts the nodes (empty = any node of the pool), ``excluded`` closes some.
    """

    job_id: str
    placement: tuple[int, ...]
    cpus: float = 0.0
    memory_mib: float = 0.0
    allowed: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    exclusive: bool = False


@dataclass(slots=True)
class _Room:
    """What is still free on one node while requests are seated."""

    name: str
    gpus: int
    cpus: int
    memory_mib: int
    tracks_memory: bool
    idle: bool
    leaf: str


@dataclass(frozen=True, slots=True)
class Seating:
    """``seats`` maps job id to node names, in the order of its placement; the rest is unseated."""

    seats: Mapping[str, tuple[str, ...]]
    unseated: tuple[str, ...]


def _rooms(nodes: Iterable[Node], topology: Topology, need_gpus: bool) -> list[_Room]:
    """The nodes on which something could be seated: full ones only cost time."""
    open_nodes = (n for n in nodes if n.available and (not need_gpus or n.gpus > n.gpus_alloc))
    return [
        _Room(
            name=node.name,
            gpus=node.gpus_free,
            cpus=max(0, node.cpus - node.cpus_alloc),
            memory_mib=max(0, node.memory_mib - node.memory_alloc_mib),
            # A node that reports (almost) no memory does not track it.
            tracks_memory=node.memory_mib > 1,
            idle=node.idle,
            leaf=topology.leaf_of.get(node.name, ""),
        )
        for node in sorted(open_nodes, key=lambda n: n.name)
    ]


def _fits(room: _Room, share: int, request: Request) -> bool:
    if room.gpus < share:
        return False
    if request.exclusive and not room.idle:
        return False
    if request.cpus and room.cpus < request.cpus * share:
        return False
    return not room.tracks_memory or room.memory_mib >= request.memory_mib * share


def _choose(rooms: Sequence[_Room], request: Request) -> list[_Room] | None:
    """Seats for every share of the placement, best fit first; None where one finds none."""
    taken: list[_Room] = []
    names: set[str] = set()
    for share in sorted(request.placement, reverse=True):
        best: _Room | None = None
        for room in rooms:
            if room.name in names or not _fits(room, share, request):
                continue
            if best is None or (room.gpus, room.name) < (best.gpus, best.name):
                best = room
        if best is None:
            return None
        taken.append(best)
        names.add(best.name)
    return taken


def _by_leaf(rooms: Sequence[_Room]) -> list[list[_Room]]:
    """Groups of rooms under one leaf switch, fullest group first (best fit between leaves)."""
    groups: dict[str, list[_Room]] = {}
    for room in rooms:
        groups.setdefault(room.leaf, []).append(room)
    return sorted(groups.values(), key=lambda g: (sum(r.gpus for r in g), g[0].leaf))


def _seat(rooms: Sequence[_Room], request: Request, rule: TopologyRule) -> list[_Room] | None:
    usable = [
        room
        for room in rooms
        if room.name not in request.excluded
        and (not request.allowed or room.name in request.allowed)
    ]
    if rule is TopologyRule.IGNORE or len(request.placement) < 2:
        return _choose(usable, request)
    for group in _by_leaf(usable):
        chosen = _choose(group, request)
        if chosen is not None:
            return chosen
    return None if rule is TopologyRule.REQUIRED else _choose(usable, request)


def seat(
    requests: Sequence[Request],
    nodes: Iterable[Node],
    topology: Topology | None = None,
    rule: TopologyRule = TopologyRule.PREFERRED,
) -> Seating:
    """Seat every request that finds room, larger shares per node first, then by job id."""
    need_gpus = all(share > 0 for request in requests for share in request.placement)
    rooms = _rooms(nodes, topology or Topology(), need_gpus)
    if not any(room.leaf for room in rooms):
        rule = TopologyRule.IGNORE
    seats: dict[str, tuple[str, ...]] = {}
    unseated: list[str] = []
    order = sorted(
        requests,
        key=lambda r: (-max(r.placement, default=0), -sum(r.placement), r.job_id),
    )
    for request in order:
        chosen = _seat(rooms, request, rule)
        if chosen is None:
            unseated.append(request.job_id)
            continue
        for room, share in zip(chosen, sorted(request.placement, reverse=True), strict=True):
            room.gpus = 0 if request.exclusive else room.gpus - share
            room.cpus -= int(request.cpus * share)
            room.memory_mib -= int(request.memory_mib * share)
            room.idle = False
        seats[request.job_id] = tuple(room.name for room in chosen)
    return Seating(seats, tuple(unseated))

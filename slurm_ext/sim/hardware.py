"""The machine of a replay: groups of nodes, each with its GPU count and type.

``parse_cluster`` reads what a user writes: ``8x4xV100`` is eight nodes with four V100 each, and
groups are joined by commas, ``8x4xV100,2x8xA100``. GPU types split the machine into pools: a job
runs on GPUs of one type, and its pool is named after it. The choice a reader would question: nodes
of one type but of different sizes are one pool, so that a job may be offered several placements of
one GPU count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.node import Node

PARTITION = "main"
_GROUP = re.compile(r"(\d+)x(\d+)(?:x([A-Za-z][\w.-]*))?")
# Bounds against slips, not limits of use.
_MAX_NODES = 20_000
_MAX_GPUS_PER_NODE = 64


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one kind."""

    nodes: int
    gpus_per_node: int
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that is replayed. ``pooled`` ignores node borders: any free GPUs will do.

    ``groups`` describes a machine of several kinds of nodes; where it is empty, the machine has
    ``nodes`` equal ones.
    """

    nodes: int = 8
    gpus_per_node: int = 4
    pooled: bool = False
    gpu_type: str = ""
    groups: tuple[NodeGroup, ...] = ()

    @property
    def kinds(self) -> tuple[NodeGroup, ...]:
        """The groups, also of a machine of equal nodes."""
        return self.groups or (NodeGroup(self.nodes, self.gpus_per_node, self.gpu_type),)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(kind.nodes * kind.gpus_per_node for kind in self.kinds)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types, in the order of the groups."""
        return tuple(dict.fromkeys(kind.gpu_type for kind in self.kinds))

    @property
    def text(self) -> str:
        """As a user writes it."""
        return ",".join(
            f"{kind.nodes}x{kind.gpus_per_node}{'x' if kind.gpu_type else ''}{kind.gpu_type}"
            for kind in self.kinds
        )

    def of_type(self, gpu_type: str) -> Hardware:
        """The same machine; nodes that name no GPU type have this one."""
        return replace(
            self,
            gpu_type=self.gpu_type or gpu_type,
            groups=tuple(
                replace(group, gpu_type=group.gpu_type or gpu_type) for group in self.groups
            ),
        )

    def retyped(self, gpu_type: str) -> Hardware:
        """The same machine with this GPU type in all nodes."""
        return replace(
            self,
            gpu_type=gpu_type,
            groups=tuple(replace(group, gpu_type=gpu_type) for group in self.groups),
        )

    def gpus_of(self, gpu_type: str) -> int:
        """GPUs of one type."""
        return sum(k.nodes * k.gpus_per_node for k in self.kinds if k.gpu_type == gpu_type)

    def placement(self, gpus: int) -> tuple[int, ...]:
        """GPUs per node for a job of this size: the fewest nodes, where all nodes are equal."""
        if self.pooled:
            return (gpus,)
        return _split(gpus, max(kind.gpus_per_node for kind in self.kinds))

    def placements(self, gpus: int, gpu_type: str) -> tuple[tuple[int, ...], ...]:
        """The compact placements that the nodes of a type have room for, easiest to seat first."""
        if self.pooled:
            return ((gpus,),) if gpus <= self.gpus_of(gpu_type) else ()
        sizes: dict[int, int] = {}
        for kind in self.kinds:
            if kind.gpu_type == gpu_type:
                sizes[kind.gpus_per_node] = sizes.get(kind.gpus_per_node, 0) + kind.nodes
        found: dict[tuple[int, ...], None] = {}
        for size in sorted(sizes):
            shares = _split(gpus, size)
            if all(
                sum(count for have, count in sizes.items() if have >= share)
                >= sum(other >= share for other in shares)
                for share in shares
            ):
                found[shares] = None
        return tuple(found)

    def inventory(self) -> tuple[Node, ...]:
        """The nodes, all free. Pooled hardware is one node per GPU type that holds all of them."""
        kinds = self.kinds
        if self.pooled:
            kinds = tuple(NodeGroup(1, self.gpus_of(name), name) for name in self.gpu_types)
        width = len(str(sum(kind.nodes for kind in kinds)))
        nodes: list[Node] = []
        for kind in kinds:
            for _ in range(kind.nodes):
                nodes.append(
                    Node(
                        name=f"n{len(nodes) + 1:0{width}d}",
                        gpus=kind.gpus_per_node,
                        cpus=kind.gpus_per_node,
                        gpu_type=kind.gpu_type,
                        partitions=frozenset({PARTITION}),
                    )
                )
        return tuple(nodes)

    def pools(self) -> Mapping[str, tuple[str, ...]]:
        """Pool key -> node names: one pool per GPU type."""
        result: dict[str, list[str]] = {}
        for node in self.inventory():
            result.setdefault(self.pool_of(node.gpu_type), []).append(node.name)
        return {key: tuple(names) for key, names in result.items()}

    def pool_of(self, gpu_type: str) -> str:
        """The pool of a GPU type; a machine of one type has one pool, whatever a job names."""
        return PARTITION if len(self.gpu_types) == 1 else f"{PARTITION}:{gpu_type}"


def parse_cluster(text: str, *, pooled: bool = False) -> Hardware:
    """The machine that a user describes as NODESxGPUS[xTYPE], groups joined by commas."""
    groups: list[NodeGroup] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        if match is None:
            raise DataError(
                f"cluster {text!r}",
                f"{part.strip()!r} is not NODESxGPUS or NODESxGPUSxTYPE",
                "write for example 8x4xV100 or 8x4xV100,2x8xA100",
            )
        nodes, gpus = int(match[1]), int(match[2])
        if not (0 < nodes <= _MAX_NODES and 0 < gpus <= _MAX_GPUS_PER_NODE):
            raise DataError(
                f"cluster {text!r}",
                f"{part.strip()!r} is outside 1..{_MAX_NODES} nodes x 1..{_MAX_GPUS_PER_NODE} GPUs",
                "write the number of nodes first, then the GPUs of each",
            )
        groups.append(NodeGroup(nodes, gpus, match[3] or ""))
    if len({bool(group.gpu_type) for group in groups}) > 1:
        raise DataError(
            f"cluster {text!r}", "a GPU type is given for some groups only", "name it for all"
        )
    first = groups[0]
    if len(groups) == 1:
        return Hardware(first.nodes, first.gpus_per_node, pooled, first.gpu_type)
    return Hardware(
        sum(group.nodes for group in groups),
        max(group.gpus_per_node for group in groups),
        pooled,
        groups=tuple(groups),
    )


def _split(gpus: int, size: int) -> tuple[int, ...]:
    whole, rest = divmod(gpus, size)
    return (size,) * whole + ((rest,) if rest else ())

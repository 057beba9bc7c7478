"""The nodes during a replay: which GPUs are taken, which nodes are away, where a start finds room.

Keeps books only; who starts or ends is the engine's matter. A node that fails keeps what is booked
on it until the engine has ended the jobs there: what is free counts available nodes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.node import Node, Partition
from slurm_ext.policy.placement import Request, seat
from slurm_ext.sim.hardware import PARTITION, Hardware
from slurm_ext.sim.model import Run, SimJob, SimulationError


class Machine:
    """The books of one machine."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._nodes = {node.name: node for node in hardware.inventory()}
        # Outages of one node may overlap: it is back when the last of them is over.
        self._away: Counter[str] = Counter()
        self.gpus = hardware.gpus
        self.gpus_free = hardware.gpus
        self.pools = hardware.pools()
        self.partitions = (Partition(PARTITION, tuple(self._nodes), default=True),)

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node as it is now."""
        return tuple(self._nodes.values())

    def away(self) -> list[str]:
        """Names of the nodes that are down."""
        return [name for name, node in self._nodes.items() if not node.available]

    def pool_of(self, job: SimJob) -> str:
        """The pool with the GPUs that the job wants. Raises SimulationError when there is none."""
        pool = self._hardware.pool_of(job.gpu_type)
        if pool not in self.pools:
            raise SimulationError(
                f"job {job.job_id} wants GPUs of type {job.gpu_type!r}; "
                f"the machine has {', '.join(self._hardware.gpu_types)}"
            )
        return pool

    def seats(
        self, job_id: str, configuration: Configuration, pool: str, names: Sequence[str]
    ) -> dict[str, int] | None:
        """GPUs per node for a start, on the named nodes if any; None where there is no room."""
        request = Request(job_id, configuration.placement)
        wanted: Iterable[str] = names or self.pools[pool]
        nodes = (self._nodes[name] for name in wanted if name in self._nodes)
        chosen = seat((request,), nodes).seats.get(job_id)
        if chosen is None:
            return None
        return dict(zip(chosen, sorted(configuration.placement, reverse=True), strict=True))

    def take(self, seats: Mapping[str, int]) -> None:
        """Book GPUs per node."""
        for name, gpus in seats.items():
            self._book(name, gpus)

    def give_back(self, seats: Mapping[str, int]) -> None:
        """Free what was taken."""
        for name, gpus in seats.items():
            self._book(name, -gpus)

    def outage(self, name: str, begins: bool) -> bool:
        """Count an outage's begin or end; whether the node's being there changes with it."""
        before = self._away[name]
        self._away[name] += 1 if begins else -1
        return (before > 0) != (self._away[name] > 0)

    def turn(self, name: str, up: bool) -> None:
        """The node is there from now on, or is not."""
        node = self._nodes[name]
        self._put(replace(node, available=up, state="IDLE" if up else "DOWN"))

    def _book(self, name: str, gpus: int) -> None:
        node = self._nodes[name]
        self._put(
            replace(node, gpus_alloc=node.gpus_alloc + gpus, cpus_alloc=node.cpus_alloc + gpus)
        )

    def _put(self, node: Node) -> None:
        self.gpus_free += node.gpus_free - self._nodes[node.name].gpus_free
        self._nodes[node.name] = node


def seats_overlap(runs: Sequence[Run], hardware: Hardware) -> str:
    """Empty when no node ever holds more GPUs than it has, else where and when it does."""
    sizes = {node.name: node.gpus for node in hardware.inventory()}
    used = dict.fromkeys(sizes, 0)
    for at, gpus, name in _changes(runs):
        used[name] += gpus
        if not 0 <= used[name] <= sizes[name]:
            return f"node {name} holds {used[name]} of {sizes[name]} GPUs at {at:g} s"
    return ""


def _changes(runs: Sequence[Run]) -> Iterator[tuple[float, int, str]]:
    yield from sorted(
        (at, sign * gpus, name)
        for run in runs
        for name, gpus in run.seats.items()
        for at, sign in ((run.start_s, 1), (run.end_s, -1))
    )

"""One observation of the whole cluster: the only input about Slurm that a decision may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits, Node, Partition, Reservation, Topology


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs, nodes, partitions and reservations read in one cycle.

    ``taken_s`` is the epoch second at which reading began, on the controller's clock.
    ``limits`` maps ``qos:NAME`` and ``assoc:ACCOUNT`` to what the site configured there.
    """

    taken_s: float
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    limits: Mapping[str, Limits] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)

    def pending(self) -> Iterator[Job]:
        """Jobs that wait, in queue order of the snapshot."""
        return (job for job in self.jobs if job.pending)

    def running(self) -> Iterator[Job]:
        """Jobs that occupy an allocation."""
        return (job for job in self.jobs if job.running)

    def job(self, job_id: str) -> Job | None:
        """The row with exactly this id."""
        return next((job for job in self.jobs if job.job_id == job_id), None)

"""Nodes, partitions, pools and reservations as one observation saw them.

A *pool* is the set of nodes among which a job of one partition, feature expression and GPU type
may be placed; the allocation problem is solved per pool. Pools of different partitions may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """One node. ``gpus_alloc`` counts GPUs held by running and completing jobs.

    ``available`` is false for nodes that are down, drained, draining, being switched off,
    reserved for maintenance or not responding: none of their GPUs is free, whatever the counters
    say. Of a node that is switched off to save power they are: Slurm switches it on for a job.
    """

    name: str
    gpus: int = 0
    gpu_type: str = ""
    gpus_alloc: int = 0
    cpus: int = 1
    cpus_alloc: int = 0
    memory_mib: int = 0
    memory_alloc_mib: int = 0
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()
    available: bool = True
    state: str = "IDLE"
    reason: str = ""

    @property
    def gpus_free(self) -> int:
        """GPUs that a new job could get now."""
        return max(0, self.gpus - self.gpus_alloc) if self.available else 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs here and a job could."""
        return self.available and self.gpus_alloc == 0 and self.cpus_alloc == 0


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition. ``None`` limits are unlimited; ``max_time_s`` in seconds.

    ``min_nodes`` binds jobs that name a most number of nodes: to others Slurm gives that many.
    ``grace_s`` is what a preempted job has between SIGTERM and SIGKILL.
    ``qos`` names the partition's own QOS, whose limits hold beside those of the job's QOS.
    """

    name: str
    node_names: tuple[str, ...] = ()
    available: bool = True
    max_time_s: float | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    priority_tier: int = 1
    preempt_mode: str = "OFF"
    grace_s: float = 0.0
    default: bool = False
    qos: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """An administrator's reservation: its nodes are closed to other jobs in its interval."""

    name: str
    node_names: tuple[str, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that Slurm stops checking once an Operator has changed a job, so we check them.

    ``None`` is unlimited. ``name`` says whose limits they are (``qos normal``). ``grp_*`` bound the
    sum over the jobs that run at once, of an association over all associations below it; ``parent``
    is the key of the association above. ``max_*_per_user`` and ``max_*_per_account`` bound such a
    sum over the jobs of one user or account in a QOS. Minutes are GPUs (CPUs) times minutes of time
    limit: of one job (``max_*_minutes_per_job``), of all that run (``grp_*_run_minutes``), or ever
    (``grp_*_minutes``, of which ``used_*_minutes`` were used when this was read).
    ``over_partition`` says that this QOS goes before the partition's own (OverPartQOS), ``waives``
    names the fields of `Partition` that do not bind its jobs (PartitionTimeLimit ...). ``exact`` is
    false where a limit per job may be too tight: one on a single type of GPU, or of one partition.
    """

    name: str
    max_gpus_per_job: int | None = None
    max_nodes_per_job: int | None = None
    max_cpus_per_job: int | None = None
    max_wall_s: float | None = None
    grp_gpus: int | None = None
    grp_nodes: int | None = None
    max_gpus_per_user: int | None = None
    max_nodes_per_user: int | None = None
    min_gpus_per_job: int | None = None
    max_memory_mib_per_job: int | None = None
    grp_cpus: int | None = None
    grp_memory_mib: int | None = None
    max_cpus_per_user: int | None = None
    max_memory_mib_per_user: int | None = None
    max_gpus_per_account: int | None = None
    max_nodes_per_account: int | None = None
    max_cpus_per_account: int | None = None
    max_memory_mib_per_account: int | None = None
    max_gpu_minutes_per_job: int | None = None
    max_cpu_minutes_per_job: int | None = None
    grp_gpu_run_minutes: int | None = None
    grp_cpu_run_minutes: int | None = None
    grp_gpu_minutes: int | None = None
    grp_cpu_minutes: int | None = None
    used_gpu_minutes: int = 0
    used_cpu_minutes: int = 0
    parent: str = ""
    over_partition: bool = False
    waives: frozenset[str] = frozenset()
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes among which jobs of one kind compete: partition, features, GPU type."""

    key: str
    partition: str
    gpu_type: str
    nodes: tuple[Node, ...]
    features: str = ""

    @property
    def gpus(self) -> int:
        """GPUs of all nodes of the pool, in use or not; unavailable nodes do not count."""
        return sum(n.gpus for n in self.nodes if n.available)

    @property
    def gpus_free(self) -> int:
        """GPUs of the pool that are free now."""
        return sum(n.gpus_free for n in self.nodes)


@dataclass(frozen=True, slots=True)
class Topology:
    """Switch tree from topology.conf: leaf switch of each node, and each switch's parent."""

    leaf_of: dict[str, str] = field(default_factory=dict)
    parent_of: dict[str, str] = field(default_factory=dict)

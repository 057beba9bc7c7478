"""Mutable jobs and nodes of the in-memory Slurm, and its scheduler.

The scheduler is EASY backfill over a strict priority order, because that is what the product has to
live with: a blocked head gets a reservation, later jobs start only where they cannot delay it.
Nothing here knows the product; ``slurm.py`` turns these objects into its dataclasses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from slurm_ext.domain.job import JobState

REQUEUE_HOLD_S = 121.0  # cred_expire + 1 s, seen on 24.11.5
FOREVER = math.inf

RunTime = float | Callable[[int], float]


@dataclass
class FakeNode:
    """One node with its configured and held resources."""

    name: str
    gpus: int = 4
    gpu_type: str = ""
    cpus: int = 64
    memory_mib: int = 256_000
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset({"main"})
    state: str = "IDLE"
    gpus_alloc: int = 0
    cpus_alloc: int = 0
    jobs: set[int] = field(default_factory=set)

    @property
    def usable(self) -> bool:
        return self.state in ("IDLE", "IDLE~")  # switched on for a job


@dataclass
class FakeJob:
    """One job as slurmctld keeps it; ``begin_s`` is what StartTime= sets."""

    raw_id: int
    user: str = "alice"
    uid: int = 2001
    account: str = "research"
    partitions: tuple[str, ...] = ("main",)
    qos: str = "normal"
    submit_s: float = 0.0
    begin_s: float = 0.0
    nodes: int = 1
    max_nodes: int | None = None
    ntasks: int = 1
    cpus_per_task: int = 1
    min_cpus: int | None = None
    tres_per_node: str = ""
    tres_per_task: str = ""
    tres_per_job: str = ""
    gpu_type: str = ""
    time_limit_s: float | None = 3600.0
    run_s: RunTime = 600.0
    state: JobState = JobState.PENDING
    reason: str = "None"
    site_factor: int = 0
    nice: int = 0
    base_priority: int = 0
    set_priority: int | None = None
    admin_comment: str = ""
    comment: str = ""
    features: str = ""
    licenses: str = ""
    dependency: str = ""
    reservation: str = ""
    req_nodes: tuple[str, ...] = ()
    exc_nodes: tuple[str, ...] = ()
    exclusive: bool = False
    batch: bool = True
    held_by_user: bool = False
    held_by_admin: bool = False
    het_job_id: int | None = None
    array_id: int | None = None
    tasks: tuple[int, ...] = ()
    restarts: int = 0
    start_s: float | None = None
    end_s: float | None = None
    expected_s: float | None = None
    placement: dict[str, int] = field(default_factory=dict)
    first_submit_s: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def job_id(self) -> str:
        """The id as squeue prints it."""
        if self.array_id is None:
            return str(self.raw_id)
        if self.state is JobState.PENDING:
            return f"{self.array_id}_[{_ranges(self.tasks)}]"
        return f"{self.array_id}_{self.tasks[0]}"

    @property
    def gpus_per_node(self) -> int | None:
        return tres_gpus(self.tres_per_node) if self.tres_per_node else None

    @property
    def gpus(self) -> int:
        """GPUs asked for, or held once running."""
        if self.placement:
            return sum(self.placement.values())
        if self.tres_per_job:
            return tres_gpus(self.tres_per_job)
        if self.tres_per_task:
            return tres_gpus(self.tres_per_task) * self.ntasks
        return tres_gpus(self.tres_per_node) * self.nodes

    @property
    def held(self) -> bool:
        return self.held_by_user or self.held_by_admin

    @property
    def cpus(self) -> int:
        """CPUs asked for: NumCPUs where it was written, else tasks times CPUs per task."""
        return self.min_cpus or self.ntasks * self.cpus_per_task

    @property
    def impossible(self) -> bool:
        """Fewer CPUs asked for than the tasks need: such a job stays (BadConstraints)."""
        return self.cpus < self.ntasks * self.cpus_per_task

    def duration_s(self) -> float:
        """True run time on what the job holds, cut at its limit."""
        run = self.run_s(self.gpus) if callable(self.run_s) else self.run_s
        return min(run, self.time_limit_s if self.time_limit_s is not None else FOREVER)


def tres_gpus(text: str) -> int:
    """GPUs of ``gres/gpu:2`` or ``gres/gpu:v100:2``; 0 where the text names none."""
    total = 0
    for part in text.split(","):
        match = re.fullmatch(r"gres[/:]gpu(?:[:=]([A-Za-z_][\w.-]*))?(?:[:=](\d+))?", part.strip())
        if match:
            total += int(match[2] or 1)
    return total


def _ranges(numbers: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


Free = dict[str, tuple[int, int, bool]]  # node -> free GPUs, free CPUs, nothing running there


def free_now(nodes: Mapping[str, FakeNode]) -> Free:
    """What each usable node has left."""
    return {
        n.name: (n.gpus - n.gpus_alloc, n.cpus - n.cpus_alloc, not n.jobs)
        for n in nodes.values()
        if n.usable
    }


def place(
    job: FakeJob, partition: str, nodes: Mapping[str, FakeNode], free: Free
) -> dict[str, int]:
    """Nodes and GPUs on each for this job within ``free``; empty where it does not fit."""
    wanted_features = {f for f in job.features.split("&") if f}
    usable = [
        name
        for name in free
        if partition in nodes[name].partitions
        and name not in job.exc_nodes
        and wanted_features <= nodes[name].features
        and (not job.gpu_type or nodes[name].gpu_type == job.gpu_type)
        and (not job.exclusive or free[name][2])
    ]
    if job.req_nodes:
        if not set(job.req_nodes) <= set(usable):
            return {}
        usable = [*job.req_nodes, *(n for n in usable if n not in job.req_nodes)]
    per_node = job.gpus_per_node
    tasks_per_node = -(-job.ntasks // max(1, job.nodes))
    cpus = max(1, tasks_per_node * job.cpus_per_task)
    if per_node is not None or job.gpus == 0:
        want = per_node or 0
        fitting = [n for n in usable if free[n][0] >= want and free[n][1] >= cpus]
        if not job.req_nodes:
            fitting.sort(key=lambda n: (free[n][0], n))
        chosen = fitting[: job.nodes]
        whole = len(chosen) == job.nodes and set(job.req_nodes) <= set(chosen)
        return dict.fromkeys(chosen, want) if whole else {}
    # A total that Slurm spreads: the fewest nodes from the minimum upward, fullest first.
    fitting = [n for n in usable if free[n][0] > 0 and free[n][1] > 0]
    if not job.req_nodes:
        fitting.sort(key=lambda n: (-free[n][0], n))
    most = min(len(fitting), job.max_nodes or len(fitting))
    for count in range(job.nodes, most + 1):
        chosen = fitting[:count]
        if sum(free[n][0] for n in chosen) < job.gpus or job.gpus < count:
            continue
        left = job.gpus
        given: dict[str, int] = {}
        for index, name in enumerate(chosen):
            take = min(free[name][0], left - (count - index - 1))
            given[name] = take
            left -= take
        if left == 0 and set(job.req_nodes) <= set(given):
            return given
    return {}


def after(free: Free, placement: Mapping[str, int], cpus: int) -> Free:
    """``free`` once a job with this placement runs."""
    left = dict(free)
    for name, gpus in placement.items():
        if name in left:
            left[name] = (left[name][0] - gpus, left[name][1] - cpus, False)
    return left


def cpus_per_node(job: FakeJob, nodes: int) -> int:
    """CPUs that the job holds on each of its nodes."""
    return max(1, -(-job.ntasks // max(1, nodes)) * job.cpus_per_task)


def shadow(
    head: FakeJob,
    partition: str,
    running: Iterable[FakeJob],
    nodes: Mapping[str, FakeNode],
    free: Free,
    now: float,
) -> tuple[float, Free]:
    """When the blocked head could start by the running jobs' limits, and what is free then."""
    ends = sorted(
        (
            (job.start_s or now) + (job.time_limit_s if job.time_limit_s is not None else FOREVER),
            job.raw_id,
            job,
        )
        for job in running
    )
    left = dict(free)
    for end, _, job in ends:
        for name, gpus in job.placement.items():
            if name in left:
                got, cpus, _idle = left[name]
                got += gpus
                cpus += cpus_per_node(job, len(job.placement))
                left[name] = (got, cpus, got == nodes[name].gpus and cpus == nodes[name].cpus)
        if place(head, partition, nodes, left):
            return max(now, end), left
    return FOREVER, left

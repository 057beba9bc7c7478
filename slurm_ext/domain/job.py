"""A job as one observation of the queue saw it.

Times are seconds since the epoch, durations seconds, memory MiB. ``None`` means "Slurm did not
say"; it never means zero. The class is an observation, not a handle: nothing here talks to Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.domain.reasons import BARS, Bar


class JobState(StrEnum):
    """Base states of Slurm's job state machine (flags such as COMPLETING are separate)."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    REQUEUED = "REQUEUED"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    STOPPED = "STOPPED"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    RESIZING = "RESIZING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    BOOT_FAIL = "BOOT_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"

    @property
    def holds_resources(self) -> bool:
        """Whether a job in this state occupies its allocation."""
        return self in _HOLDS_RESOURCES


_HOLDS_RESOURCES = frozenset(
    {
        JobState.RUNNING,
        JobState.SUSPENDED,
        JobState.COMPLETING,
        JobState.CONFIGURING,
        JobState.STOPPED,
        JobState.SIGNALING,
        JobState.STAGE_OUT,
        JobState.RESIZING,
    }
)


class ShapeKind(StrEnum):
    """How a job's ranks relate to its GPUs: it decides which update keeps the two in step.

    RANK_PER_GPU       ``-n N --gpus-per-task=1``: one rank per GPU, spread by Slurm
    LAUNCHER_PER_NODE  ``-N n --ntasks-per-node=1 --gres=gpu:k``: one launcher (torchrun) per node
    SINGLE_NODE        ``-N1 -n k --gres=gpu:k``: k ranks on one node
    TASKS_PER_NODE     ``-N n --ntasks-per-node=k --gres=gpu:k``: the ranks per node stay, because
                       scontrol cannot change them; only the number of nodes can
    FIXED              anything else: ordered, never resized
    """

    RANK_PER_GPU = "rank-per-gpu"
    LAUNCHER_PER_NODE = "launcher-per-node"
    SINGLE_NODE = "single-node"
    TASKS_PER_NODE = "tasks-per-node"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one job: GPUs, nodes and tasks, and the node-minimum that Slurm was given.

    ``gpus`` is the total over all nodes. ``nodes`` is the minimum node count.
    """

    kind: ShapeKind
    gpus: int
    nodes: int
    ntasks: int

    @property
    def gpus_per_node(self) -> int:
        """GPUs on each node, rounded up where they do not divide."""
        return -(-self.gpus // max(1, self.nodes))


@dataclass(frozen=True, slots=True)
class Job:
    """One row of the queue.

    ``job_id`` is what ``scontrol update JobId=`` takes for exactly this row: ``123``, ``123_4``
    or, for the pending rest of an array, ``123_[1-5,7]``. ``priority`` is Slurm's sum, with
    ``site_factor`` (signed, 0 = none) already inside. ``eligible`` tells whether Slurm's
    multifactor plugin ranks the job now (leased, dependent and held jobs are not ranked).
    ``priority_set`` tells that somebody wrote the priority itself, so that it is frozen: sprio
    then shows all of its parts as zero beside a priority above 1 (seen on 24.11.5).
    ``eligible_s`` is the begin time that the job carries; ``start_s`` of a pending job may be
    backfill's expectation instead. ``raw_id`` is Slurm's number of exactly this record,
    SLURM_JOB_ID inside the job; for a task of an array it differs from ``base_id``.
    """

    job_id: str
    base_id: int
    user: str
    partitions: tuple[str, ...]
    state: JobState
    submit_s: float
    gpus: int = 0
    nodes: int = 1
    ntasks: int = 1
    cpus: int = 1
    uid: int | None = None
    account: str = ""
    qos: str = ""
    reason: str = ""
    priority: int = 0
    site_factor: int = 0
    nice: int = 0
    eligible: bool = True
    eligible_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    time_limit_s: float | None = None
    max_nodes: int | None = None
    gpu_type: str = ""
    memory_mib: int | None = None
    tres_per_job: str = ""
    tres_per_node: str = ""
    tres_per_task: str = ""
    req_nodes: tuple[str, ...] = ()
    exc_nodes: tuple[str, ...] = ()
    node_names: tuple[str, ...] = ()
    features: str = ""
    licenses: str = ""
    dependency: str = ""
    reservation: str = ""
    exclusive: bool = False
    array: bool = False
    array_tasks: int = 1
    het_job_id: int | None = None
    restarts: int = 0
    held_by_user: bool = False
    held_by_admin: bool = False
    batch: bool = True
    priority_set: bool = False
    raw_id: int | None = None

    @property
    def pending(self) -> bool:
        """Whether the job waits for its (next) start."""
        return self.state is JobState.PENDING

    @property
    def running(self) -> bool:
        """Whether the job occupies an allocation now."""
        return self.state.holds_resources

    @property
    def held(self) -> bool:
        """Whether a person (not us: we never hold) keeps the job from starting."""
        return self.held_by_user or self.held_by_admin

    @property
    def bar(self) -> Bar | None:
        """Why Slurm will not start the waiting job as it is, whatever becomes free."""
        bar = BARS.get(self.reason)
        if bar is None or not self.pending:
            return None
        several = len(self.partitions) > 1 or "," in self.qos
        return None if several and not bar.anywhere else bar

    @property
    def competes(self) -> bool:
        """Whether Slurm may start it, as it is, as soon as there is room and it is its turn."""
        return self.eligible and not self.held and self.bar is None

    @property
    def partition(self) -> str:
        """The job's partition where it names exactly one, else the empty string."""
        return self.partitions[0] if len(self.partitions) == 1 else ""

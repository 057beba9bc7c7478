"""An in-memory Slurm behind the product's ``Backend`` protocol, for tests without a cluster.

It moves only when told (``advance``): between two calls nothing starts or ends, so a test decides
what happens between observing, planning and writing. Faults are injected per call, a hook may act
before each write, and every write to a running job that could take ranks away is recorded.

    slurm = FakeSlurm(nodes=2, gpus_per_node=4)
    job = slurm.submit(gpus=4, nodes=1, run_s=lambda gpus: 3600 / gpus)
    slurm.advance(1)
    assert slurm.find(job).state is JobState.RUNNING
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from slurm_ext.domain.action import Action, ActionResult
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.domain.job import Job, JobState, ShapeKind
from slurm_ext.domain.node import Limits, Partition, Reservation, Topology
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.facts import Identity, RpcStats, SlurmConfig
from slurm_ext.slurm.scontrol import update_words
from tests.fakes.model import (
    REQUEUE_HOLD_S,
    FakeJob,
    FakeNode,
    RunTime,
    after,
    cpus_per_node,
    free_now,
    place,
    shadow,
)
from tests.fakes.observed import observed_job, observed_node
from tests.fakes.update import SIZE_KEYWORDS, UpdateRefusedError, refuse_whole, update_field

EPOCH = 1_700_000_000.0
BASE_PRIORITY = 10_000
_CONFIG = {
    "clustername": "ft",
    "prioritytype": "priority/multifactor",
    "schedulertype": "sched/backfill",
    "priorityflags": "ACCRUE_ALWAYS",
    "prioritysitefactorplugin": "(null)",
    "accountingstorageenforce": "associations,limits,qos",
    "schedulerparameters": "disable_job_shrink,bf_max_job_test=1000,default_queue_depth=1000",
    "preemptmode": "REQUEUE",
    "preempttype": "preempt/qos",
    "preemptparameters": "send_user_signal",
    "topologyplugin": "topology/default",
    "jobsubmitplugins": "lua",
    "minjobage": "300 sec",
}


class Fault(StrEnum):
    """How a call goes wrong. HALF (apply only): half the actions are written, then it dies."""

    FAIL = "fail"
    HANG = "hang"
    TRUNCATED = "truncated"
    HALF = "half"


class FakeSlurm:
    """See the module's docstring. ``now`` is the controller's clock in epoch seconds."""

    name = "fake"

    def __init__(
        self,
        nodes: int = 8,
        gpus_per_node: int = 4,
        *,
        now: float = EPOCH,
        partitions: Sequence[str] = ("main",),
        gpu_type: str = "",
        cpus: int = 64,
        age_weight: int = 1_000,
        max_age_s: float = 7 * 86_400,
        config: Mapping[str, str] | None = None,
        limits: Mapping[str, Limits] | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.now = now
        self.age_weight = age_weight
        self.max_age_s = max_age_s
        self.config = {**_CONFIG, **{k.lower(): v for k, v in (config or {}).items()}}
        self.site_limits = dict(limits or {})
        self.site_topology = topology or Topology()
        self.nodes = {
            f"n{i:02d}": FakeNode(
                f"n{i:02d}",
                gpus_per_node,
                gpu_type,
                cpus=cpus,
                partitions=frozenset(partitions),
            )
            for i in range(1, nodes + 1)
        }
        self.partitions = {
            name: Partition(name, tuple(self.nodes), default=name == partitions[0])
            for name in partitions
        }
        self.reservations: list[Reservation] = []
        self.queue: dict[int, FakeJob] = {}
        self.finished: list[FakeJob] = []
        self.administrator = False
        self.site_operators: frozenset[str] = frozenset()
        self.calls: dict[str, int] = {}
        self.writes: list[Action] = []
        self.late_size_writes: list[tuple[str, str, str]] = []
        self.cap_gpus: int | None = None  # a limit on GPUs of a job that only Slurm knows
        # What Slurm would say of a job that it never starts as it is; empty where it may start.
        self.bar: Callable[[FakeJob], str] = lambda job: ""
        self.late_limit_writes: list[tuple[str, str]] = []
        self.shrunk: list[str] = []
        self.before_write: Callable[[FakeSlurm, Action], None] | None = None
        self._faults: dict[str, list[Fault]] = {}
        self._refusals: dict[str, list[str]] = {}
        self._next_id = 1

    # What a test does to the cluster ---------------------------------------------------------

    @property
    def disable_job_shrink(self) -> bool:
        """Whether the site set SchedulerParameters=disable_job_shrink."""
        return "disable_job_shrink" in self.config["schedulerparameters"]

    def submit(
        self,
        *,
        gpus: int = 1,
        nodes: int = 1,
        kind: ShapeKind = ShapeKind.LAUNCHER_PER_NODE,
        run_s: RunTime = 600.0,
        time_limit_s: float | None = 3600.0,
        admin_comment: str = "",
        begin_s: float | None = None,
        array: Sequence[int] = (),
        user: str = "alice",
        uid: int = 2001,
        partitions: tuple[str, ...] = ("main",),
        **fields: object,
    ) -> str:
        """Queue a job of one shape kind and return its id as squeue prints it.

        ``fields`` are further attributes of FakeJob. FIXED asks through ``tres_per_job``.
        """
        raw = self._next_id
        self._next_id += 1
        job = FakeJob(
            raw,
            user=user,
            uid=uid,
            partitions=partitions,
            submit_s=self.now,
            first_submit_s=self.now,
            begin_s=self.now if begin_s is None else begin_s,
            nodes=nodes,
            run_s=run_s,
            time_limit_s=time_limit_s,
            admin_comment=admin_comment,
            base_priority=BASE_PRIORITY,
            array_id=raw if array else None,
            tasks=tuple(array),
        )
        type_part = f"{job.gpu_type}:" if job.gpu_type else ""
        if gpus and kind is ShapeKind.RANK_PER_GPU:
            job.ntasks, job.tres_per_task = gpus, f"gres/gpu:{type_part}1"
        elif gpus and kind is ShapeKind.LAUNCHER_PER_NODE:
            job.ntasks = nodes
            job.tres_per_node = f"gres/gpu:{type_part}{-(-gpus // nodes)}"
            job.max_nodes = nodes
        elif gpus and kind is ShapeKind.SINGLE_NODE:
            job.ntasks, job.tres_per_node = gpus, f"gres/gpu:{type_part}{gpus}"
            job.max_nodes = 1
        elif gpus:
            job.tres_per_job = f"gres/gpu:{type_part}{gpus}"
        for name, value in fields.items():
            if not hasattr(job, name):
                raise AttributeError(f"FakeJob has no attribute {name!r}")
            setattr(job, name, value)
        self.queue[raw] = job
        return job.job_id

    def find(self, job_id: str) -> FakeJob:
        """The job, queued or finished. An array's pending rest is found by any of its ids."""
        base, _, index = job_id.partition("_")
        rows = [*self.queue.values(), *self.finished]
        for job in rows:
            if job.job_id == job_id or str(job.raw_id) == job_id:
                return job
        for job in rows:
            if index and str(job.array_id) == base and index.strip("[]").split("-")[0].isdigit():
                return job
        raise KeyError(job_id)

    def cancel(self, job_id: str) -> None:
        """scancel."""
        self._end(self.find(job_id), JobState.CANCELLED)

    def forget(self, job_id: str) -> None:
        """Die and come back with a state from before the last submission: its number is free."""
        if self.find(job_id).raw_id != self._next_id - 1:
            raise ValueError(f"job {job_id} was not submitted last")
        del self.queue[self._next_id - 1]
        self._next_id -= 1

    def hold(self, job_id: str, *, by_admin: bool = False) -> None:
        """A person's hold."""
        job = self.find(job_id)
        job.held_by_user, job.held_by_admin = not by_admin, by_admin

    def release_hold(self, job_id: str) -> None:
        """scontrol release."""
        job = self.find(job_id)
        job.held_by_user = job.held_by_admin = False

    def requeue(self, job_id: str) -> None:
        """scontrol requeue: Slurm overwrites SubmitTime and waits cred_expire + 1 s."""
        job = self.find(job_id)
        self._free(job)
        job.state = JobState.PENDING
        job.restarts += 1
        job.submit_s = self.now
        job.begin_s = self.now + REQUEUE_HOLD_S
        job.start_s = job.end_s = job.expected_s = None

    def set_node(self, name: str, state: str) -> None:
        """``IDLE``, ``DRAIN``, ``DOWN`` ...; a node that goes down requeues its jobs."""
        self.nodes[name].state = state
        if state.startswith("DOWN"):
            for raw in sorted(self.nodes[name].jobs):
                self.requeue(str(raw))

    def start(self, job_id: str) -> None:
        """Start a pending job now in its present shape, whatever its lease (a race)."""
        job = self.find(job_id)
        placement = place(job, job.partitions[0], self.nodes, free_now(self.nodes))
        if not placement:
            raise AssertionError(f"{job_id} does not fit, so it cannot start")
        self._start(job, placement)

    def inject(self, call: str, fault: Fault, times: int = 1) -> None:
        """The next ``times`` calls of that method go wrong."""
        if not callable(getattr(self, call, None)):
            raise AttributeError(f"no call {call!r}")
        self._faults.setdefault(call, []).extend([fault] * times)

    def refuse(
        self, keyword: str, message: str = "Requested operation failed", times: int = 1
    ) -> None:
        """The next ``times`` writes of that keyword are refused; earlier fields stay written."""
        self._refusals.setdefault(keyword.lower(), []).extend([message] * times)

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass: leases expire, jobs start and end, at their very second."""
        target = self.now + seconds
        self._schedule()
        while True:
            ends = [j.end_s for j in self.queue.values() if j.end_s is not None]
            begins = [
                j.begin_s for j in self.queue.values() if j.begin_s > self.now and not j.placement
            ]
            moment = min([*ends, *begins, target])
            self.now = max(self.now, min(moment, target))
            for job in sorted(self.queue.values(), key=lambda j: j.raw_id):
                if job.end_s is not None and job.end_s <= self.now:
                    run = job.run_s(job.gpus) if callable(job.run_s) else job.run_s
                    late = job.time_limit_s is not None and run > job.time_limit_s
                    self._end(job, JobState.TIMEOUT if late else JobState.COMPLETED)
            self._schedule()
            if moment >= target:
                return

    def advance_until(
        self, done: Callable[[], bool], step: float = 1.0, limit_s: float = 1e6
    ) -> None:
        """Advance in steps until the condition holds."""
        end = self.now + limit_s
        while not done():
            if self.now >= end:
                raise AssertionError(f"condition not met within {limit_s} s")
            self.advance(step)

    # The Backend protocol --------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        self._called("snapshot")
        return Snapshot(
            self.now,
            self._rows(),
            tuple(observed_node(n) for n in self.nodes.values()),
            tuple(self.partitions.values()),
            tuple(self.reservations),
        )

    def jobs(self, job_ids: Collection[str] | None = None) -> tuple[Job, ...]:
        self._called("jobs")
        rows = self._rows()
        return rows if job_ids is None else tuple(r for r in rows if r.job_id in set(job_ids))

    def admin_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        self._called("admin_comments")
        wanted = set(job_ids)
        return {j.job_id: j.admin_comment for j in self.queue.values() if j.job_id in wanted}

    def user_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        self._called("user_comments")
        wanted = set(job_ids)
        return {j.job_id: j.comment for j in self.queue.values() if j.job_id in wanted}

    def apply(self, actions: Sequence[Action]) -> list[ActionResult]:
        fault = self._called("apply")
        stop = len(actions) // 2 if fault is Fault.HALF else len(actions)
        results = [self._write(action) for action in actions[:stop]]
        if fault is Fault.HALF:
            raise SlurmCommandError(["scontrol"], -9, "killed")
        return results

    def slurm_config(self) -> SlurmConfig:
        self._called("slurm_config")
        return SlurmConfig("24.11.5", dict(self.config))

    def limits(self) -> Mapping[str, Limits]:
        self._called("limits")
        return dict(self.site_limits)

    def topology(self) -> Topology:
        self._called("topology")
        return self.site_topology

    def rpc_stats(self) -> RpcStats:
        self._called("rpc_stats")
        return RpcStats()

    def identity(self) -> Identity:
        self._called("identity")
        return Identity("slurm-ext", 900, "Administrator" if self.administrator else "Operator")

    def operators(self) -> frozenset[str]:
        self._called("operators")
        return self.site_operators

    # Inside ----------------------------------------------------------------------------------

    def _called(self, call: str) -> Fault | None:
        self.calls[call] = self.calls.get(call, 0) + 1
        queue = self._faults.get(call)
        if not queue:
            return None
        fault = queue.pop(0)
        if fault is Fault.FAIL:
            raise SlurmCommandError(["squeue"], 1, "Unable to contact slurm controller")
        if fault is Fault.HANG:
            raise SlurmCommandError(["squeue"], None, "no answer within 10 s")
        if fault is Fault.TRUNCATED:
            raise SourceMissingError("squeue", "the answer was cut off")
        return fault

    def _write(self, action: Action) -> ActionResult:
        if self.before_write is not None:
            self.before_write(self, action)
        try:
            update_words(action)
        except ValueError as exc:
            return ActionResult(action, False, f"not sent: {exc}")
        self.writes.append(action)
        jobs = self._named(action.job_id)
        if not jobs:
            return ActionResult(action, False, "Invalid job id specified")
        for job in jobs:
            if job.state is JobState.RUNNING:
                self.late_size_writes.extend(
                    (job.job_id, keyword, value)
                    for keyword, value in action.fields
                    if keyword.lower() in SIZE_KEYWORDS
                )
            try:
                refuse_whole(job, action.fields)
            except UpdateRefusedError as exc:
                return ActionResult(action, False, str(exc))
            # NumCPUs= counts whatever the order in which it is written beside NumTasks=.
            fields = sorted(action.fields, key=lambda pair: pair[0].lower() == "numcpus")
            for keyword, value in fields:
                refusals = self._refusals.get(keyword.lower())
                if refusals:
                    return ActionResult(action, False, refusals.pop(0))
                try:
                    update_field(self, job, keyword, value)
                except UpdateRefusedError as exc:
                    return ActionResult(action, False, str(exc))
        return ActionResult(action, True)

    def _named(self, job_id: str) -> list[FakeJob]:
        """Jobs that ``scontrol update JobId=`` would touch: a bare array id means all tasks."""
        exact = [j for j in self.queue.values() if j.job_id == job_id]
        if exact or "_" in job_id:
            return exact
        return [j for j in self.queue.values() if job_id in {str(j.array_id), str(j.raw_id)}]

    def shrink(self, job: FakeJob, key: str, value: str) -> None:
        """A running job loses nodes, and the ranks on them."""
        if key == "numnodes":
            keep = sorted(job.placement)[: int(value.partition("-")[0])]
        else:
            keep = [n for n in sorted(job.placement) if n in value]
        if len(keep) < len(job.placement):
            self.shrunk.append(job.job_id)
        gone = {n: g for n, g in job.placement.items() if n not in keep}
        self._free(replace(job, placement=gone))
        job.placement = {n: g for n, g in job.placement.items() if n in keep}

    def plan_end(self, job: FakeJob) -> None:
        """Recompute when a running job will end."""
        assert job.start_s is not None
        job.end_s = job.start_s + job.duration_s()

    def priority(self, job: FakeJob) -> int:
        """Slurm's sum; 0 for a held job."""
        if job.held:
            return 0
        if job.set_priority is not None:
            return job.set_priority
        waited = max(0.0, self.now - job.submit_s)
        age = int(self.age_weight * min(1.0, waited / self.max_age_s))
        return max(1, job.base_priority + age - job.nice + job.site_factor)

    def eligible(self, job: FakeJob) -> bool:
        """Whether multifactor ranks the job."""
        return not job.held and not job.dependency and job.begin_s <= self.now

    def _schedule(self) -> None:
        order = [j for j in self.queue.values() if j.state is JobState.PENDING]
        order.sort(key=lambda j: (-self.priority(j), j.raw_id))
        reserved: dict[str, tuple[FakeJob, float]] = {}
        for job in order:
            if not self.eligible(job):
                self.tell_reason(job)
                continue
            if job.impossible:
                job.reason = "BadConstraints"
                continue
            while job.state is JobState.PENDING and self._try(job, reserved):
                pass

    def _try(self, job: FakeJob, reserved: dict[str, tuple[FakeJob, float]]) -> bool:
        """Start the job (or one task of its array); whether there may be another task."""
        if reason := self.bar(job):
            job.reason = reason
            return False
        if self.cap_gpus is not None and job.gpus > self.cap_gpus:
            job.reason = "QOSMaxGRESPerUser"
            return False
        free = free_now(self.nodes)
        running = [j for j in self.queue.values() if j.placement]
        for partition in job.partitions:
            placement = place(job, partition, self.nodes, free)
            blocked = reserved.get(partition)
            if placement and blocked is not None:
                head, moment = blocked
                end = self.now + (job.time_limit_s or 1e18)
                if end > moment:
                    left = after(free, placement, cpus_per_node(job, len(placement)))
                    if shadow(head, partition, running, self.nodes, left, self.now)[0] > moment:
                        placement = {}
            if placement:
                self._start(job, placement)
                return job.state is JobState.PENDING
            if blocked is None:
                moment = shadow(job, partition, running, self.nodes, free, self.now)[0]
                reserved[partition] = (job, moment)
                job.expected_s = moment if moment < 1e17 else None
                job.reason = "Resources"
            else:
                job.reason = "Priority"
        return False

    def tell_reason(self, job: FakeJob) -> None:
        """Why a job that is not eligible waits."""
        if job.held:
            job.reason = "JobHeldAdmin" if job.held_by_admin else "JobHeldUser"
        elif job.dependency:
            job.reason = "Dependency"
        else:
            job.reason = "BeginTime"

    def _start(self, job: FakeJob, placement: Mapping[str, int]) -> None:
        if job.array_id is not None and len(job.tasks) > 1:
            task, *rest = job.tasks
            job.tasks = tuple(rest)
            job = replace(job, raw_id=self._next_id, tasks=(task,))
            self._next_id += 1
            self.queue[job.raw_id] = job
        job.placement = dict(placement)
        job.state, job.start_s, job.reason = JobState.RUNNING, self.now, "None"
        cpus = cpus_per_node(job, len(placement))
        for name, gpus in placement.items():
            node = self.nodes[name]
            node.gpus_alloc += gpus
            node.cpus_alloc += cpus
            node.jobs.add(job.raw_id)
        if job.restarts and int(self.now) <= int(job.submit_s):
            # In the second in which its nodes revoked the credentials of the attempt before.
            self._end(job, JobState.FAILED)
        self.plan_end(job)

    def _free(self, job: FakeJob) -> None:
        cpus = cpus_per_node(job, len(job.placement))
        for name, gpus in job.placement.items():
            node = self.nodes[name]
            node.gpus_alloc -= gpus
            node.cpus_alloc = max(0, node.cpus_alloc - cpus)
            node.jobs.discard(job.raw_id)
        job.placement = {}

    def _end(self, job: FakeJob, state: JobState) -> None:
        held = dict(job.placement)
        self._free(job)
        job.state, job.end_s = state, self.now
        job.placement = held  # kept as history: how many GPUs the job had
        self.queue.pop(job.raw_id, None)
        self.finished.append(job)

    def _rows(self) -> tuple[Job, ...]:
        rows = [j for j in self.queue.values() if j.state is JobState.PENDING or j.placement]
        rows.sort(key=lambda j: (not j.placement, -self.priority(j), j.raw_id))
        return tuple(observed_job(self, j) for j in rows)

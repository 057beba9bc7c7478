"""The replay itself: jobs arrive, a policy decides, jobs run for their true time to the end.

Event-driven: the clock jumps from one arrival or end to the next, all events of one instant are
taken together, and then the policy is asked once. So a policy reacts at once; what a real cluster
adds (a cycle's delay, leases, whole-minute limits) is not modelled here.

The engine carries out a plan and judges nothing: a START that finds no room is not an error, it
stays pending, as it would in Slurm, and is counted. The choice a reader would question: only
verdict START starts a job. RESERVE and ORDER leave a job to Slurm's own scheduler in the daemon;
here the policy that wants this says START itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node, Partition
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import JobFacts, Permit, Policy, View
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.placement import Request, seat

PARTITION = "main"


class SimulationError(SlurmExtError):
    """A replay cannot go on, or a policy broke its contract."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine that is replayed. ``pooled`` ignores node borders: any free GPUs will do."""

    nodes: int = 8
    gpus_per_node: int = 4
    pooled: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def placement(self, gpus: int) -> tuple[int, ...]:
        """GPUs per node for a job of this size: the fewest nodes."""
        if self.pooled:
            return (gpus,)
        whole, rest = divmod(gpus, self.gpus_per_node)
        return (self.gpus_per_node,) * whole + ((rest,) if rest else ())

    def inventory(self) -> tuple[Node, ...]:
        """The nodes, all free. Pooled hardware is one node that holds every GPU."""
        count, size = (1, self.gpus) if self.pooled else (self.nodes, self.gpus_per_node)
        width = len(str(count))
        return tuple(
            Node(
                name=f"n{index:0{width}d}",
                gpus=size,
                cpus=size,
                partitions=frozenset({PARTITION}),
            )
            for index in range(1, count + 1)
        )


@dataclass(frozen=True, slots=True)
class SimJob:
    """A job as the replay knows it.

    ``candidates`` is what the policy may see; ``true_run_s`` (GPU count -> seconds) is what
    happens. ``limit_s`` is the user's time limit. ``error_free_s`` is the run at the requested
    GPUs without the hidden error, the yardstick of slowdown.
    """

    job_id: str
    submit_s: float
    gpus: int
    limit_s: float
    candidates: tuple[Candidate, ...]
    true_run_s: Mapping[int, float]
    error_free_s: float
    user: str = "user"


@dataclass(frozen=True, slots=True)
class Run:
    """One start of one job, with the GPUs it held on each node."""

    job_id: str
    submit_s: float
    start_s: float
    end_s: float
    gpus: int
    seats: Mapping[str, int]
    error_free_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a replay did. ``refused_starts`` counts STARTs of a plan that found no room."""

    policy: str
    gpus: int
    runs: tuple[Run, ...]
    decisions: int = 0
    refused_starts: int = 0


@dataclass(slots=True)
class _State:
    """The books of one replay."""

    nodes: dict[str, Node]
    pending: dict[str, SimJob] = field(default_factory=dict)
    running: dict[str, Run] = field(default_factory=dict)
    by_id: dict[str, SimJob] = field(default_factory=dict)
    done: list[Run] = field(default_factory=list)
    decisions: int = 0
    refused: int = 0


# At one instant ends come before arrivals only for the reader's sake: the policy is asked once,
# after both.
_END, _ARRIVAL = 0, 1


def replay(jobs: Iterable[SimJob], hardware: Hardware, policy: Policy) -> Schedule:
    """Run every job once, from arrival to end.

    Raises SimulationError when jobs are left that nothing will ever start, or when the policy
    starts a configuration that the job does not have.
    """
    state = _State(nodes={node.name: node for node in hardware.inventory()})
    events: list[tuple[float, int, int, str]] = []
    for index, job in enumerate(jobs):
        if job.job_id in state.by_id:
            raise SimulationError(
                f"job {job.job_id} appears twice in the workload; use each id once"
            )
        state.by_id[job.job_id] = job
        heapq.heappush(events, (job.submit_s, _ARRIVAL, index, job.job_id))
    position = {job_id: index for index, job_id in enumerate(state.by_id)}
    previous: Plan | None = None
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, _, job_id = heapq.heappop(events)
            if kind == _END:
                _finish(state, job_id)
            else:
                state.pending[job_id] = state.by_id[job_id]
        if not state.pending:
            continue
        previous = policy(_view(state, previous, now), now)
        state.decisions += 1
        for run in _carry_out(state, previous, now):
            heapq.heappush(events, (run.end_s, _END, position[run.job_id], run.job_id))
    if state.pending:
        raise SimulationError(
            f"policy {policy.name} never started {', '.join(state.pending)}: "
            f"the machine is idle and nothing more happens"
        )
    runs = tuple(sorted(state.done, key=lambda run: position[run.job_id]))
    return Schedule(policy.name, hardware.gpus, runs, state.decisions, state.refused)


def _view(state: _State, previous: Plan | None, now: float) -> View:
    snapshot = Snapshot(
        taken_s=now,
        jobs=tuple(_rows(state)),
        nodes=tuple(state.nodes.values()),
        partitions=(Partition(PARTITION, tuple(state.nodes), default=True),),
    )
    facts = {
        job.job_id: JobFacts(
            candidates=job.candidates,
            permit=_FULL_PERMIT,
            waiting_since_s=job.submit_s,
            pool=PARTITION,
        )
        for job in state.pending.values()
    }
    return View(
        snapshot=snapshot,
        facts=facts,
        pools={PARTITION: tuple(state.nodes)},
        free_at_s={job_id: _expected_end(state, run) for job_id, run in state.running.items()},
        previous=previous,
    )


_FULL_PERMIT = Permit(order=True, resize=True, lease=True, pin=True)


def _rows(state: _State) -> Iterator[Job]:
    for run in state.running.values():
        job = state.by_id[run.job_id]
        yield replace(
            _row(job, JobState.RUNNING),
            gpus=run.gpus,
            nodes=len(run.seats),
            ntasks=run.gpus,
            cpus=run.gpus,
            start_s=run.start_s,
            end_s=run.start_s + job.limit_s,
            node_names=tuple(run.seats),
        )
    for job in state.pending.values():
        yield _row(job, JobState.PENDING)


def _row(job: SimJob, state: JobState) -> Job:
    return Job(
        job_id=job.job_id,
        base_id=0,
        user=job.user,
        partitions=(PARTITION,),
        state=state,
        submit_s=job.submit_s,
        gpus=job.gpus,
        ntasks=job.gpus,
        cpus=job.gpus,
        time_limit_s=job.limit_s,
    )


def _expected_end(state: _State, run: Run) -> float:
    """When the estimate says that the run ends: the true end is nobody's to see."""
    job = state.by_id[run.job_id]
    candidate = _candidate(job, run.gpus)
    return run.start_s + (job.limit_s if candidate is None else candidate.remaining_s.value)


def _candidate(job: SimJob, gpus: int) -> Candidate | None:
    return next((item for item in job.candidates if item.gpus == gpus), None)


def _carry_out(state: _State, plan: Plan, now: float) -> Iterator[Run]:
    for decision in sorted(plan.decisions.values(), key=lambda item: (item.rank, item.job_id)):
        if decision.verdict is not Verdict.START:
            continue
        job = state.pending.get(decision.job_id)
        if job is None:
            raise SimulationError(f"plan starts {decision.job_id}, which is not pending")
        configuration = decision.configuration
        if configuration is None or configuration.gpus not in job.true_run_s:
            raise SimulationError(f"plan starts {decision.job_id} as {configuration}, not its own")
        seats = _seats(state.nodes.values(), decision, configuration)
        if seats is None:
            state.refused += 1
            continue
        for name, gpus in seats.items():
            _book(state.nodes, name, gpus)
        run = Run(
            job_id=job.job_id,
            submit_s=job.submit_s,
            start_s=now,
            end_s=now + job.true_run_s[configuration.gpus],
            gpus=configuration.gpus,
            seats=seats,
            error_free_s=job.error_free_s,
        )
        del state.pending[job.job_id]
        state.running[job.job_id] = run
        yield run


def _seats(
    nodes: Iterable[Node], decision: Decision, configuration: Configuration
) -> dict[str, int] | None:
    """GPUs per node for a start, on the plan's nodes where it names any; None where no room is."""
    request = Request(decision.job_id, configuration.placement, allowed=frozenset(decision.nodes))
    names = seat((request,), nodes).seats.get(decision.job_id)
    if names is None:
        return None
    return dict(zip(names, sorted(configuration.placement, reverse=True), strict=True))


def _book(nodes: dict[str, Node], name: str, gpus: int) -> None:
    node = nodes[name]
    nodes[name] = replace(
        node, gpus_alloc=node.gpus_alloc + gpus, cpus_alloc=node.cpus_alloc + gpus
    )


def _finish(state: _State, job_id: str) -> None:
    run = state.running.pop(job_id)
    for name, gpus in run.seats.items():
        _book(state.nodes, name, -gpus)
    state.done.append(run)


def seats_overlap(runs: Sequence[Run], hardware: Hardware) -> str:
    """Empty when no node ever holds more GPUs than it has, else where and when it does."""
    sizes = {node.name: node.gpus for node in hardware.inventory()}
    changes = sorted(
        (at, sign * gpus, name)
        for run in runs
        for name, gpus in run.seats.items()
        for at, sign in ((run.start_s, 1), (run.end_s, -1))
    )
    used = dict.fromkeys(sizes, 0)
    for at, gpus, name in changes:
        used[name] += gpus
        if not 0 <= used[name] <= sizes[name]:
            return f"node {name} holds {used[name]} of {sizes[name]} GPUs at {at:g} s"
    return ""

"""Whether a running job gives way to a waiting one that only fragments keep from starting. Pure.

Free GPUs that lie on the wrong nodes help nobody: a job for four GPUs of one node waits beside two
nodes with two free ones each. Where moving one running job would seat the waiting one *and* leave
room for the moved one, the moved one can save, go back to the queue and start again a moment later.
That costs it time, so it is done only where all of this holds:

* Consent. Its owner gave ``--ft-max-pause``, and the predicted absence is shorter.
* Data. The job itself reported how long a save takes and when its first step ended, or its
  attempts how long a start took.
  Nothing is guessed: a job that tells less is left alone.
* Gain. What the waiting job gains is worth more than what the moved one loses, by a margin, in both
  measures: the objective's (share of a job's work per second, so that a job close to its end is not
  disturbed) and plain GPU-seconds (so that many GPUs never stand still for a few).
* Rest. The job was not sent back to the queue, for whatever reason, within the cool-down.
* Place. Nobody who is ahead of the waiting job would take the room that is made.

The gain counts from the earliest end, by the low estimates, that would seat the waiting job without
us. Steps are not lost: the job saves at the very step at which it stops, and goes on as it is where
that fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.control.decide import Decided
from slurm_ext.control.observe import Observation
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.rules import LEASE, MOVE, ActingRules
from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Node, Pool
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.policy import JobFacts
from slurm_ext.domain.spans import about, counted
from slurm_ext.optimize.objective import Choice, Demand, Weights, score
from slurm_ext.policy.placement import Request, seat
from slurm_ext.policy.queue import present_candidate, request_for

# From the end of the ranks until Slurm has cleared the nodes: 1 to 3 s on a test cluster, and an
# epilog takes longer.
CLEAN_UP_S = 10.0
# Until a plan has noticed that the job is back, lifted Slurm's delay, and Slurm has started it.
CYCLES = 3
# Ranks agree on a pause at the end of a step and learn of it one step later.
_STEPS = 2
# Waiting jobs per pool that are looked at, and running ones for each of them.
_MOST_WAITING = 8
_MOST_RUNNING = 64
_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Move:
    """One running job that gives way. Times are seconds.

    ``saved_s`` is how much earlier the waiting job starts, ``away_s`` for how long the moved one
    does not train. ``gain`` and ``cost`` are shares of a job's work.
    """

    job_id: str
    for_job: str
    pool: str
    nodes: tuple[str, ...]
    back_on: tuple[str, ...]
    gpus: int
    for_gpus: int
    saved_s: float
    away_s: float
    gain: float
    cost: float

    @property
    def words(self) -> str:
        """For the journal, the log and explain."""
        return (
            f"job {self.job_id} ({counted(self.gpus, 'GPU')}) saves and is requeued, so that job"
            f" {self.for_job} gets {counted(self.for_gpus, 'GPU')} on {fold(self.nodes)} about"
            f" {about(self.saved_s)} earlier; it should be back on {fold(self.back_on)} after about"
            f" {about(self.away_s)} (worth {self.gain:.3g}, costs {self.cost:.3g} of a job's work)"
        )


@dataclass(frozen=True, slots=True)
class Moves:
    """The best move, if any, and why nobody moves for other waiting jobs that fragments hold."""

    move: Move | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)


_Seat = tuple[Candidate, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting job, with the requests by which it could be seated; the first one is likeliest."""

    job: Job
    facts: JobFacts
    candidates: tuple[Candidate, ...]

    def seats(self, nodes: Sequence[Node], pool: Pool) -> dict[int, _Seat]:
        """Candidates that find a seat, by GPU count."""
        names = [node.name for node in pool.nodes]
        found = {}
        for candidate in self.candidates:
            request = request_for(self.job, candidate, names)
            nodes_taken = seat([request], nodes).seats.get(self.job.job_id)
            if nodes_taken is not None:
                found[candidate.gpus] = (candidate, nodes_taken)
        return found


def find_move(
    seen: Observation,
    decided: Decided,
    ledger: Mapping[str, LedgerEntry],
    rules: ActingRules,
    rested: Mapping[str, float],
) -> Moves:
    """The best move now. ``rested`` tells until when jobs are left alone that were asked lately."""
    best: Move | None = None
    refusals: dict[str, str] = {}
    index = PoolIndex(seen.snapshot, ledger)
    for key, pool in sorted(decided.pools.items()):
        search = _Search(seen, decided, ledger, rules, rested, index, key, pool)
        for waiting in search.fragmented():
            found = search.for_job(waiting)
            if isinstance(found, str):
                refusals[waiting.job.job_id] = found
            elif best is None or _better(found, best):
                best = found
    return Moves(best, refusals)


def _better(move: Move, other: Move) -> bool:
    return (other.cost - other.gain, other.for_job, other.job_id) > (
        move.cost - move.gain,
        move.for_job,
        move.job_id,
    )


class _Search:
    """One pool."""

    def __init__(
        self,
        seen: Observation,
        decided: Decided,
        ledger: Mapping[str, LedgerEntry],
        rules: ActingRules,
        rested: Mapping[str, float],
        index: PoolIndex,
        key: str,
        pool: Pool,
    ) -> None:
        self._seen = seen
        self._decided = decided
        self._ledger = ledger
        self._rules = rules
        self._rested = rested
        self._index = index
        self._key = key
        self._pool = pool
        self._jobs = {job.job_id: job for job in seen.snapshot.pending()}
        self._line: list[_Waiting] = []
        self._nodes: list[Node] | None = None

    def fragmented(self) -> Iterator[_Waiting]:
        """Waiting jobs of which enough GPUs are free but no seat, as the plan ranks them."""
        decisions = [
            d
            for d in self._decided.plan.decisions.values()
            if d.pool == self._key or self._facts(d.job_id).pool == self._key
        ]
        decisions.sort(key=lambda d: (d.rank, d.job_id))
        self._nodes = self._left_over(decisions)
        if self._nodes is None:
            return
        free = sum(node.gpus_free for node in self._nodes)
        for decision in decisions:
            waiting = self._waiting(decision)
            if waiting is None or len(self._line) >= _MOST_WAITING:
                continue
            self._line.append(waiting)
            least = min(candidate.gpus for candidate in waiting.candidates)
            movable = self._rules.may(waiting.job.partition, MOVE)
            if movable and least <= free and not waiting.seats(self._nodes, self._pool):
                yield waiting

    def _facts(self, job_id: str) -> JobFacts:
        return self._decided.view.facts.get(job_id, _NO_FACTS)

    def _left_over(self, decisions: Sequence[Decision]) -> list[Node] | None:
        """Nodes without what is started now; ``None`` where a start does not say on which."""
        nodes = {node.name: node for node in self._pool.nodes}
        for decision in self._decided.plan.decisions.values():
            if decision.verdict is not Verdict.START or decision.configuration is None:
                continue
            job = self._jobs.get(decision.job_id)
            if job is None:
                continue
            if decision.nodes:
                request = _request(job, decision.configuration.placement, decision.nodes)
                _take(nodes, request, decision.nodes)
            elif decision in decisions:
                return None
        return list(nodes.values())

    def _waiting(self, decision: Decision) -> _Waiting | None:
        """The job of a decision, where it waits for GPUs and for nothing else."""
        job, facts = self._jobs.get(decision.job_id), self._facts(decision.job_id)
        if job is None or decision.verdict in (Verdict.START, Verdict.LEAVE, Verdict.STOP):
            return None
        if job.held or decision.left_to_slurm or not facts.permit.order or not facts.candidates:
            return None
        if job.dependency or job.licenses or job.array_tasks > 1:
            return None
        alone = tuple(c for c in facts.candidates if len(c.job_ids) == 1)
        if not alone:
            return None
        present = present_candidate(job, replace(facts, candidates=alone))
        others = alone if facts.permit.resize else ()
        return _Waiting(job, facts, (present, *(c for c in others if c is not present)))

    # -- one waiting job -------------------------------------------------------------------------

    def for_job(self, waiting: _Waiting) -> Move | str:
        """The best move for this job, or in words why there is none."""
        assert self._nodes is not None
        foreign = self._foreign_ahead(waiting.job)
        if foreign:
            return f"nobody moves for it: job {foreign}, which is not ours, would take the room"
        best: Move | None = None
        reasons: list[str] = []
        running = [j for j in self._seen.snapshot.running() if self._touches(j)]
        running.sort(key=lambda job: (job.gpus, job.base_id, job.job_id))
        for job in running[:_MOST_RUNNING]:
            found = self._move(job, waiting)
            if isinstance(found, Move):
                if best is None or _better(found, best):
                    best = found
            elif found:
                reasons.append(found)
        if best is not None:
            return best
        return reasons[0] if reasons else "no running job could give way so that both have room"

    def _touches(self, job: Job) -> bool:
        return not {node.name for node in self._pool.nodes}.isdisjoint(job.node_names)

    def _foreign_ahead(self, waiting: Job) -> str:
        """A waiting job that is not planned and would be started first."""
        for job in self._jobs.values():
            facts = self._decided.view.facts.get(job.job_id)
            if (
                (facts is None or not facts.permit.order)
                and job.competes
                and job.gpus
                and job.priority > waiting.priority
                and not set(job.partitions).isdisjoint(waiting.partitions)
            ):
                return job.job_id
        return ""

    def _move(self, job: Job, waiting: _Waiting) -> Move | str:
        """This job for that one; a refusal in words; empty where it would not even help."""
        assert self._nodes is not None
        placed = _placed(job)
        if placed is None or job.state is not JobState.RUNNING:
            return ""
        without = _freed(self._nodes, job, placed)
        seats = waiting.seats(without, self._pool)
        if not seats:
            return ""
        candidate, nodes = (
            seats[max(seats)] if waiting.facts.permit.resize else next(iter(seats.values()))
        )
        rest = {node.name: node for node in without}
        names = [node.name for node in self._pool.nodes]
        _take(rest, request_for(waiting.job, candidate, names), nodes)
        own = self._index.pool_of(job)
        if own is None:
            return ""
        request = _request(job, tuple(placed.values()), [node.name for node in own.nodes])
        back = seat([request], rest.values()).seats.get(job.job_id)
        if back is None:
            return ""
        why_not = self._why_not(job)
        if why_not:
            return why_not
        for other in self._line:
            if other is waiting:
                break
            if other.seats(without, self._pool):
                return f"job {other.job.job_id}, which is ahead, would take the room"
        return self._weigh(job, waiting, (candidate, nodes), back)

    def _why_not(self, job: Job) -> str:
        """Why this job may not be moved at all; empty where it may."""
        directive = self._seen.directives.get(job.job_id)
        entry = self._ledger.get(job.job_id)
        name, now = f"job {job.job_id}", self._seen.now
        if directive is None or directive.max_pause_s is None:
            return f"{name} could give way, but its owner has not allowed it (--ft-max-pause)"
        if not self._rules.may(job.partition, MOVE) or job.het_job_id is not None or not job.batch:
            return f"{name} could give way, but is of a kind that is not moved"
        if job.req_nodes and not (entry is not None and entry.pinned):
            return f"{name} could give way, but asks for nodes by name"
        if now < self._rested.get(job.job_id, 0.0) or (
            entry is not None
            and entry.requeues
            and now - entry.requeues[-1].at_s < self._rules.move.cooldown_s
        ):
            return f"{name} could give way, but was asked to or requeued not long ago"
        return ""

    def _weigh(
        self, job: Job, waiting: _Waiting, chosen: _Seat, back: tuple[str, ...]
    ) -> Move | str:
        (candidate, nodes), name = chosen, f"job {job.job_id}"
        times = self._times(job)
        if isinstance(times, str):
            return times
        until_free_s, away_s = times
        directive = self._seen.directives[job.job_id]
        assert directive.max_pause_s is not None
        if away_s > directive.max_pause_s:
            return (
                f"{name} would be away for about {about(away_s)}, longer than its owner allows"
                f" ({about(directive.max_pause_s)})"
            )
        end = self._decided.ends.get(job.job_id)
        if end is None:
            return f"{name} could give way, but nobody knows when it ends"
        now = self._seen.now
        saved_s = self._seated_s(waiting) - now - until_free_s
        gain = saved_s * _worth(
            waiting.facts.weight,
            candidate.gpus,
            candidate.remaining_s.value,
            now - waiting.facts.waiting_since_s,
            None if waiting.facts.deadline_s is None else waiting.facts.deadline_s - now,
        )
        cost = away_s * _worth(1.0, job.gpus, max(end.low - now, 1.0), 0.0, None)
        factor = 1.0 + self._rules.move.margin
        if gain <= cost * factor or saved_s * candidate.gpus <= away_s * job.gpus * factor:
            return (
                f"moving {name} would cost more than it gains: the start comes about"
                f" {about(max(0.0, saved_s))} earlier, {name} stands still for {about(away_s)}"
            )
        return Move(
            job.job_id,
            waiting.job.job_id,
            self._key,
            nodes,
            back,
            job.gpus,
            candidate.gpus,
            saved_s,
            away_s,
            gain,
            cost,
        )

    def _times(self, job: Job) -> tuple[float, float] | str:
        """Until the GPUs are free, and for how long the job stands still; or what is not known."""
        report = self._seen.sources.progress.get(job.job_id)
        record = self._seen.attempts.get(job.job_id)
        name = f"job {job.job_id} could give way, but"
        if report is None or report.attempt != job.restarts or report.save_s is None:
            return f"{name} has not reported how long it takes to save"
        if report.hold is not None:
            return f"{name} is paused"
        if report.step <= (report.restored_step or 0):
            return f"{name} has done no step yet in this attempt"
        starts = [
            attempt.first_step_s - attempt.started_s
            for attempt in (record.attempts if record is not None else ())
            if attempt.first_step_s is not None and attempt.first_step_s >= attempt.started_s
        ]
        # Of an attempt that still runs, the attempts tell the start alone.
        if report.first_step_s is not None and job.start_s is not None:
            starts.append(max(0.0, report.first_step_s - job.start_s))
        if not starts:
            return f"{name} nothing tells how long it takes to start"
        begun_s = report.first_step_s or job.start_s or report.at_s
        steps = report.step - (report.restored_step or 0)
        step_s = max(0.0, report.at_s - begun_s) / max(1, steps)
        lifted = self._rules.may(job.partition, LEASE)
        queue_s = CYCLES * self._rules.cycle_s if lifted else self._rules.requeue_hold_s
        until_free_s = _STEPS * step_s + report.save_s + CLEAN_UP_S
        return until_free_s + self._rules.cycle_s, report.save_s + CLEAN_UP_S + queue_s + max(
            starts
        )

    def _seated_s(self, waiting: _Waiting) -> float:
        """When the job would find a seat without us, if running jobs end as early as they may."""
        assert self._nodes is not None
        nodes = list(self._nodes)
        now = self._seen.now
        ends = []
        for job in self._seen.snapshot.running():
            placed = _placed(job)
            if placed is None or not self._touches(job):
                continue
            end = self._decided.ends.get(job.job_id)
            leaving = job.state is not JobState.RUNNING or end is None
            ends.append((now if leaving or end is None else max(now, end.low), job, placed))
        for at_s, job, placed in sorted(ends, key=lambda e: (e[0], e[1].job_id)):
            nodes = _freed(nodes, job, placed)
            if waiting.seats(nodes, self._pool):
                return at_s
        return now  # not even then: what is wrong is not the fragments


_NO_FACTS = JobFacts(())


def _worth(
    weight: float, gpus: int, remaining_s: float, waited_s: float, deadline_in_s: float | None
) -> float:
    """The objective's value of running now, in shares of the job's work per second."""
    demand = Demand("", (Choice(gpus, remaining_s),), max(0.0, waited_s), weight, deadline_in_s)
    return score(demand, _WEIGHTS)[0].total


def _request(job: Job, placement: tuple[int, ...], names: Iterable[str]) -> Request:
    """GPUs per node in the job's own proportions of CPUs and memory."""
    gpus = max(1, job.gpus)
    return Request(
        job.job_id,
        placement,
        job.cpus / gpus,
        (job.memory_mib or 0) / gpus,
        frozenset(names),
        frozenset(job.exc_nodes),
        job.exclusive,
    )


def _placed(job: Job) -> dict[str, int] | None:
    """GPUs of a running job on each of its nodes; ``None`` where they are not spread evenly."""
    if not job.gpus or not job.node_names or job.gpus % len(job.node_names):
        return None
    return dict.fromkeys(job.node_names, job.gpus // len(job.node_names))


def _freed(nodes: Sequence[Node], job: Job, placed: Mapping[str, int]) -> list[Node]:
    """The nodes as they are when the job has left."""
    cpus = job.cpus // max(1, len(placed))
    memory = (job.memory_mib or 0) // max(1, len(placed))
    return [
        replace(
            node,
            gpus_alloc=max(0, node.gpus_alloc - placed[node.name]),
            cpus_alloc=max(0, node.cpus_alloc - cpus),
            memory_alloc_mib=max(0, node.memory_alloc_mib - memory),
        )
        if node.name in placed
        else node
        for node in nodes
    ]


def _take(nodes: dict[str, Node], request: Request, names: Sequence[str]) -> None:
    """Seat a request on these nodes, in the order of its placement."""
    for name, share in zip(names, sorted(request.placement, reverse=True), strict=False):
        node = nodes.get(name)
        if node is not None:
            nodes[name] = replace(
                node,
                gpus_alloc=node.gpus if request.exclusive else node.gpus_alloc + share,
                cpus_alloc=node.cpus_alloc + int(request.cpus * share),
                memory_alloc_mib=node.memory_alloc_mib + int(request.memory_mib * share),
            )

"""Stopping running jobs: who holds what, who has to give way, and policy ``srtf-preemptive``.

Every preemptive policy first says who should run, in which order and in which configuration; the
rest is the same for all of them and is here. GPUs of jobs that should not run count as free, the
new ones are seated, and then whoever still fits where it runs goes on: a job is stopped only for
one that starts. A job that should run on another count and finds no seat goes on as it is, if its
place is still free.

``srtf-preemptive`` ranks waiting and running jobs by remaining time, in their present shapes. A
waiting job's time includes its start-up; a running job's does not, but stopping it costs a second
start later. So a running job counts for that much less: it is stopped only for a job that is
shorter by more than the stop costs.

The choice a reader would question: no check that a stopped job is young or was stopped before.
Remaining time only falls while a job runs, so that two jobs cannot stop each other in turns. That
holds only as long as nobody slips in where a job was stopped: GPUs that a job is about to give back
(it saves its state, or its node is cleaned up) are given out in rank order like free ones, though
nobody can be seated there yet. Else a longer job would start on those that are free first, and be
stopped for the same one in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node, Topology
from slurm_ext.domain.plan import Decision, Plan, Term, Verdict
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.policy.placement import Request, Seating, TopologyRule, seat
from slurm_ext.policy.queue import Field, fields, present_candidate, request_for
from slurm_ext.policy.telling import leave

# Two durations nearer than this are equal (floating point).
_INSTANT_S = 1e-6


@dataclass(frozen=True, slots=True)
class Contender:
    """A job that waits, or runs and may be stopped. ``held`` is GPUs by node, empty if it waits.

    ``present`` is the candidate of its present GPU count, as a start from here. ``left_s`` is its
    remaining time: of a waiting job from a start now, of a running one if it goes on as it is.
    """

    job: Job
    fact: JobFacts
    present: Candidate
    left_s: float
    held: Mapping[str, int]

    @property
    def key(self) -> str:
        """The job's id."""
        return self.job.job_id

    @property
    def running(self) -> bool:
        """Whether it holds GPUs now."""
        return bool(self.held)

    @property
    def restart_s(self) -> float:
        """What stopping it costs: a start from here takes so much longer than going on."""
        return max(0.0, self.present.remaining_s.value - self.left_s) if self.running else 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job that should run, and how. For a running job its present count means: go on."""

    contender: Contender
    candidate: Candidate

    @property
    def stays(self) -> bool:
        """Whether nothing is to be done for it."""
        return self.contender.running and self.candidate.gpus == self.contender.job.gpus


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who starts (or starts anew) where, who is stopped, and who found no seat.

    ``others`` are the candidates of those that start in another placement of the count that was
    wanted for them.
    """

    starts: Mapping[str, tuple[str, ...]]
    stopped: tuple[str, ...]
    unseated: tuple[str, ...]
    others: Mapping[str, Candidate] = field(default_factory=dict)


def contenders(view: View, part: Field, now: float, *, quantum: bool = True) -> list[Contender]:
    """The waiting jobs of a field and those running in it that may be stopped.

    With ``quantum`` a running job may be stopped only once it has run for longer than a stop costs
    it (saving, waiting, starting again). Rules that charge nothing for a stop would else stop jobs
    for ever before they have done any work, since each stop is an event that they react to; so at
    least half of the time that a job holds GPUs is work. Intervals of minutes are longer than that.
    """
    found = []
    for job in part.jobs:
        fact = view.facts[job.job_id]
        present = present_candidate(job, fact)
        found.append(Contender(job, fact, present, present.remaining_s.value, {}))
    running = stoppable(view, part, now)
    return [*found, *(c for c in running if not quantum or _has_run(c, now))]


def _has_run(item: Contender, now: float) -> bool:
    """Whether it has run for longer than a stop costs. While it starts up, what a stop would cost
    grows with it, so that the comparison must not turn on rounding."""
    since = item.job.start_s
    return since is None or now - since > item.restart_s + _INSTANT_S


def stoppable(view: View, part: Field, now: float) -> Iterator[Contender]:
    """The running jobs of a field that may be stopped."""
    if not view.running:
        return
    for job in view.snapshot.running():
        fact = view.running.get(job.job_id) if job.gpus else None
        if fact is None or fact.pool not in part.pools or not fact.candidates:
            continue
        present = present_candidate(job, fact)
        end_s = view.free_at_s.get(job.job_id)
        left_s = present.remaining_s.value if end_s is None else max(0.0, end_s - now)
        held = _held(job, present, part.nodes)
        if held:
            yield Contender(job, fact, present, left_s, held)


def _held(job: Job, present: Candidate, nodes: Iterable[Node]) -> dict[str, int]:
    """GPUs by node. Slurm tells nodes and the total: the shares are those of the placement it was
    started in, or whole nodes first where that is not known."""
    shares = sorted(present.configuration.placement, reverse=True)
    if present.gpus == job.gpus and len(shares) == len(job.node_names):
        return dict(zip(job.node_names, shares, strict=True))
    used = {node.name: node.gpus_alloc for node in nodes}
    held: dict[str, int] = {}
    left = job.gpus
    for name in job.node_names:
        part = min(left, used.get(name, 0))
        if part:
            held[name] = part
            left -= part
    return held


def by_count(ranked: Sequence[Contender], gpus: int) -> tuple[list[Wanted], list[Contender]]:
    """Give out GPUs in rank order, each job in its present shape; a job that does not fit is
    passed over. Counts only: where they are is `arrange`'s business."""
    wanted: list[Wanted] = []
    rest: list[Contender] = []
    for item in ranked:
        need = item.job.gpus if item.running else item.present.gpus
        if need <= gpus:
            gpus -= need
            wanted.append(Wanted(item, item.present))
        else:
            rest.append(item)
    return wanted, rest


def arrange(
    view: View,
    part: Field,
    wanted: Sequence[Wanted],
    give_way: Sequence[Contender],
    *,
    spare: bool = True,
) -> Arrangement:
    """Seat those that start; stop those whose GPUs it takes, the last of ``give_way`` first.

    Without ``spare`` all that should give way are stopped, also where nobody takes their place.
    """
    moves = [item for item in wanted if not item.stays]
    if not moves:
        return Arrangement({}, (), ())
    losers = [item for item in give_way if item.running]
    changing = [item.contender for item in moves if item.contender.running]
    seating, others = _seat(view, released(part, [*losers, *changing]), moves)
    left = {n.name: n.gpus_free for n in released(part, [*losers, *changing]).nodes}
    shares = {
        item.contender.key: others.get(item.contender.key, item.candidate).configuration.placement
        for item in moves
    }
    for key, names in seating.seats.items():
        for name, share in zip(names, sorted(shares[key], reverse=True), strict=True):
            left[name] -= share
    stopped = []
    for item in [*(c for c in changing if c.key not in seating.seats), *losers]:
        if spare and all(left.get(name, 0) >= gpus for name, gpus in item.held.items()):
            for name, gpus in item.held.items():
                left[name] -= gpus
        else:
            stopped.append(item.key)
    return Arrangement(seating.seats, tuple(stopped), seating.unseated, others)


def released(part: Field, givers: Iterable[Contender]) -> Field:
    """The field as it would be without these running jobs."""
    freed: dict[str, Node] = {}
    nodes = {node.name: node for node in part.nodes}
    for item in givers:
        for name, gpus in item.held.items():
            node = freed.get(name) or nodes.get(name)
            if node is None:
                continue
            share = gpus / max(1, item.job.gpus)
            freed[name] = replace(
                node,
                gpus_alloc=max(0, node.gpus_alloc - gpus),
                cpus_alloc=max(0, node.cpus_alloc - round(item.job.cpus * share)),
                memory_alloc_mib=max(
                    0, node.memory_alloc_mib - round((item.job.memory_mib or 0) * share)
                ),
            )
    if not freed:
        return part
    return replace(part, nodes=tuple(freed.get(node.name, node) for node in part.nodes))


def _seat(view: View, room: Field, moves: Sequence[Wanted]) -> tuple[Seating, dict[str, Candidate]]:
    """Seats, and the candidates of those that found one in another placement of their count."""

    def request(item: Wanted, candidate: Candidate) -> Request:
        pool = view.pools[item.contender.fact.pool]
        return request_for(item.contender.job, candidate, pool)

    topology = view.snapshot.topology
    seating = seat_ranked([request(item, item.candidate) for item in moves], room, topology)
    others: dict[str, Candidate] = {}
    for item in moves if seating.unseated else ():
        key = item.contender.key
        if key in seating.seats:
            continue
        for way in item.contender.fact.candidates:
            if way.gpus != item.candidate.gpus or way == item.candidate or len(way.job_ids) > 1:
                continue
            left = room.less(_taken(moves, seating, others))
            found = seat((request(item, way),), left.nodes, topology, TopologyRule.PREFERRED).seats
            if found:
                seating = Seating(
                    {**seating.seats, **found},
                    tuple(other for other in seating.unseated if other != key),
                )
                others[key] = way
                break
    return seating, others


def _taken(
    moves: Sequence[Wanted], seating: Seating, others: Mapping[str, Candidate]
) -> dict[str, int]:
    """GPUs by node of those that have a seat."""
    taken: dict[str, int] = {}
    for item in moves:
        key = item.contender.key
        placement = others.get(key, item.candidate).configuration.placement
        names = seating.seats.get(key, ())
        for name, share in zip(names, sorted(placement, reverse=True), strict=bool(names)):
            taken[name] = taken.get(name, 0) + share
    return taken


def seat_ranked(requests: Sequence[Request], room: Field, topology: Topology) -> Seating:
    """Seat largest first, and those of one size in the given order, which `placement.seat` does
    not keep: where not all of them find room, the first ones do."""
    seats: dict[str, tuple[str, ...]] = {}
    unseated = []
    for request in sorted(requests, key=lambda r: -sum(r.placement)):
        names = seat((request,), room.nodes, topology, TopologyRule.PREFERRED).seats.get(
            request.job_id
        )
        if names is None:
            unseated.append(request.job_id)
            continue
        seats[request.job_id] = names
        shares = sorted(request.placement, reverse=True)
        room = room.less(dict(zip(names, shares, strict=True)))
    return Seating(seats, tuple(unseated))


def total_gpus(part: Field, movable: Iterable[Contender]) -> int:
    """GPUs that are free or held by jobs that may be stopped."""
    return part.gpus_free + sum(sum(item.held.values()) for item in movable)


def soon_free(view: View, part: Field) -> int:
    """GPUs of the field's nodes that jobs which were told to stop or have ended give back."""
    names = {node.name for node in part.nodes}
    return sum(
        job.gpus
        for job in view.snapshot.jobs
        if job.state in (JobState.SIGNALING, JobState.COMPLETING)
        and names.issuperset(job.node_names)
    )


def write(
    decisions: dict[str, Decision],
    order: Sequence[Contender],
    wanted: Sequence[Wanted],
    done: Arrangement,
    words: Mapping[str, tuple[str, Term]],
) -> None:
    """Decisions for all contenders, in rank order; a job that goes on as it is gets none.

    ``words`` is the reason and the term by which each job is ranked.
    """
    chosen = {item.contender.key: item.candidate for item in wanted}
    for item in order:
        reason, term = words[item.key]
        nodes = done.starts.get(item.key)
        if nodes is not None:
            verdict, candidate = Verdict.START, done.others.get(item.key, chosen[item.key])
        elif item.key in done.stopped:
            verdict, candidate = Verdict.STOP, item.present
        elif item.running:
            continue
        else:
            verdict, candidate = Verdict.WAIT, item.present
        waits_for = ""
        if verdict is not Verdict.START:
            waits_for = "a seat" if item.key in done.unseated else "jobs that come first"
        decisions[item.key] = Decision(
            job_id=item.key,
            verdict=verdict,
            rank=len(decisions),
            reason=reason,
            configuration=candidate.configuration,
            nodes=nodes or (),
            remaining_s=candidate.remaining_s,
            waits_for=waits_for,
            pool=item.fact.pool,
            terms=(term,),
        )


def leave_the_rest(view: View, decisions: dict[str, Decision]) -> None:
    """Verdict LEAVE for every pending job that no field holds."""
    for job in view.snapshot.pending():
        fact = view.facts.get(job.job_id)
        if fact is not None and job.job_id not in decisions:
            decisions[job.job_id] = leave(job, fact, len(decisions))


class PreemptiveSrtf:
    """See the module. ``margin`` is how much shorter a job must be, beyond what a stop costs."""

    name = "srtf-preemptive"
    preemptive = True

    def __init__(self, margin: float = 0.0) -> None:
        self.margin = margin

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        for part in fields(view):
            # Remaining time only falls while a job runs, so that it needs no quantum.
            everyone = contenders(view, part, now, quantum=False)
            ranked = sorted(everyone, key=self._rank)
            gpus = total_gpus(part, everyone) + soon_free(view, part)
            wanted, rest = by_count(ranked, gpus)
            done = arrange(view, part, wanted, rest)
            words = {
                item.key: (
                    "shortest remaining time first",
                    Term("remaining time", item.left_s, f"about {item.left_s:.0f} s"),
                )
                for item in ranked
            }
            write(decisions, ranked, wanted, done, words)
        leave_the_rest(view, decisions)
        return Plan(self.name, now, decisions)

    def _rank(self, item: Contender) -> tuple[float, bool, int, str]:
        left = item.left_s
        if item.running:
            left = max(0.0, left - item.restart_s) / (1.0 + self.margin)
        return (left, not item.running, item.job.base_id, item.key)

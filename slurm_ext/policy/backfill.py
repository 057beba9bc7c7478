"""Policies `easy` and `fifo`: what a well-tuned plain Slurm does, as a pure function.

Every job runs as it was submitted. `fifo` starts jobs in queue order and stops at the first one
that does not fit. `easy` goes on behind it: a later job may start where it ends, by its time
limit, before the head's planned start, or where it uses only GPUs that the head leaves over.

They are the baselines of every comparison, so they get no estimate: a running job's end is its
start plus its limit, as Slurm reckons. The choice a reader would question: only the head has a
reservation (EASY), although Slurm's backfill plans for many jobs. Fewer promises leave more room
to fill, so EASY is the harder baseline to beat for the average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Node, Topology
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import View
from slurm_ext.policy.placement import TopologyRule, seat
from slurm_ext.policy.queue import (
    Field,
    Shape,
    fields,
    held_on,
    present_ways,
    request_for,
    shape_of,
)
from slurm_ext.policy.telling import leave


@dataclass(frozen=True, slots=True)
class Backfill:
    """Queue order at the submitted shape; ``reserve`` = EASY backfilling, else strict FIFO."""

    reserve: bool = True
    topology_rule: TopologyRule = TopologyRule.PREFERRED

    @property
    def name(self) -> str:
        """Name as written in the configuration."""
        return "easy" if self.reserve else "fifo"

    def __call__(self, view: View, now: float) -> Plan:
        """Decide for every pending job of ``view.facts``."""
        decisions: dict[str, Decision] = {}
        for group in fields(view):
            for decision in _Pass(view, group, now, self).decide():
                decisions[decision.job_id] = decision
        for job in () if view.brief else view.snapshot.pending():
            fact = view.facts.get(job.job_id)
            if fact is not None and job.job_id not in decisions:
                decisions[job.job_id] = leave(job, fact, len(decisions))
        return Plan(policy=self.name, made_s=now, decisions=decisions)


@dataclass(frozen=True, slots=True)
class _Held:
    """GPUs per node that a job holds until ``end_s`` (infinity where it has no limit)."""

    job: Job
    end_s: float
    gpus: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The head's planned start, and the nodes as they will be then without what it takes."""

    job: Job
    start_s: float
    left_over: dict[str, Node]


class _Room:
    """Nodes that fill up while a queue is walked through.

    Finding a seat looks at every node, so what found none is remembered: nodes only fill up here.
    """

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.free = sum(node.gpus_free for node in nodes.values())
        self.full: set[Shape] = set()

    def take(self, job: Job, names: Sequence[str], candidate: Candidate) -> dict[str, int]:
        """Book the candidate on the named nodes (the order of `seat`); the GPUs taken on each."""
        taken = dict(zip(names, _shares(candidate), strict=True))
        for name, share in taken.items():
            before = self.nodes[name]
            self.nodes[name] = _book(before, job, share)
            self.free += self.nodes[name].gpus_free - before.gpus_free
        return taken


class _Pass:
    """One field, once through its queue. Holds the mutable books of that walk."""

    def __init__(self, view: View, group: Field, now: float, policy: Backfill) -> None:
        self._view = view
        self._group = group
        self._now = now
        self._rule = policy.topology_rule
        self._reserve = policy.reserve
        self._room = _Room({node.name: node for node in group.nodes})
        self._at_first = dict(self._room.nodes)
        self._begun: list[_Held] = []
        self._reservation: _Reservation | None = None
        self._beside: _Room | None = None

    def decide(self) -> Iterator[Decision]:
        order: Sequence[Job] = self._group.jobs
        if self._view.queues is None or len(self._group.pools) > 1:
            order = sorted(order, key=lambda job: (-job.priority, job.submit_s, job.base_id))
        for rank, job in enumerate(order):
            ways = present_ways(job, self._view.facts[job.job_id])
            found = next(
                ((way, names) for way in ways if (names := self._start(job, way)) is not None),
                None,
            )
            if found is not None:
                yield self._decision(job, found[0], rank, Verdict.START, found[1])
                continue
            candidate = ways[0]
            ahead = self._reservation
            if self._view.brief and not (self._reserve and self._room.free):
                return
            if ahead is None:
                plans = [(self._plan_ahead(job, each), each) for each in ways]
                self._reservation, candidate = min(plans, key=lambda plan: plan[0].start_s)
            if self._view.brief:
                continue
            yield self._decision(
                job, candidate, rank, Verdict.RESERVE if ahead is None else Verdict.ORDER
            )

    def _start(self, job: Job, candidate: Candidate) -> tuple[str, ...] | None:
        """Nodes for a start now, booked; None where it has to wait."""
        ahead = self._reservation
        if ahead is not None and not self._reserve:
            return None
        end_s = self._now + _limit_s(job)
        if ahead is None or end_s <= ahead.start_s:
            nodes = self._seat(job, candidate, self._room)
            if nodes is None:
                return None
        else:
            # It outlasts the head's planned start: only what the head leaves over is free for it.
            if self._beside is None:
                now, then = self._room.nodes, ahead.left_over
                self._beside = _Room({name: _busier(now[name], then[name]) for name in now})
            nodes = self._seat(job, candidate, self._beside)
            if nodes is None:
                return None
            for name, share in zip(nodes, _shares(candidate), strict=True):
                ahead.left_over[name] = _book(ahead.left_over[name], job, share)
        self._beside = None
        self._begun.append(_Held(job, end_s, self._room.take(job, nodes, candidate)))
        return nodes

    def _plan_ahead(self, job: Job, candidate: Candidate) -> _Reservation:
        """When and where the head can start if everything that runs lasts until its limit."""
        nodes = dict(self._room.nodes)
        held = [
            _Held(other, _end_by_limit(other, self._now), held_on(other, self._at_first))
            for other in self._view.snapshot.running()
            if other.gpus
        ]
        # A seat is looked for only once enough nodes have room for the largest share.
        largest = max(_shares(candidate), default=0)
        many = _shares(candidate).count(largest)
        wide = {name for name, node in nodes.items() if node.gpus_free >= largest}
        for item in sorted([*held, *self._begun], key=lambda item: item.end_s):
            if math.isinf(item.end_s):
                break
            for name, gpus in item.gpus.items():
                nodes[name] = _book(nodes[name], item.job, -gpus)
                if nodes[name].gpus_free >= largest:
                    wide.add(name)
            if len(wide) < many:
                continue
            seats = self._seat(job, candidate, room := _Room(nodes))
            if seats is not None:
                room.take(job, seats, candidate)
                return _Reservation(job, max(item.end_s, self._now), room.nodes)
        # Its start cannot be told (it is too large, or something runs without a limit): nothing
        # can be proven to delay it, so that the queue behind it may use what is free.
        return _Reservation(job, math.inf, dict(self._room.nodes))

    def _seat(self, job: Job, candidate: Candidate, room: _Room) -> tuple[str, ...] | None:
        if candidate.gpus > room.free:
            return None
        fact = self._view.facts[job.job_id]
        shape = shape_of(job, fact, candidate)
        if shape in room.full:
            return None
        request = request_for(job, candidate, self._view.pools[fact.pool])
        topology: Topology = self._view.snapshot.topology
        seating = seat((request,), room.nodes.values(), topology, self._rule)
        found = seating.seats.get(job.job_id)
        if found is None:
            room.full.add(shape)
        return found

    def _decision(
        self,
        job: Job,
        candidate: Candidate,
        rank: int,
        verdict: Verdict,
        nodes: Sequence[str] = (),
    ) -> Decision:
        ahead = self._reservation
        start_s: float | None = None
        waits_for = ""
        if verdict is Verdict.START:
            start_s = self._now
            reason = "fits now" if ahead is None else f"fits beside job {ahead.job.job_id}"
        elif verdict is Verdict.RESERVE:
            reason = "first in the queue that does not fit"
            waits_for = f"{candidate.gpus} free GPUs"
            if ahead is not None and not math.isinf(ahead.start_s):
                start_s = ahead.start_s
        else:
            reason = "waits in queue order"
            waits_for = f"room that does not delay job {ahead.job.job_id}" if ahead else ""
        return Decision(
            job_id=job.job_id,
            verdict=verdict,
            rank=rank,
            reason=reason,
            configuration=candidate.configuration,
            nodes=tuple(nodes),
            expected_start_s=start_s,
            waits_for=waits_for,
            pool=self._view.facts[job.job_id].pool,
        )


def _limit_s(job: Job) -> float:
    return math.inf if job.time_limit_s is None else job.time_limit_s


def _end_by_limit(job: Job, now: float) -> float:
    """When a running job is killed at the latest; never in the past (it still runs)."""
    if job.end_s is not None:
        return max(now, job.end_s)
    return max(now, (now if job.start_s is None else job.start_s) + _limit_s(job))


def _shares(candidate: Candidate) -> list[int]:
    return sorted(candidate.configuration.placement, reverse=True)


def _book(node: Node, job: Job, gpus: int) -> Node:
    """The node with ``gpus`` more (negative: fewer) in use, and CPUs and memory in proportion."""
    share = gpus / max(1, job.gpus)
    return replace(
        node,
        gpus_alloc=max(0, node.gpus_alloc + gpus),
        cpus_alloc=max(0, node.cpus_alloc + round(job.cpus * share)),
        memory_alloc_mib=max(0, node.memory_alloc_mib + round((job.memory_mib or 0) * share)),
    )


def _busier(one: Node, other: Node) -> Node:
    """What is free on a node both now and when the head starts."""
    mine = one.gpus_alloc, one.cpus_alloc, one.memory_alloc_mib
    theirs = other.gpus_alloc, other.cpus_alloc, other.memory_alloc_mib
    most = tuple(map(max, mine, theirs))
    if most == mine:
        return one
    return replace(one, gpus_alloc=most[0], cpus_alloc=most[1], memory_alloc_mib=most[2])

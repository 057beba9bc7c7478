"""The replay itself: jobs arrive, a policy decides, jobs run for their true time to the end.

Event-driven: the clock jumps from one event to the next, all events of one instant are taken
together, and then the policy is asked once, at that instant or, where it has an interval, at the
next multiple of it. Whatever a start, a stop or Slurm costs is in `Costs` and `Overhead`; both are
nothing by default, and then a policy reacts at once.

The engine carries out a plan and judges nothing: a START that finds no room is not an error, it
stays pending, as it would in Slurm, and is counted. Stops come before starts, so that a plan may
give away what it takes back. The choices a reader would question: only verdict START starts a job
(RESERVE and ORDER leave a job to Slurm's own scheduler in the daemon; here the policy that wants
this says START itself); and a policy that stops no jobs is not asked while fewer GPUs are free than
any waiting job needs, because there is nothing that it could want then.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.nodelist import fold
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import Policy, View
from slurm_ext.sim.attempt import Attempt, Progress, attempt
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.hardware import PARTITION, Hardware
from slurm_ext.sim.machine import Machine, seats_overlap
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.model import Run, Schedule, SimJob, SimulationError
from slurm_ext.sim.outages import Outage
from slurm_ext.sim.rides import Rides
from slurm_ext.sim.views import Picture, Restarts, Rows
from slurm_ext.sim.warm import Warm

__all__ = [
    "PARTITION",
    "Hardware",
    "Run",
    "Schedule",
    "SimJob",
    "SimulationError",
    "replay",
    "seats_overlap",
]

# At one instant these come in this order only for the reader's sake: the policy is asked once,
# after all of them. Only that a node fails after a job on it ended at that very moment counts.
_END, _FREE, _UP, _DOWN, _BACK, _ARRIVAL, _TICK = range(7)
# So often in a row a policy may leave an idle machine idle before the replay is given up.
_IDLE_TICKS = 1000
# So often in a row a job may be stopped before it has done anything. A policy to which a restart
# costs nothing can go on for ever, because each stop is an event that it reacts to.
_FRUITLESS_STARTS = 500
# So many jobs that were never started are named.
_NAMED = 10
# A shorter interval is lost in the rounding of a clock that counts in months, and would never pass.
_LEAST_INTERVAL_S = 1e-3
# Two moments nearer than this share of a step are one (floating point).
_SAME = 1e-9


def replay(
    jobs: Iterable[SimJob],
    hardware: Hardware,
    policy: Policy,
    costs: Costs | None = None,
    interval_s: float = 0.0,
    outages: Sequence[Outage] = (),
    progress: Callable[[int, int], None] | None = None,
    *,
    brief: bool = True,
    merging: Merging | None = None,
) -> Schedule:
    """Run every job from arrival to end.

    ``interval_s`` is the time between two decisions, 0 = whenever something happens. ``progress``
    is called with (finished, all) after each job. ``brief`` tells the policy that nobody reads why.
    ``merging`` offers pairs of waiting jobs as one to a policy that understands that.
    Raises SimulationError when jobs are left that nothing will ever start, or when the policy
    starts a configuration that the job does not have.
    """
    if not (math.isfinite(interval_s) and (interval_s == 0 or interval_s >= _LEAST_INTERVAL_S)):
        raise SimulationError(
            f"decision interval {interval_s!r}: use 0, or {_LEAST_INTERVAL_S:g} s or more"
        )
    if not getattr(policy, "merges", False):
        merging = None
    known = tuple(jobs)
    run = _Replay(known, hardware, policy, costs or Costs(), interval_s, outages, brief, merging)
    return run.go(progress)


class _Replay:
    """The books of one replay."""

    def __init__(
        self,
        jobs: tuple[SimJob, ...],
        hardware: Hardware,
        policy: Policy,
        costs: Costs,
        interval_s: float,
        outages: Sequence[Outage],
        brief: bool,
        merging: Merging | None,
    ) -> None:
        self._jobs = list(jobs)
        self._place = {job.job_id: index for index, job in enumerate(jobs)}
        if len(self._place) < len(jobs):
            twice = [key for key, count in Counter(j.job_id for j in jobs).items() if count > 1]
            raise SimulationError(f"job {twice[0]} appears twice in the workload; use each id once")
        self._machine = Machine(hardware)
        self._policy = policy
        self._preemptive = bool(getattr(policy, "preemptive", False))
        self._costs = costs
        self._interval_s = interval_s
        self._outages = outages
        self._brief = brief
        self._pool_of = {job.job_id: self._machine.pool_of(job) for job in jobs}
        # Without it, or where somebody reads the plan, a policy looks at the whole queue.
        ranked = brief and merging is None
        self._rows = Rows(standing=getattr(policy, "standing", None) if ranked else None)
        self._rides = None if merging is None else Rides(merging)
        self._live: dict[str, Attempt] = {}
        self._stopping: dict[str, str] = {}
        self._expected: dict[str, float] = {}
        self._progress = dict.fromkeys(self._place, Progress())
        self._queued_s: dict[str, float] = {}
        self._fruitless: Counter[str] = Counter()
        self._needs: Counter[int] = Counter()
        self._need = {
            job.job_id: min((c.gpus for c in job.candidates), default=job.gpus) for job in jobs
        }
        self._warm = Warm(costs)
        self._done: list[list[Run]] = [[] for _ in jobs]
        self._finished = 0
        self._previous: Plan | None = None
        self._decisions = 0
        self._refused = 0
        self._due_s: float | None = None
        self._real_events = 0
        self._idle_ticks = 0
        self._events: list[tuple[float, int, int, int]] = []

    # -- the clock ---------------------------------------------------------------------------

    def go(self, progress: Callable[[int, int], None] | None) -> Schedule:
        grace = self._costs.overhead.grace_s
        for index, job in enumerate(self._jobs):
            self._push(job.submit_s + grace, _ARRIVAL, index)
        for index, outage in enumerate(self._outages):
            if outage.node not in self._machine:
                raise SimulationError(f"outage of unknown node {outage.node}")
            self._push(outage.down_s, _DOWN, index)
            if math.isfinite(outage.up_s):
                self._push(outage.up_s, _UP, index)
        told = 0
        while self._events and self._finished < len(self._jobs):
            now = self._events[0][0]
            changed = False
            while self._events and self._events[0][0] == now:
                _, kind, place, serial = heapq.heappop(self._events)
                self._real_events -= kind != _TICK
                changed = self._happen(kind, place, serial, now) or changed
            if progress is not None and self._finished > told:
                told = self._finished
                progress(told, len(self._jobs))
            if changed:
                self._think(now)
        left = len(self._jobs) - self._finished
        if left:
            raise SimulationError(self._stranded())
        runs = tuple(run for of_job in self._done for run in of_job)
        return Schedule(self._policy.name, self._machine.gpus, runs, self._decisions, self._refused)

    def _stranded(self) -> str:
        """Who waits in vain, and the nodes that will never be back, if that may be why."""
        waiting = list(self._rows.facts)
        more = f" and {len(waiting) - _NAMED} more" if len(waiting) > _NAMED else ""
        away = self._machine.away()
        why = f"; {fold(away)} never came back (outages)" if away else ""
        return (
            f"policy {self._policy.name} never started {', '.join(waiting[:_NAMED])}{more}: "
            f"the machine is idle and nothing more happens{why}"
        )

    def _push(self, at: float, kind: int, place: int, serial: int = 0) -> None:
        self._real_events += kind != _TICK
        heapq.heappush(self._events, (at, kind, place, serial))

    def _happen(self, kind: int, place: int, serial: int, now: float) -> bool:
        """Take one event; whether it calls for a decision."""
        if kind == _TICK:
            self._due_s = None
            return True
        if kind in (_UP, _DOWN):
            return self._turn(self._outages[place].node, kind == _UP, now)
        job = self._jobs[place]
        if kind in (_ARRIVAL, _BACK):
            self._wait(job, place, job.submit_s if kind == _ARRIVAL else now)
            return True
        if kind == _FREE:
            self._give_back(job.job_id, now)
            return True
        live = self._live.get(job.job_id)
        if live is None or live.serial != serial:
            return False  # it was stopped before
        if job.job_id in self._stopping and now < live.end_s:
            self._end(live, now, self._stopping[job.job_id])
        else:
            self._end(live, now, "done")
        return True

    def _next_decision(self, now: float) -> float:
        """The first moment from ``now`` on at which the policy may be asked."""
        at = _ceil(now, self._interval_s) if self._interval_s else now
        cycle = self._costs.overhead.cycle_s
        return _ceil(at, cycle) if cycle else at

    def _think(self, now: float) -> None:
        at = self._next_decision(now)
        if at > now:
            if self._due_s is None:
                self._due_s = at
                self._push(at, _TICK, 0)
            return
        if not self._worth_asking():
            return
        started = self._decide(now)
        if not self._interval_s or self._due_s is not None:
            return
        if not (self._rows.facts or (self._preemptive and self._live)):
            return
        # Time alone may change the mind of a policy that is asked at intervals.
        self._idle_ticks = 0 if started or self._real_events else self._idle_ticks + 1
        if self._idle_ticks < _IDLE_TICKS:
            steps = math.floor(now / self._interval_s + _SAME) + 1
            self._due_s = self._next_decision(steps * self._interval_s)
            self._push(self._due_s, _TICK, 0)

    def _worth_asking(self) -> bool:
        if self._preemptive:
            return bool(self._rows.facts or self._live)
        return bool(self._rows.facts) and min(self._needs) <= self._machine.gpus_free

    # -- what happens to jobs and nodes ------------------------------------------------------

    def _wait(self, job: SimJob, place: int, since_s: float) -> None:
        self._queued_s[job.job_id] = since_s
        self._rows.wait(job, place, self._pool_of[job.job_id], self._progress[job.job_id])
        self._needs[self._need[job.job_id]] += 1

    def _end(self, live: Attempt, now: float, cause: str) -> None:
        """A job gives up its GPUs: it is done, was stopped, or its node failed."""
        key = live.job.job_id
        before = live.before.done
        if cause == "done":
            kept = 1.0 - before
        else:
            every = self._costs.checkpoint_every_s if cause == "outage" else 0.0
            # Saving is no work: what counts is where it was when it was told to stop.
            self._progress[key] = live.progress(self._stopped_at(live, now), every)
            kept = self._progress[key].done - before
            self._fruitless[key] = 0 if kept > 0 else self._fruitless[key] + 1
            if self._fruitless[key] > _FRUITLESS_STARTS:
                raise SimulationError(
                    f"policy {self._policy.name} has stopped job {key} {_FRUITLESS_STARTS} times "
                    f"in a row before it did any work; give the policy a decision interval"
                )
        del self._live[key], self._expected[key]
        self._stopping.pop(key, None)
        place = self._place[key]
        self._done[place].append(live.run(now, cause, kept))
        if cause == "done":
            self._finished += 1
            self._arrive(key, now)
        self._warm.leave(live.job, live.seats, now)
        epilog = self._costs.overhead.epilog_s if cause != "outage" else 0.0
        if epilog:
            self._rows.complete(key, now + epilog)
            self._push(now + epilog, _FREE, place)
        else:
            self._give_back(key, now)
        if cause == "done":
            return
        delay = max(self._costs.requeue_delay_s, epilog)
        if delay:
            self._push(now + delay, _BACK, place)
        else:
            self._wait(live.job, place, now)

    def _arrive(self, carrier: str, now: float) -> None:
        """A merged run is over, and with it the job that rode on it, if it reached its target."""
        arrived = self._rides.end(carrier, now) if self._rides is not None else None
        if arrived is None:
            return
        rider, run = arrived
        place = self._place[rider.job_id]
        self._done[place].append(replace(run, queued_s=self._queued_s[rider.job_id]))
        if run.cause == "done":
            self._finished += 1
        else:
            self._wait(rider, place, now)

    def _stopped_at(self, live: Attempt, now: float) -> float:
        told = live.job.job_id in self._stopping
        return now - self._costs.save_s if told else now

    def _give_back(self, job_id: str, now: float) -> None:
        run = self._done[self._place[job_id]][-1]
        self._machine.give_back(run.seats)
        self._rows.gone(job_id)

    def _turn(self, name: str, up: bool, now: float) -> bool:
        """A node fails or comes back. A job that loses a node loses all of them."""
        if not self._machine.outage(name, begins=not up):
            return False
        if not up:
            for live in [item for item in self._live.values() if name in item.seats]:
                self._end(live, now, "outage")
        self._machine.turn(name, up)
        return True

    # -- deciding ----------------------------------------------------------------------------

    def _decide(self, now: float) -> bool:
        plan = self._policy(self._view(now), now)
        self._decisions += 1
        acted = self._carry_out(plan, now)
        # A start that was carried out is done with: where its node fails hours later, a policy
        # must not take it for one that was wanted all the time and never came about.
        open_yet = {
            key: decision
            for key, decision in plan.decisions.items()
            if key not in self._live or key in self._stopping
        }
        self._previous = replace(plan, decisions=open_yet)
        return acted

    def _view(self, now: float) -> View:
        rows = self._rows
        running: dict[str, Attempt] = {}
        if self._preemptive:
            running = {k: v for k, v in self._live.items() if k not in self._stopping}
        queues = dict(rows.queues)
        ranked = rows.standing is not None
        fresh = (
            self._jobs[self._place[key]] for key in rows.facts if not self._progress[key].starts
        )
        return View(
            snapshot=Picture(
                now,
                self._machine.nodes,
                self._machine.partitions,
                queues,
                tuple(rows.started.values()),
            ),
            facts=rows.facts if self._rides is None else self._rides.offer(rows.facts, fresh),
            pools=self._machine.pools,
            free_at_s=dict(self._expected),
            previous=self._previous,
            running=self._restarts(running, now) if running else {},
            brief=self._brief,
            queues=queues,
            shortest=dict(rows.shortest),
            alike={pool: dict(sizes) for pool, sizes in rows.alike.items()} if ranked else None,
            apart=dict(rows.apart) if ranked else None,
        )

    def _restarts(self, running: Mapping[str, Attempt], now: float) -> Restarts:
        costs = self._costs
        delay_s = costs.save_s + max(costs.requeue_delay_s, costs.overhead.epilog_s)
        delay_s += costs.overhead.launch_s
        return Restarts(running, dict(self._rows.started_facts), now, delay_s)

    def _carry_out(self, plan: Plan, now: float) -> bool:
        wanted = sorted(
            (d for d in plan.decisions.values() if d.verdict in _ACTED_ON),
            key=lambda item: (item.rank, item.job_id),
        )
        riders = {carrier: rider for rider, carrier in plan.rides.items()}
        acted = False
        for decision in wanted:
            acted = self._stop(decision, now) or acted
        for decision in wanted:
            if decision.verdict is Verdict.START and decision.job_id not in self._live:
                acted = self._start(decision, riders.get(decision.job_id), now) or acted
        return acted

    def _stop(self, decision: Decision, now: float) -> bool:
        """Stop a running job that the plan stops or starts anew; whether there was one."""
        key = decision.job_id
        live = self._live.get(key)
        if live is None:
            if decision.verdict is Verdict.STOP:
                raise SimulationError(f"plan stops {key}, which does not run")
            return False
        if not self._preemptive:
            raise SimulationError(
                f"plan of {self._policy.name} {decision.verdict}s {key}, which runs; a policy "
                f"that does so has the attribute preemptive"
            )
        if decision.verdict is Verdict.START:
            configuration = self._own(live.job, decision)[0]
            same_nodes = not decision.nodes or set(decision.nodes) == live.seats.keys()
            if configuration == live.configuration and same_nodes:
                return False
        if key in self._stopping:
            return False
        cause = "stop" if decision.verdict is Verdict.STOP else "resize"
        save = self._costs.save_s
        if not save or now + save >= live.end_s:
            # A job that would be done before it has saved its state is let run to its end.
            if save:
                return False
            self._end(live, now, cause)
            return True
        self._stopping[key] = cause
        self._rows.save(key)
        self._push(now + save, _END, self._place[key], live.serial)
        return True

    def _own(self, job: SimJob, decision: Decision) -> tuple[Configuration, float]:
        configuration = decision.configuration
        true_s = None if configuration is None else job.true_s(configuration)
        if configuration is None or true_s is None:
            raise SimulationError(f"plan starts {job.job_id} as {configuration}, not its own")
        return configuration, true_s

    def _start(self, decision: Decision, rider: str | None, now: float) -> bool:
        key = decision.job_id
        if key not in self._rows.facts:
            if key in self._place and self._progress[key].starts and not self._is_done(key):
                self._refused += 1  # it was stopped, and is not back in the queue yet
                return False
            raise SimulationError(f"plan starts {key}, which is not pending")
        place = self._place[key]
        job = self._jobs[place]
        if rider is not None:
            if self._rides is None:
                raise SimulationError(f"plan merges {rider} into {key}; nothing is merged here")
            job = self._rides.pair(key, rider)
        configuration, true_s = self._own(job, decision)
        seats = self._machine.seats(key, configuration, self._pool_of[key], decision.nodes)
        if seats is None:
            self._refused += 1
            return False
        self._machine.take(seats)
        live = attempt(
            job,
            configuration,
            true_s,
            seats,
            self._progress[key],
            now,
            self._queued_s[key],
            self._costs.overhead.launch_s,
            self._warm.take(job, seats, now),
        )
        self._live[key] = live
        self._expected[key] = live.expected_end_s
        self._rows.start(live, place)
        self._no_need(key)
        if rider is not None and self._rides is not None:
            at = self._place[rider]
            self._rides.begin(key, self._jobs[at], now)
            self._rows.ride(self._jobs[at], at)
            self._no_need(rider)
            # From here on the two are one job, which may be stopped and started again.
            self._jobs[place] = job
        self._push(live.end_s, _END, place, live.serial)
        return True

    def _no_need(self, key: str) -> None:
        need = self._need[key]
        self._needs[need] -= 1
        if not self._needs[need]:
            del self._needs[need]

    def _is_done(self, key: str) -> bool:
        runs = self._done[self._place[key]]
        return bool(runs) and runs[-1].cause == "done"


_ACTED_ON = frozenset({Verdict.START, Verdict.STOP})


def _ceil(now: float, step: float) -> float:
    return max(now, math.ceil(now / step - _SAME) * step)

"""Policy ``titan``: which jobs start now, on how many GPUs, on which nodes.

Decides whenever something was submitted or ended. Running jobs are not touched, unless ``growth``
is set: then they may grow (`slurm_ext.policy.growth`), where the view has jobs that may be stopped.
Per field (pools that share nodes) the free GPUs are given out by the exact knapsack of
`slurm_ext.optimize` over each job's candidates; the chosen ones are seated on nodes; a candidate
that finds no seat is removed and the problem solved again. Everything else waits, in the order of
what it is worth per GPU.

Rules beyond the knapsack:

* Hysteresis. A job that the last plan started and that still pends keeps its configuration, unless
  the new choice is worth more by ``margin``: Slurm is about to start it.
* Waiting limit. Jobs older than ``waiting_limit_s`` come first, by age. The oldest that cannot
  start now gets its GPUs reserved as EASY would do it: others may start only if they end before
  its expected start or use GPUs that are left over then. It is left to Slurm without a lease.
* Holding out. A count on which a job would be done much later than if it waited for GPUs that
  running jobs are about to give back is not offered (`slurm_ext.policy.holdout`).
* Stuck starts. A job that plans have wanted to start for ``start_patience_s`` and that Slurm does
  not start (a limit or licence that we do not know of) is left to Slurm as submitted, so that its
  GPUs do not stay idle; after ten times as long it is planned again, on other counts.
* Merging. A candidate that serves two jobs is offered to both, taken by both or by neither
  (`slurm_ext.policy.merged`); the second one rides and holds no GPUs.
* Head. With foreign jobs in the field, the first of our waiting jobs is left without a lease, so
  that Slurm reserves for it; without foreign jobs there is nobody to protect it from.

The choice a reader would question: the author of Titan minimises a sum of capped ratios to a fair
share; we maximise progress per second (1/R), which his formulation reduces to when remaining
times are far apart, and which needs no fair share to be guessed (see docs/policy.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
from slurm_ext.domain.plan import Decision, Plan, SolveInfo, Term, Verdict
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.optimize.objective import Weights, in_words
from slurm_ext.policy.growth import Grown, Growth, give_way, growths
from slurm_ext.policy.growth import requests as growth_requests
from slurm_ext.policy.holdout import Openings, worth_taking
from slurm_ext.policy.keeping import Solver, reasons
from slurm_ext.policy.merged import alone, rides, worthwhile
from slurm_ext.policy.opened import (
    Open,
    Start,
    gpus_on_nodes,
    in_line,
    only_behind,
)
from slurm_ext.policy.placement import Seating, TopologyRule, seat
from slurm_ext.policy.preemptive import released
from slurm_ext.policy.queue import (
    Field,
    fields,
    forecast,
    request_for,
    running_releases,
    shape_of,
)
from slurm_ext.policy.roomless import with_roomless
from slurm_ext.policy.shortlist import front, seats_for, standing, ways
from slurm_ext.policy.telling import carried, leave, left_to_slurm, started, waits
from slurm_ext.policy.worth import Way, worth_solving

# A start that failed is planned again after this many times the patience.
STUCK_FOR = 10.0


@dataclass(frozen=True, slots=True)
class TitanConfig:
    """Parameters of the policy.

    ``waiting_limit_s`` seconds after its first submission a job is ordered by age.
    ``margin`` is the relative gain for which a plan that Slurm has not carried out yet is changed.
    ``max_rounds`` bounds solving again after a candidate found no seat.
    ``start_patience_s`` is how long a start that Slurm does not carry out keeps its GPUs.
    ``hold_out`` times as long as waiting for more GPUs a job may take on a count that is offered;
    ``None`` offers all of them.
    ``growth`` is the relative gain, all costs paid, for which a running job is started anew on
    more GPUs; ``None`` leaves running jobs alone.
    """

    weights: Weights = field(default_factory=Weights)
    margin: float = 0.05
    waiting_limit_s: float = 7 * 86400.0
    time_limit_s: float = 1.0
    max_rounds: int = 8
    start_patience_s: float = 120.0
    topology: TopologyRule = TopologyRule.PREFERRED
    hold_out: float | None = 2.5
    growth: float | None = None


# Where running jobs may be started anew. A job that starts small can grow later, so that running
# at all is worth a term of its own, declining a small start is worth less, and the tail may have
# more weight (docs/policy.md).
GROWING = TitanConfig(weights=Weights(start=1.0, patience_s=3600.0), hold_out=4.0, growth=0.3)


class TitanPolicy:
    """See the module. Instances hold parameters only; a call changes nothing in them."""

    name = "titan"
    merges = True

    def __init__(self, config: TitanConfig | None = None) -> None:
        self.config = config or TitanConfig()
        known = self.config
        self._solver = Solver(known.weights, known.margin, known.time_limit_s)

    @property
    def preemptive(self) -> bool:
        """Whether running jobs may be stopped (and started anew on more GPUs)."""
        return self.config.growth is not None

    def standing(self, job: Job, fact: JobFacts) -> float | None:
        """See `slurm_ext.domain.policy.Policy`."""
        return standing(fact, self.config.weights)

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        solves: list[SolveInfo] = []
        riding: dict[str, str] = {}
        for part in fields(view):
            starts = self._decide_field(view, part, now, decisions, solves)
            riding |= {key: s.key for s in starts for key in s.served if key != s.key}
        rank = len(decisions)
        for job in () if view.brief else view.snapshot.pending():
            fact = view.facts.get(job.job_id)
            if fact is not None and job.job_id not in decisions:
                decisions[job.job_id] = leave(job, fact, rank)
                rank += 1
        return Plan(self.name, now, decisions, tuple(solves), riding)

    # -- one field ---------------------------------------------------------------------------

    def _decide_field(
        self,
        view: View,
        part: Field,
        now: float,
        decisions: dict[str, Decision],
        solves: list[SolveInfo],
    ) -> list[Start]:
        previous = view.previous.decisions if view.previous is not None else {}
        opens = []
        config = self.config
        for job in front(view, part, now, config.waiting_limit_s, config.max_rounds):
            fact, last = view.facts[job.job_id], previous.get(job.job_id)
            item = Open(job, fact, now, None, list(fact.candidates))
            if last is not None:
                self._remember(item, last, view.carried_out)
            opens.append(item)
        mergeable = {o.job.job_id: o.candidates for o in opens if o.mergeable}
        if mergeable:
            gpus = sum(node.gpus for node in part.nodes)
            keep = worthwhile(mergeable, len(part.jobs), gpus)
            for item in opens:
                item.candidates = keep.get(item.job.job_id, item.candidates)
        self._hold_out(view, part, opens, now)
        names = frozenset(node.name for node in part.nodes)
        releases = running_releases(view, names, now)

        starts, blocked = self._start_overdue(view, part, opens, now)
        room = part.less(gpus_on_nodes(starts))
        done = {key for s in starts for key in s.served}
        rest = [o for o in opens if o.job.job_id not in done and o is not blocked and not o.stuck]
        if blocked is not None:
            only_behind(blocked, rest, room.gpus_free, starts, releases, now)
        against: Mapping[str, Term] = {}
        growing: list[Growth] = []
        grown: list[Grown] = []
        if self.config.growth is not None and blocked is None:
            growing = growths(view, room, self.config.weights, self.config.growth, now)
        if growing or (room.gpus_free > 0 and any(o.candidates for o in rest)):
            chosen, grown, info, against = self._allocate(view, room, rest, growing)
            starts = [*starts, *chosen]
            solves.append(info)
        waiting = () if view.brief else opens
        self._write(view, part, waiting, starts, grown, blocked, against, releases, now, decisions)
        return starts

    def _hold_out(self, view: View, part: Field, opens: Sequence[Open], now: float) -> None:
        """Leave out starts that end much later than waiting for more GPUs would; not of a job that
        Slurm is about to start, nor of one past the waiting limit."""
        factor = self.config.hold_out
        if factor is None or not part.gpus_free:
            return
        openings = Openings(view, part, now)
        for item in opens:
            late = now - item.fact.waiting_since_s > self.config.waiting_limit_s
            if item.planned is None and not late and len(item.candidates) > 1:
                item.candidates, item.declined = worth_taking(
                    item.candidates, item.fact, openings, factor, now
                )
                if view.brief:  # nobody will ask why they are not chosen
                    item.candidates = [c for c in item.candidates if c.gpus <= part.gpus_free]

    def _remember(self, item: Open, last: Decision, carried_out: bool) -> None:
        """What the last plan wanted of the job, and whether Slurm has failed to do it."""
        since, patience = last.wanted_since_s, self.config.start_patience_s
        if last.verdict is Verdict.START:
            item.planned = last.configuration
            item.wanted_since_s = since
        if since is None or not carried_out:
            return
        waited = item.now - since
        if last.verdict is Verdict.START:
            item.stuck = waited > patience
        elif last.left_to_slurm and waited <= STUCK_FOR * patience:
            item.stuck = True
            item.wanted_since_s = since

    def _start_overdue(
        self, view: View, part: Field, opens: Sequence[Open], now: float
    ) -> tuple[list[Start], Open | None]:
        """Start jobs past the waiting limit by age; the first that does not fit blocks the rest."""
        overdue = sorted(
            (
                o
                for o in opens
                if now - o.fact.waiting_since_s > self.config.waiting_limit_s and not o.stuck
            ),
            key=lambda o: (o.fact.waiting_since_s, o.job.base_id, o.job.job_id),
        )
        words = (Term("overdue", 1.0, "past the waiting limit: ordered by age"),)
        starts: list[Start] = []
        for item in overdue:
            room = part.less(gpus_on_nodes(starts))
            own = alone(item.candidates)
            for candidate in sorted(own, key=lambda c: (c.remaining_s.value, c.gpus)):
                nodes = self._seat(view, room, [(item, candidate)]).seats.get(item.job.job_id)
                if nodes is not None:
                    starts.append(Start(item, candidate, nodes, words, overdue=True))
                    break
            else:
                return starts, item
        return starts, None

    # -- the knapsack ------------------------------------------------------------------------

    def _seat(
        self,
        view: View,
        part: Field,
        chosen: Sequence[tuple[Open, Candidate]],
        grow: Sequence[tuple[Growth, int]] = (),
    ) -> Seating:
        requests = [request_for(o.job, c, view.pools[o.fact.pool]) for o, c in chosen]
        if grow:
            requests += growth_requests(view, grow)
            part = released(part, [growth.contender for growth, _ in grow])
        return seat(requests, part.nodes, view.snapshot.topology, self.config.topology)

    def _allocate(
        self, view: View, part: Field, rest: Sequence[Open], growing: Sequence[Growth]
    ) -> tuple[list[Start], list[Grown], SolveInfo, dict[str, Term]]:
        """Solve and seat; drop candidates that find no seat and solve again.

        A candidate that was dropped may find a seat beside what was chosen in the end: what is
        left over is given out again.
        """
        by_id = {o.job.job_id: o for o in rest}
        offered = {key: list(o.candidates) for key, o in by_id.items()}
        seats: dict[Hashable, int] = {}
        for attempt in range(1, self.config.max_rounds + 1):
            last = attempt == self.config.max_rounds
            # Starts come first where seats are scarce; and in the last round, which takes what
            # finds a seat, no running job may lose its place.
            growing = growing if attempt <= self.config.max_rounds // 2 else ()
            live = [o for o in rest if o.candidates]
            if view.brief or seats:
                live = worth_solving(live, part.gpus_free, self._ways, seats)
            demands = {o.job.job_id: o.demand for o in live}
            solution, scored = self._solver.keeping(
                view, part, live, list(demands.values()), growing
            )
            chosen = {key: index for key, index in solution.chosen.items() if key in by_id}
            grow = [(g, solution.chosen[g.key]) for g in growing if g.key in solution.chosen]
            pairs = [(by_id[key], by_id[key].candidates[index]) for key, index in chosen.items()]
            pairs = [(item, c) for item, c in pairs if not rides(item.job.job_id, c)]
            seating = self._seat(view, part, pairs, grow)
            if not seating.unseated or last:
                break
            if grow:
                growing = give_way(growing, grow, seating.unseated)
                continue
            for key in seating.unseated:
                lost = by_id[key].candidates[chosen[key]]
                shape = shape_of(by_id[key].job, by_id[key].fact, lost)
                if shape not in seats:
                    seats[shape] = seats_for(view, part, by_id[key], lost, self.config.topology)
                for other in {key, *lost.job_ids} & by_id.keys():
                    by_id[other].candidates.remove(lost)
        starts = [
            Start(
                open=by_id[key],
                candidate=by_id[key].candidates[index],
                nodes=seating.seats[key],
                terms=in_words(demands[key], index, scored.terms[key][index]),
            )
            for key, index in chosen.items()
            if key in seating.seats
        ]
        grown = [
            Grown(g.contender, g.candidates[index], seating.seats[g.key], g.terms[index])
            for g, index in grow
        ]
        again = f"solved {attempt} times until every job had a seat" if attempt > 1 else ""
        info = SolveInfo(
            pool=",".join(part.pools),
            solver=solution.solver,
            optimal=solution.optimal and attempt == 1,
            gap=solution.gap,
            time_s=solution.time_s,
            jobs=len(live),
            gpus_free=part.gpus_free,
            note="; ".join(n for n in (solution.note, again) if n),
        )
        against = {} if view.brief else reasons(part, live, scored, solution)
        if attempt > 1 and starts and not growing:
            left = part.less(gpus_on_nodes(starts))
            served = {key for s in starts for key in s.served}
            others = [o for o in rest if o.job.job_id not in served]
            for item in others:
                item.candidates = offered[item.job.job_id]
            if left.gpus_free > 0 and any(o.candidates for o in others):
                more, _, _, more_against = self._allocate(view, left, others, ())
                return [*starts, *more], grown, info, {**against, **more_against}
        return starts, grown, info, against

    def _ways(self, item: Open) -> Sequence[Way] | None:
        return ways(item, self.config.weights)

    # -- the plan ----------------------------------------------------------------------------

    def _write(
        self,
        view: View,
        part: Field,
        opens: Sequence[Open],
        starts: Sequence[Start],
        grown: Sequence[Grown],
        blocked: Open | None,
        against: Mapping[str, Term],
        releases: Sequence[tuple[float, int]],
        now: float,
        decisions: dict[str, Decision],
    ) -> None:
        order = sorted(starts, key=lambda s: (not s.overdue, s.open.fact.waiting_since_s, s.key))
        for rank, s in enumerate(order):
            terms = with_roomless(view, part, s, rank, self.config.topology)
            decision = started(
                s.open.job, s.open.fact, s.candidate, s.nodes, terms, rank, part, s.overdue
            )
            if decision.verdict is Verdict.START:
                since = s.open.wanted_since_s
                decision = replace(decision, wanted_since_s=now if since is None else since)
            decisions[s.key] = _with_reason(decision, against)
        now_running = {key for s in starts for key in s.served}
        carriers = {key: s for s in starts for key in s.served if key != s.key}
        for rider in opens:
            key = rider.job.job_id
            if key in carriers:
                decisions[key] = carried(rider.job, rider.fact, carriers[key].key, len(decisions))
        stuck = {o.job.job_id: o for o in opens if o.stuck}
        declined = {o.job.job_id: o.declined for o in opens if o.declined is not None}
        rows = in_line([o for o in opens if o.job.job_id not in now_running], blocked, part)
        soon = [
            *releases,
            *((now + s.candidate.remaining_s.value, s.candidate.gpus) for s in starts),
        ]
        left = part.gpus_free - sum(s.candidate.gpus for s in starts)
        left -= sum(g.more_gpus for g in grown)
        begin = forecast([w for w, _ in rows], left, soon, now)
        for place, (item, fact) in enumerate(rows):
            # Slurm reserves for the job that blocks the others; else, where foreign jobs could
            # overtake a leased one, for the first in line.
            first = place == 0 and (blocked is not None or part.foreign > 0)
            key = item.job.job_id
            decision = waits(item, fact, len(order) + place, first, left, place, begin.get(key))
            if item_declined := declined.get(key):
                decision = replace(decision, waits_for=item_declined.words)
            if key in stuck:
                decision = left_to_slurm(decision, item.job, stuck[key].wanted_since_s, now)
            decisions[key] = _with_reason(decision, against)
        for rank, larger in enumerate(grown, len(order) + len(rows)):
            decisions[larger.contender.key] = larger.decision(rank)


def _with_reason(decision: Decision, against: Mapping[str, Term]) -> Decision:
    term = against.get(decision.job_id)
    return decision if term is None else replace(decision, terms=(*decision.terms, term))

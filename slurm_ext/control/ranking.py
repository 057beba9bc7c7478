"""Which jobs hold a place in the queue, in which order we want them, and the factors for it.

Leased jobs hold no place. A job that starts gets its factor although it is still leased, written
just before its lease is lifted. Jobs that start now all fit, so they keep their native order among
themselves, which costs no write; past the waiting limit the order is by age, before everybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_ext.control.case import Case
from slurm_ext.control.lease import Hold
from slurm_ext.control.order import Place, competing_sets, order_places
from slurm_ext.control.rules import ActingRules
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.snapshot import Snapshot

_OWN_PLACE = "its place among our jobs of the partition and QOS"


@dataclass(frozen=True, slots=True)
class Factor:
    """A SiteFactor to write."""

    case: Case
    value: int
    reason: str


def factors_for(
    snapshot: Snapshot,
    cases: Sequence[Case],
    rules: ActingRules,
    now: float,
    refuse: Callable[[Case, str], None],
) -> list[Factor]:
    """Every factor that has to be written for the wanted order, and what has to be cleared."""
    values = _wanted_factors(snapshot, cases, rules, now, refuse)
    found = []
    for case in cases:
        if case.job_id in values:
            found.append(Factor(case, values[case.job_id], f"{_OWN_PLACE}: {case.why}"))
        elif _left_behind(case):
            found.append(Factor(case, 0, "its place is not ours any more"))
    return found


def _wanted_factors(
    snapshot: Snapshot,
    cases: Sequence[Case],
    rules: ActingRules,
    now: float,
    refuse: Callable[[Case, str], None],
) -> Mapping[str, int]:
    sets = competing_sets(snapshot, snapshot.pending())
    ours = {case.job_id: case for case in cases if holds_a_place(case)}
    if not ours:
        return {}
    rows: dict[str, list[Place]] = {}
    mine: dict[str, list[Case]] = {}
    for job in snapshot.pending():
        case = ours.get(job.job_id)
        if case is not None:
            name = sets.get(job.partition, job.partition)
            rows.setdefault(name, []).append(case.place)
            mine.setdefault(name, []).append(case)
        elif job.eligible and not job.held:
            place = Place(job.job_id, job.base_id, job.priority, job.priority)
            for name in {sets.get(p, p) for p in job.partitions}:
                rows.setdefault(name, []).append(place)
    values: dict[str, int] = {}
    for name, members in mine.items():
        result = order_places(rows[name], wanted_order(members, rules, now), rules.head)
        values.update(result.factors)
        if result.refusal:
            refuse(members[0], result.refusal)
    return values


def holds_a_place(case: Case) -> bool:
    """Whether the job stands in the queue, or will as soon as this wave is written."""
    if not case.permit.order or case.verdict is Verdict.LEAVE or case.hold is Hold.OTHERS:
        return False
    if case.verdict is Verdict.WAIT and case.permit.lease:
        return False  # leased, or about to be
    return case.job.eligible or case.hold.liftable or case.verdict is Verdict.START


def wanted_order(cases: Iterable[Case], rules: ActingRules, now: float) -> list[str]:
    """Job ids in the wanted order."""

    def key(case: Case) -> tuple[float, float, int, str]:
        since = case.entry.first_submit_s
        if now - since > rules.waiting_limit_s:
            return (0, since, case.job.base_id, case.job_id)
        if case.verdict is Verdict.START:
            return (1, -case.place.native, case.job.base_id, case.job_id)
        return (2, case.rank, case.job.base_id, case.job_id)

    return [case.job_id for case in sorted(cases, key=key)]


def _left_behind(case: Case) -> bool:
    """Whether a factor of ours has to be cleared.

    So it is where the place is not ours any more, and after a requeue. A held job and an
    operator's priority are not written to.
    """
    if case.job.held or case.job.priority == 0 or case.job.priority_set:
        return False
    if case.entry.factor is None or case.factor == 0:
        return False
    unplanned = case.verdict is Verdict.LEAVE or not case.permit.order
    return unplanned or (case.requeued and not holds_a_place(case))

"""Stopping running jobs: who gives way, who does not, and that nobody is stopped for nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.policy import Policy, View
from slurm_ext.policy.optimus import OptimusPolicy
from slurm_ext.policy.preemptive import PreemptiveSrtf
from slurm_ext.policy.tiresias import TiresiasPolicy
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from slurm_ext.policy.titan_published import PublishedTitan
from tests.unit.policy.build import facts
from tests.unit.policy.runs import START_UP_S, Running, overbooked, seen, verdicts

HOUR = 3600.0


def test_a_much_shorter_job_stops_a_long_one() -> None:
    v = seen([Running(1, 4, ("n00",), 2 * HOUR)], {2: facts(2, {4: 600.0})}, machines=1)
    plan = PreemptiveSrtf()(v, 0.0)
    assert verdicts(plan) == {"1": "stop", "2": "start 4"}
    assert plan.decisions["2"].nodes == ("n00",)


def test_a_stop_must_pay_for_the_second_start() -> None:
    # 700 s go on; the other job takes 690 s: stopping would cost 44 s for a gain of 10.
    v = seen([Running(1, 4, ("n00",), 700.0)], {2: facts(2, {4: 690.0})}, machines=1)
    assert verdicts(PreemptiveSrtf()(v, 0.0)) == {"2": "wait"}
    v = seen([Running(1, 4, ("n00",), 700.0)], {2: facts(2, {4: 699.0 - START_UP_S})}, machines=1)
    assert verdicts(PreemptiveSrtf()(v, 0.0)) == {"1": "stop", "2": "start 4"}


def test_only_as_many_are_stopped_as_are_in_the_way() -> None:
    runs = [
        Running(1, 4, ("n00",), 2 * HOUR),
        Running(2, 4, ("n01",), 3 * HOUR),
        Running(3, 4, ("n02",), 4 * HOUR),
    ]
    plan = PreemptiveSrtf()(seen(runs, {4: facts(4, {8: 600.0})}, machines=3), 0.0)
    assert verdicts(plan) == {"2": "stop", "3": "stop", "4": "start 8"}


def test_nobody_is_stopped_for_a_job_that_finds_no_seat_anyway() -> None:
    # By counts 4 + 1 GPUs fit beside job 1; but no node has four free ones without stopping it.
    runs = [
        Running(1, 2, ("n00",), 100.0),
        Running(2, 2, ("n01",), 100.0),
        Running(3, 1, ("n01",), 5 * HOUR),
    ]
    v = seen(runs, {4: facts(4, {4: 600.0})})
    assert verdicts(PreemptiveSrtf()(v, 0.0)) == {"4": "wait"}


def test_without_running_jobs_to_stop_nothing_is_stopped() -> None:
    v = seen([Running(1, 4, ("n00",), 2 * HOUR)], {2: facts(2, {4: 600.0})}, machines=1)
    bare = View(v.snapshot, v.facts, v.pools, v.free_at_s)
    for policy in (PreemptiveSrtf(), TiresiasPolicy(), OptimusPolicy()):
        assert verdicts(policy(bare, 0.0)) == {"2": "wait"}


@st.composite
def _views(draw: st.DrawFn) -> View:
    machines = draw(st.integers(1, 4))
    runs = []
    number = 1
    for index in range(machines):
        room = 4
        while room and draw(st.booleans()):
            gpus = draw(st.sampled_from([g for g in (1, 2, 4) if g <= room]))
            room -= gpus
            left = draw(st.floats(1, 20000))
            work = left * gpus**0.8
            again = {g: START_UP_S + work / g**0.8 for g in (1, 2, 4, 8) if g >= gpus}
            attained = draw(st.floats(0, 40000))
            runs.append(Running(number, gpus, (f"n{index:02d}",), left, again, attained))
            number += 1
    waiting = {}
    for _ in range(draw(st.integers(0, 5))):
        base = draw(st.floats(60, 40000))
        counts = draw(st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1))
        times = {g: base / g**0.8 for g in sorted(counts)}
        waiting[number] = facts(number, times, since=draw(st.floats(-1e4, 0)))
        number += 1
    return seen(runs, waiting, machines)


POLICIES: list[Policy] = [
    PreemptiveSrtf(),
    TiresiasPolicy(),
    TiresiasPolicy(spare=False),
    OptimusPolicy(),
    PublishedTitan(),
    TitanPolicy(TitanConfig(growth=0.3)),
]


@settings(max_examples=120, deadline=None)
@given(_views(), st.sampled_from(POLICIES))
def test_what_a_plan_wants_fits_and_is_the_same_again(v: View, policy: Policy) -> None:
    plan = policy(v, 0.0)
    assert overbooked(v, plan) == ""
    assert policy(v, 0.0).decisions == plan.decisions
    running = {job.job_id for job in v.snapshot.running()}
    assert set(v.facts) <= set(plan.decisions) <= set(v.facts) | running
    for decision in plan.decisions.values():
        if decision.verdict is Verdict.STOP:
            assert decision.job_id in running
    ranks = [decision.rank for decision in plan.decisions.values()]
    assert len(set(ranks)) == len(ranks)


@settings(max_examples=80, deadline=None)
@given(_views())
def test_whoever_is_stopped_makes_room_for_a_start(v: View) -> None:
    for policy in (PreemptiveSrtf(), TiresiasPolicy(), OptimusPolicy()):
        found = verdicts(policy(v, 0.0))
        if "stop" in found.values():
            assert any(what.startswith("start") for what in found.values())

"""Policy titan with ``growth``: running jobs that are started anew on more GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import View
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from tests.unit.policy.build import facts
from tests.unit.policy.runs import START_UP_S, Running, overbooked, seen, verdicts

HOUR = 3600.0


def decide(v: View, growth: float | None = 0.3, now: float = 0.0) -> Plan:
    return TitanPolicy(TitanConfig(growth=growth))(v, now)


def doubling(number: int, work_s: float, gpus: int, at: tuple[str, ...]) -> Running:
    """A job with this much work on one GPU left, that speeds up by 1.9 with every doubling."""
    again = {g: START_UP_S + work_s / s for g, s in ((1, 1), (2, 1.9), (4, 3.6), (8, 6.9))}
    return Running(number, gpus, at, again[gpus] - START_UP_S, again)


def test_an_idle_machine_goes_to_the_job_that_runs() -> None:
    v = seen([doubling(1, HOUR, 1, ("n00",))], {})
    plan = decide(v)
    assert verdicts(plan) == {"1": "start 8"}
    assert plan.decisions["1"].nodes == ("n00", "n01")
    assert overbooked(v, plan) == ""
    assert "grows from 1 to 8 GPUs" in plan.decisions["1"].reason
    assert sum(term.value for term in plan.decisions["1"].terms) > 0.0


def test_without_the_setting_it_is_left_alone() -> None:
    v = seen([doubling(1, HOUR, 1, ("n00",))], {})
    assert verdicts(decide(v, growth=None)) == {}
    assert not TitanPolicy().preemptive
    assert TitanPolicy(TitanConfig(growth=0.3)).preemptive


def test_the_daemon_shows_no_running_job_so_that_none_grows() -> None:
    v = replace(seen([doubling(1, HOUR, 1, ("n00",))], {}), running={})
    assert verdicts(decide(v)) == {}


@pytest.mark.parametrize(
    ("left_s", "grows"),
    [(5 * START_UP_S, True), (2 * START_UP_S, False), (0.5 * START_UP_S, False)],
)
def test_who_is_nearly_done_is_not_started_anew(left_s: float, grows: bool) -> None:
    # Three times as fast after 44 s: with 220 s left it is done in 117 s, with 88 s left in 73 s
    # (a fifth more progress, less than the margin), with 22 s left in 51 s.
    again = {1: START_UP_S + left_s, 4: START_UP_S + left_s / 3}
    v = seen([Running(1, 1, ("n00",), left_s, again)], {}, machines=1)
    assert (verdicts(decide(v)) != {}) is grows


def test_the_margin_decides() -> None:
    # 1/R rises by exactly a half: 1200 s go on, 800 s if anew.
    run = Running(1, 1, ("n00",), 1200.0, {1: 1244.0, 2: 800.0})
    assert verdicts(decide(seen([run], {}), growth=0.45)) == {"1": "start 2"}
    assert verdicts(decide(seen([run], {}), growth=0.55)) == {}


def test_a_start_that_is_worth_more_gets_the_gpus() -> None:
    # Three GPUs are free. The start takes two; the third is left for the job that runs.
    run = doubling(1, 10 * HOUR, 1, ("n00",))
    plan = decide(seen([run], {2: facts(2, {2: 600.0})}, machines=1))
    assert verdicts(plan) == {"1": "start 2", "2": "start 2"}
    plan = decide(seen([run], {2: facts(2, {2: 600.0}), 3: facts(3, {1: 600.0})}, machines=1))
    assert verdicts(plan) == {"2": "start 2", "3": "start 1"}


def test_growth_yields_its_seat_to_a_start() -> None:
    # n01 has four GPUs, n00 two: job 1 could move to n01, job 2 fits nowhere else.
    runs = [doubling(1, HOUR, 2, ("n00",))]
    v = seen(runs, {2: facts(2, {4: 900.0})})
    plan = decide(v)
    assert overbooked(v, plan) == ""
    assert verdicts(plan)["2"] == "start 4"


def test_a_job_that_may_not_be_resized_does_not_grow() -> None:
    v = seen([doubling(1, HOUR, 1, ("n00",))], {})
    fact = v.running["1"]
    fixed = replace(fact, permit=replace(fact.permit, resize=False))
    assert verdicts(decide(replace(v, running={"1": fixed}))) == {}


def test_nothing_grows_behind_a_job_past_the_waiting_limit() -> None:
    run = doubling(1, 10 * HOUR, 4, ("n00",))
    v = seen([run], {2: facts(2, {8: HOUR}, since=0.0)})
    policy = TitanPolicy(TitanConfig(growth=0.3, waiting_limit_s=HOUR))
    assert verdicts(policy(v, 2 * HOUR)) == {"2": "reserve"}

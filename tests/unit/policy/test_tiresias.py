"""Policy tiresias: queues by attained service, first submission inside of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.domain.errors import SolverError
from slurm_ext.policy.tiresias import TiresiasPolicy
from tests.unit.policy.build import facts
from tests.unit.policy.runs import Running, seen, verdicts

HOUR = 3600.0
LIMIT = 4 * HOUR


def test_a_job_past_the_limit_gives_way_to_a_new_one() -> None:
    long_served = Running(1, 4, ("n00",), HOUR, attained=LIMIT)
    plan = TiresiasPolicy()(seen([long_served], {2: facts(2, {4: 9 * HOUR})}, machines=1), 0.0)
    assert verdicts(plan) == {"1": "stop", "2": "start 4"}
    assert "queue 2" in plan.decisions["1"].reason
    assert plan.decisions["1"].terms[0].value == LIMIT


def test_below_the_limit_it_runs_on_however_long_it_is() -> None:
    served = Running(1, 4, ("n00",), 9 * HOUR, attained=LIMIT - 1.0)
    plan = TiresiasPolicy()(seen([served], {2: facts(2, {4: 60.0}, since=1.0)}, machines=1), 2.0)
    assert verdicts(plan) == {"2": "wait"}


def test_inside_a_queue_the_first_submission_counts_not_the_length() -> None:
    waiting = {1: facts(1, {4: 9 * HOUR}, since=1.0), 2: facts(2, {4: 60.0}, since=2.0)}
    plan = TiresiasPolicy()(seen([], waiting, machines=1), 3.0)
    assert verdicts(plan) == {"1": "start 4", "2": "wait"}


def test_a_job_that_does_not_fit_is_passed_over() -> None:
    waiting = {1: facts(1, {8: HOUR}, since=1.0), 2: facts(2, {4: HOUR}, since=2.0)}
    plan = TiresiasPolicy()(seen([], waiting, machines=1), 3.0)
    assert verdicts(plan) == {"1": "wait", "2": "start 4"}


def test_service_counts_over_all_attempts() -> None:
    # Stopped before, it waits in the second queue behind a younger job.
    stopped = replace(facts(1, {4: HOUR}, since=0.0), attained_gpu_s=LIMIT + 1)
    plan = TiresiasPolicy()(seen([], {1: stopped, 2: facts(2, {4: HOUR}, since=9.0)}, 1), 10.0)
    assert verdicts(plan) == {"1": "wait", "2": "start 4"}


def test_sparing_keeps_a_job_whose_gpus_nobody_can_use() -> None:
    # By counts, job 4 should run instead of job 3; but its four GPUs are on no one node.
    runs = [
        Running(1, 2, ("n00",), HOUR),
        Running(2, 2, ("n01",), HOUR),
        Running(3, 1, ("n01",), HOUR, attained=LIMIT),
    ]
    v = seen(runs, {4: facts(4, {4: HOUR}, since=1.0)})
    assert verdicts(TiresiasPolicy()(v, 2.0)) == {"4": "wait"}
    assert verdicts(TiresiasPolicy(spare=False)(v, 2.0)) == {"3": "stop", "4": "wait"}


def test_more_queues_and_limits_out_of_order() -> None:
    policy = TiresiasPolicy((HOUR, 10 * HOUR))
    assert [policy.queue_of(x * HOUR) for x in (0.5, 1.0, 9.0, 10.0)] == [0, 1, 1, 2]
    with pytest.raises(SolverError, match="do not ascend"):
        TiresiasPolicy((10.0, 5.0))

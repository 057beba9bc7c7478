"""Policy optimus and the published formulation of Titan: counts for everybody at every decision."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.policy.optimus import OptimusPolicy
from slurm_ext.policy.titan_published import PublishedTitan
from tests.unit.policy.build import facts
from tests.unit.policy.runs import Running, seen, verdicts

HOUR = 3600.0


def test_everybody_gets_one_before_anybody_gets_two() -> None:
    waiting = {n: facts(n, {1: n * HOUR, 2: n * HOUR / 1.9}, since=float(n)) for n in range(1, 5)}
    plan = OptimusPolicy()(seen([], waiting, machines=1), 9.0)
    assert verdicts(plan) == {str(n): "start 1" for n in range(1, 5)}


def test_what_is_left_goes_to_whoever_gains_most_seconds() -> None:
    # One GPU is left: job 1 gains 400 s by it, job 2 gains 1,000 s.
    waiting = {
        1: facts(1, {1: 1000.0, 2: 600.0}),
        2: facts(2, {1: 9000.0, 2: 8000.0}),
        3: facts(3, {1: 100.0}),
    }
    plan = OptimusPolicy()(seen([], waiting, machines=1), 0.0)
    assert verdicts(plan) == {"1": "start 1", "2": "start 2", "3": "start 1"}


def test_a_large_step_is_bought_whole_or_not_at_all() -> None:
    waiting = {1: facts(1, {1: 1000.0, 4: 200.0}), 2: facts(2, {1: 1000.0})}
    plan = OptimusPolicy()(seen([], waiting, machines=1), 0.0)
    assert verdicts(plan) == {"1": "start 1", "2": "start 1"}
    plan = OptimusPolicy()(seen([], waiting, machines=2), 0.0)
    assert verdicts(plan) == {"1": "start 4", "2": "start 1"}


def test_who_comes_last_waits_when_there_is_not_one_for_everybody() -> None:
    waiting = {n: facts(n, {2: HOUR}, since=float(n)) for n in range(1, 4)}
    plan = OptimusPolicy()(seen([], waiting, machines=1), 9.0)
    assert verdicts(plan) == {"1": "start 2", "2": "start 2", "3": "wait"}


def test_a_running_job_shrinks_for_a_new_one_and_is_left_alone_otherwise() -> None:
    run = Running(1, 4, ("n00",), HOUR, {1: 3 * HOUR, 2: 1.7 * HOUR, 4: HOUR + 44})
    alone = OptimusPolicy()(seen([run], {}, machines=1), 0.0)
    assert verdicts(alone) == {}
    v = seen([run], {2: facts(2, {1: HOUR, 2: 0.6 * HOUR}, since=1.0)}, machines=1)
    assert verdicts(OptimusPolicy()(v, 1.0)) == {"1": "start 2", "2": "start 2"}


def test_a_count_that_makes_it_slower_is_not_bought() -> None:
    plan = OptimusPolicy()(seen([], {1: facts(1, {1: 1000.0, 2: 1100.0})}, machines=1), 0.0)
    assert verdicts(plan) == {"1": "start 1"}


# -- the published formulation of Titan ------------------------------------------------------


def test_published_titan_gives_nobody_nothing_while_it_has_gpus() -> None:
    waiting = {n: facts(n, {g: n * HOUR / g for g in (1, 2, 4)}) for n in range(1, 5)}
    plan = PublishedTitan()(seen([], waiting, machines=1), 0.0)
    assert verdicts(plan) == {str(n): "start 1" for n in range(1, 5)}


def test_published_titan_weighs_only_as_many_jobs_as_there_are_gpus() -> None:
    waiting = {n: facts(n, {1: n * HOUR}) for n in range(1, 7)}
    plan = PublishedTitan()(seen([], waiting, machines=1), 0.0)
    assert sorted(k for k, what in verdicts(plan).items() if what == "start 1") == list("1234")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(30, 20000), min_size=1, max_size=4), st.integers(1, 2))
def test_published_titan_is_optimal_in_its_own_terms(ones: list[float], machines: int) -> None:
    counts, gpus, interval = (1, 2, 4), 4 * machines, 120.0
    times = [{g: one / g**0.8 for g in counts} for one in ones]
    waiting = {n: facts(n, t) for n, t in enumerate(times, 1)}
    found = verdicts(PublishedTitan()(seen([], waiting, machines), 0.0))
    fair = max(g for g in counts if g <= max(1, gpus // len(ones)))

    def cost(choice: tuple[int, ...]) -> float:
        return sum(
            max(t[g], interval) / max(t[fair], interval) if g else 1e4
            for g, t in zip(choice, times, strict=True)
        )

    ours = tuple(int(found[str(n)].split()[1]) if "start" in found[str(n)] else 0 for n in waiting)
    best = min(
        cost(choice) for choice in product((0, *counts), repeat=len(ones)) if sum(choice) <= gpus
    )
    assert cost(ours) <= best * (1 + 1e-6)

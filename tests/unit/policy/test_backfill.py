"""EASY and FIFO on queues small enough to be worked out by hand."""

from __future__ import annotations

import math

import pytest

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import JobFacts, Permit, View
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.backfill import Backfill

NOW = 1000.0


def placement(gpus: int) -> tuple[int, ...]:
    whole, rest = divmod(gpus, 4)
    return (4,) * whole + ((rest,) if rest else ())


def pending(
    number: int, gpus: int, limit: float | None, priority: int = 0, cpus: int | None = None
) -> Job:
    return Job(
        str(number),
        number,
        "u",
        ("main",),
        JobState.PENDING,
        submit_s=float(number),
        gpus=gpus,
        cpus=gpus if cpus is None else cpus,
        time_limit_s=limit,
        priority=priority,
    )


def running(number: int, gpus: int, nodes: tuple[str, ...], end: float | None) -> Job:
    return Job(
        str(number),
        number,
        "u",
        ("main",),
        JobState.RUNNING,
        submit_s=0.0,
        start_s=0.0,
        end_s=end,
        gpus=gpus,
        cpus=gpus,
        node_names=nodes,
    )


def plan(policy: Backfill, jobs: list[Job], node_count: int = 2, cpus: int = 32) -> Plan:
    used = {f"n{i}": 0 for i in range(1, node_count + 1)}
    for job in jobs:
        left = job.gpus
        for name in job.node_names:
            used[name] += min(4, left)
            left -= min(4, left)
    nodes = tuple(
        Node(name, gpus=4, gpus_alloc=count, cpus=cpus, cpus_alloc=count)
        for name, count in used.items()
    )
    facts = {
        job.job_id: JobFacts(
            candidates=(
                Candidate(
                    (job.job_id,),
                    Configuration(job.gpus, placement(job.gpus)),
                    Estimate(1, 1, 1, Source.DECLARED),
                ),
            ),
            pool="main",
        )
        for job in jobs
        if job.pending
    }
    snapshot = Snapshot(NOW, tuple(jobs), nodes)
    return policy(View(snapshot, facts, {"main": tuple(used)}), NOW)


def started(made: Plan) -> set[str]:
    return {d.job_id for d in made.decisions.values() if d.verdict is Verdict.START}


# n1 is held until 1100; the head (1) needs both nodes, so it is planned for 1100.
HELD = running(9, 4, ("n1",), NOW + 100)
HEAD = pending(1, 8, 500)


def test_head_gets_its_planned_start() -> None:
    made = plan(Backfill(), [HELD, HEAD])
    assert made.decisions["1"].verdict is Verdict.RESERVE
    assert made.decisions["1"].expected_start_s == NOW + 100
    assert "8 free GPUs" in made.decisions["1"].waits_for


def test_short_job_is_backfilled_and_a_long_one_is_not() -> None:
    made = plan(Backfill(), [HELD, HEAD, pending(2, 2, 101), pending(3, 2, 100)])
    assert started(made) == {"3"}
    assert made.decisions["3"].nodes == ("n2",)
    assert made.decisions["2"].verdict is Verdict.ORDER


def test_long_job_may_use_what_the_head_leaves_over() -> None:
    head = pending(1, 6, 500)  # takes 4 of one node and 2 of the other: 2 GPUs are left over
    jobs = [HELD, head, pending(2, 2, 10_000), pending(3, 1, 10_000)]
    assert started(plan(Backfill(), jobs)) == {"2"}


def test_fifo_stops_at_the_first_that_does_not_fit() -> None:
    jobs = [HELD, HEAD, pending(3, 2, 1)]
    assert started(plan(Backfill(reserve=False), jobs)) == set()
    assert started(plan(Backfill(), jobs)) == {"3"}


def test_priority_goes_before_submission() -> None:
    jobs = [pending(1, 8, 10), pending(2, 8, 10, priority=5)]
    assert started(plan(Backfill(), jobs)) == {"2"}


def test_a_running_job_without_a_limit_promises_nothing() -> None:
    forever = running(9, 4, ("n1",), None)
    made = plan(Backfill(), [forever, HEAD, pending(2, 4, 10_000)])
    assert made.decisions["1"].expected_start_s is None
    assert started(made) == {"2"}


def test_a_pending_job_without_a_limit_is_not_backfilled_before_the_head() -> None:
    assert started(plan(Backfill(), [HELD, HEAD, pending(2, 1, None)])) == set()


def test_a_job_past_its_limit_still_holds_its_gpus_now() -> None:
    late = running(9, 4, ("n1",), NOW - 50)
    made = plan(Backfill(), [late, HEAD, pending(2, 4, 1)])
    assert made.decisions["1"].expected_start_s == NOW
    assert started(made) == set()


def test_started_jobs_hold_their_gpus_against_later_ones() -> None:
    jobs = [pending(n, 4, 10) for n in (1, 2, 3)]
    made = plan(Backfill(), jobs)
    assert started(made) == {"1", "2"}
    assert {made.decisions[key].nodes for key in ("1", "2")} == {("n1",), ("n2",)}
    # The head's planned start comes from the limits of jobs started in the same pass.
    assert made.decisions["3"].expected_start_s == NOW + 10


def test_cpus_of_ended_jobs_are_free_for_the_head() -> None:
    held = running(9, 1, ("n1",), NOW + 100)
    jobs = [held, pending(1, 2, 10, cpus=4), pending(2, 1, 1000, cpus=1)]
    made = plan(Backfill(), jobs, node_count=1, cpus=4)
    assert made.decisions["1"].expected_start_s == NOW + 100


def test_job_larger_than_the_machine_blocks_nobody() -> None:
    made = plan(Backfill(), [pending(1, 12, 10), pending(2, 8, 10)])
    assert made.decisions["1"].expected_start_s is None
    assert started(made) == {"2"}


def test_every_job_gets_a_decision_and_the_same_view_the_same_plan() -> None:
    jobs = [HELD, *(pending(n, 1 + n % 5, 50 * n) for n in range(1, 20))]
    made = plan(Backfill(), jobs)
    assert set(made.decisions) == {str(n) for n in range(1, 20)}
    assert sorted(d.rank for d in made.decisions.values()) == list(range(19))
    assert plan(Backfill(), jobs) == made


def test_job_that_may_not_be_ordered_is_left_alone() -> None:
    job = pending(1, 1, 10)
    facts = {"1": JobFacts((), Permit(order=False, reasons=("held by its user",)), pool="main")}
    snapshot = Snapshot(NOW, (job,), (Node("n1", gpus=4, cpus=4),))
    made = Backfill()(View(snapshot, facts, {"main": ("n1",)}), NOW)
    assert made.decisions["1"].verdict is Verdict.LEAVE
    assert made.decisions["1"].reason == "held by its user"


@pytest.mark.parametrize(("policy", "name"), [(Backfill(), "easy"), (Backfill(False), "fifo")])
def test_names(policy: Backfill, name: str) -> None:
    assert policy.name == name
    assert math.isfinite(plan(policy, [pending(1, 1, 1)]).made_s)

"""The engine: who starts when, what a policy sees, and what may never happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import Policy, View
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.titan import TitanPolicy
from slurm_ext.sim.engine import Hardware, Run, SimJob, SimulationError, replay, seats_overlap


def sim_job(
    job_id: str,
    submit: float,
    gpus: int,
    run: float,
    *,
    counts: tuple[int, ...] = (),
    limit: float | None = None,
    hardware: Hardware | None = None,
) -> SimJob:
    """A job that takes ``run`` at ``gpus`` and scales perfectly; counts it may also have."""
    hardware = hardware or Hardware(2, 4)
    times = {count: run * gpus / count for count in sorted({gpus, *counts})}
    candidates = tuple(
        Candidate(
            (job_id,),
            Configuration(count, hardware.placement(count)),
            Estimate(seconds, seconds, seconds, Source.MEASURED),
        )
        for count, seconds in times.items()
    )
    return SimJob(job_id, submit, gpus, limit or 1.5 * run, candidates, times, run)


def starts(jobs: list[SimJob], policy: Policy, hardware: Hardware) -> dict[str, float]:
    return {run.job_id: run.start_s for run in replay(jobs, hardware, policy).runs}


class Script:
    """A policy that does what a function says: job id -> configuration to start, or None."""

    name = "script"

    def __init__(self, choose: Callable[[View, float], dict[str, Configuration | None]]) -> None:
        self._choose = choose

    def __call__(self, view: View, now: float) -> Plan:
        chosen = self._choose(view, now)
        return Plan(
            "script",
            now,
            {
                job_id: Decision(job_id, Verdict.START, rank, "", configuration)
                for rank, (job_id, configuration) in enumerate(chosen.items())
            },
        )


def test_job_runs_for_its_true_time_not_its_estimate() -> None:
    job = sim_job("a", 5, 4, 100)
    slow = SimJob("a", 5, 4, 150, job.candidates, {4: 130.0}, 100)
    (run,) = replay([slow], Hardware(1, 4), Backfill()).runs
    assert (run.start_s, run.end_s, run.gpus, run.seats) == (5, 135, 4, {"n1": 4})


def test_policy_sees_the_estimate_and_the_limit_but_never_the_true_end() -> None:
    seen: list[View] = []

    def look(view: View, now: float) -> dict[str, Configuration | None]:
        seen.append(view)
        return {
            job.job_id: view.facts[job.job_id].candidates[0].configuration
            for job in view.snapshot.pending()
        }

    jobs = [sim_job("a", 0, 4, 100), sim_job("b", 10, 4, 100)]
    hidden = SimJob("a", 0, 4, 150, jobs[0].candidates, {4: 77.0}, 100)
    replay([hidden, jobs[1]], Hardware(2, 4), Script(look))
    running = next(iter(seen[1].snapshot.running()))
    assert running.end_s == 150
    assert seen[1].free_at_s["a"] == 100
    assert seen[1].previous is not None


def test_events_of_one_instant_are_decided_together() -> None:
    times: list[tuple[float, int]] = []

    def look(view: View, now: float) -> dict[str, Configuration | None]:
        times.append((now, len(view.facts)))
        return {
            key: fact.candidates[0].configuration
            for key, fact in view.facts.items()
            if view.snapshot.nodes[0].gpus_free == 4
        }

    jobs = [sim_job("a", 0, 4, 10), sim_job("b", 10, 4, 10), sim_job("c", 10, 4, 10)]
    schedule = replay(jobs, Hardware(1, 4), Script(look))
    # At 10 the end of a and the arrivals of b and c are one event; c then waits for b's end.
    assert times == [(0, 1), (10, 2), (20, 1)]
    assert schedule.refused_starts == 1


def test_jobs_that_nothing_starts_are_named() -> None:
    never = Script(lambda view, now: {})
    with pytest.raises(SimulationError, match="never started a, b"):
        replay([sim_job("a", 0, 1, 1), sim_job("b", 0, 1, 1)], Hardware(1, 4), never)


def test_configuration_that_is_not_the_jobs_own_is_refused() -> None:
    alien = Script(lambda view, now: {"a": Configuration(3, (3,))})
    with pytest.raises(SimulationError, match="not its own"):
        replay([sim_job("a", 0, 1, 1)], Hardware(1, 4), alien)


def test_same_id_twice_is_refused() -> None:
    with pytest.raises(SimulationError, match="twice"):
        replay([sim_job("a", 0, 1, 1), sim_job("a", 1, 1, 1)], Hardware(1, 4), Backfill())


def test_pooled_hardware_ignores_node_borders() -> None:
    borders, pooled = Hardware(2, 4), Hardware(2, 4, pooled=True)

    def jobs(hardware: Hardware) -> list[SimJob]:
        return [
            sim_job("a", 0, 3, 10, hardware=hardware),
            sim_job("b", 0, 3, 10, hardware=hardware),
            sim_job("c", 0, 2, 10, hardware=hardware),
        ]

    assert starts(jobs(pooled), Backfill(), pooled) == {"a": 0, "b": 0, "c": 0}
    # On nodes of four, 3 + 3 leave one GPU on each: two GPUs of one node are not there.
    assert starts(jobs(borders), Backfill(), borders) == {"a": 0, "b": 0, "c": 10}


def test_overlap_check_sees_a_double_booking() -> None:
    run = Run("a", 0, 0, 10, 4, {"n1": 4}, 10)
    other = Run("b", 0, 5, 15, 1, {"n1": 1}, 10)
    assert seats_overlap([run], Hardware(1, 4)) == ""
    assert "n1 holds 5 of 4 GPUs at 5 s" in seats_overlap([run, other], Hardware(1, 4))


random_jobs = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([1, 2, 4, 8]),
        st.integers(1, 40),
        st.sampled_from([(), (1, 2, 4, 8)]),
        st.floats(0.8, 1.25),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(random_jobs, st.sampled_from([Backfill(), Backfill(reserve=False), TitanPolicy()]))
def test_invariants(
    rows: list[tuple[int, int, int, tuple[int, ...], float]], policy: Policy
) -> None:
    hardware = Hardware(2, 4)
    jobs = []
    for index, (submit, gpus, run, counts, error) in enumerate(rows):
        job = sim_job(f"j{index:02}", submit, gpus, run, counts=counts)
        true = {count: seconds * error for count, seconds in job.true_run_s.items()}
        jobs.append(
            SimJob(job.job_id, submit, gpus, job.limit_s, job.candidates, true, job.error_free_s)
        )
    schedule = replay(jobs, hardware, policy)
    assert seats_overlap(schedule.runs, hardware) == ""
    assert [run.job_id for run in schedule.runs] == [job.job_id for job in jobs]
    for run, job in zip(schedule.runs, jobs, strict=True):
        assert run.start_s >= run.submit_s
        assert run.end_s - run.start_s == pytest.approx(job.true_run_s[run.gpus])
        assert sum(run.seats.values()) == run.gpus
    assert replay(jobs, hardware, policy) == schedule

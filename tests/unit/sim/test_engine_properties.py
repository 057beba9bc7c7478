"""What holds for every policy, every cost and every machine."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.policy import Policy
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import Hardware, Run, Schedule, SimJob, replay, seats_overlap
from slurm_ext.sim.hardware import NodeGroup
from slurm_ext.sim.outages import Outage
from slurm_ext.sim.overhead import Overhead
from slurm_ext.sim.policies import POLICIES, policy_named

MACHINES = (
    Hardware(2, 4),
    Hardware(2, 4, pooled=True),
    Hardware(3, 8, groups=(NodeGroup(2, 4), NodeGroup(1, 8))),
    Hardware(3, 4, groups=(NodeGroup(2, 4, "V100"), NodeGroup(2, 8, "A100"))),
)


@dataclass(frozen=True)
class Case:
    """One replay."""

    jobs: tuple[SimJob, ...]
    hardware: Hardware
    costs: Costs
    interval_s: float
    outages: tuple[Outage, ...]

    def run(self, policy: Policy, jobs: tuple[SimJob, ...] | None = None) -> Schedule:
        return replay(
            self.jobs if jobs is None else jobs,
            self.hardware,
            policy,
            self.costs,
            self.interval_s,
            self.outages,
        )


@st.composite
def cases(draw: st.DrawFn, most: int = 12) -> Case:
    hardware = draw(st.sampled_from(MACHINES))
    start_up = draw(st.sampled_from([0.0, 3.0]))
    jobs = []
    for index in range(draw(st.integers(1, most))):
        gpu_type = draw(st.sampled_from(hardware.gpu_types))
        gpus = draw(st.sampled_from([1, 2, 4, 8]))
        counts = sorted({gpus, *draw(st.sampled_from([(), (1, 2, 4, 8)]))})
        work = draw(st.integers(1, 60))
        error = draw(st.sampled_from([0.6, 1.0, 1.7]))
        submit = draw(st.integers(0, 80))
        candidates, times = [], {}
        for count in counts:
            times[count] = start_up + work * gpus / count
            value = start_up + error * (times[count] - start_up)
            for placement in hardware.placements(count, gpu_type):
                candidates.append(
                    Candidate(
                        (f"j{index:02}",),
                        Configuration(count, placement),
                        Estimate(value, value, value, Source.MEASURED),
                    )
                )
        jobs.append(
            SimJob(
                f"j{index:02}",
                submit,
                gpus,
                3 * times[gpus],
                tuple(candidates),
                times,
                times[gpus],
                model=draw(st.sampled_from(["", "vit"])),
                gpu_type=gpu_type,
                start_up_s=start_up,
                cold_s=start_up / 2,
            )
        )
    costs = Costs(
        pipeline_switch_s=draw(st.sampled_from([None, {("vit", ""): 0.5}])),
        warm_for_s=draw(st.sampled_from([0.0, 5.0])),
        save_s=draw(st.sampled_from([0.0, 2.0])),
        requeue_delay_s=draw(st.sampled_from([0.0, 9.0])),
        checkpoint_every_s=draw(st.sampled_from([0.0, 7.0])),
        overhead=draw(
            st.sampled_from([Overhead(), Overhead(cycle_s=1, launch_s=2, epilog_s=1, grace_s=1)])
        ),
    )
    names = [node.name for node in hardware.inventory()]
    outages = tuple(
        Outage(draw(st.sampled_from(names)), down, down + draw(st.integers(1, 40)))
        for down in draw(st.lists(st.integers(0, 100), max_size=2))
    )
    return Case(tuple(jobs), hardware, costs, draw(st.sampled_from([0.0, 10.0])), outages)


def by_job(schedule: Schedule) -> dict[str, list[Run]]:
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in schedule.runs:
        found[run.job_id].append(run)
    return found


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_invariants(name: str, case: Case) -> None:
    schedule = case.run(policy_named(name))
    assert seats_overlap(schedule.runs, case.hardware) == ""
    runs = by_job(schedule)
    assert list(runs) == [job.job_id for job in case.jobs]  # none lost, none invented
    pools = case.hardware.pools()
    for job in case.jobs:
        mine = runs[job.job_id]
        assert [run.cause == "done" for run in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[0].start_s >= job.submit_s + case.costs.overhead.grace_s
        for before, after in pairwise(mine):
            assert before.end_s <= after.start_s  # never twice at once
            if before.cause != "outage":
                assert after.start_s >= before.end_s + case.costs.requeue_delay_s
        # Work is conserved: all of it is done, once, at the speed of the GPUs it was done on.
        assert sum(run.share for run in mine) == pytest.approx(1)
        for run in mine:
            work = run.share * (job.true_run_s[run.gpus] - job.start_up_s)
            assert run.end_s - run.start_s == pytest.approx(work + run.lost_s, abs=1e-6)
            assert sum(run.seats.values()) == run.gpus
            assert set(run.seats) <= set(pools[case.hardware.pool_of(job.gpu_type)])
            for outage in case.outages:
                if outage.node in run.seats:
                    assert run.end_s <= outage.down_s or run.start_s >= outage.up_s
    if not getattr(policy_named(name), "preemptive", False):
        assert all(run.cause in ("done", "outage") for run in schedule.runs)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, deadline=None)
@given(case=cases())
def test_same_input_same_result(name: str, case: Case) -> None:
    assert case.run(policy_named(name)) == case.run(policy_named(name))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_a_longer_job_list_never_changes_the_past(name: str, case: Case) -> None:
    jobs = sorted(case.jobs, key=lambda job: job.submit_s)
    cut = len(jobs) // 2
    if not cut or jobs[cut].submit_s == jobs[cut - 1].submit_s:
        return
    before = jobs[cut].submit_s
    short = case.run(policy_named(name), tuple(jobs[:cut]))
    whole = case.run(policy_named(name), tuple(jobs))

    def past(schedule: Schedule) -> list[tuple[str, float, dict[str, int], float]]:
        return [
            # What has not ended by then may still be stopped for a later job.
            (run.job_id, run.start_s, dict(run.seats), min(run.end_s, before))
            for run in schedule.runs
            if run.start_s < before
        ]

    assert past(short) == past(whole)


@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_an_idle_machine_starts_what_fits(case: Case) -> None:
    """Where nothing costs anything, a job that needs no more than is free does not wait."""
    free = Case(case.jobs, Hardware(2, 4, pooled=True), Costs(), 0.0, ())
    jobs = tuple(
        SimJob(
            job.job_id,
            job.submit_s,
            1,
            job.limit_s,
            tuple(
                Candidate((job.job_id,), Configuration(1, (1,)), item.remaining_s)
                for item in job.candidates[:1]
            ),
            {1: job.error_free_s},
            job.error_free_s,
        )
        for job in case.jobs
    )
    schedule = free.run(policy_named("backfill"), jobs)
    for run in schedule.runs:
        at = run.submit_s
        if run.start_s > at:
            held = sum(o.gpus for o in schedule.runs if o.start_s <= at < o.end_s)
            assert held == 8

"""The replay against a second opinion: checkers that share no code with what they check."""

from __future__ import annotations

import heapq
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import View
from slurm_ext.policy.backfill import Backfill
from slurm_ext.sim.engine import Hardware, Run, Schedule, SimJob, replay
from slurm_ext.sim.hardware import NodeGroup
from slurm_ext.sim.policies import POLICIES, policy_named
from slurm_ext.sim.summary import job_rows, summarise
from tests.unit.sim.test_engine_properties import Case, by_job, cases


def rigid(job_id: str, submit_s: float, run_s: float, gpus: int = 1) -> SimJob:
    """A job without choice, whose estimate is the truth."""
    shares = (4,) * (gpus // 4) + ((gpus % 4,) if gpus % 4 else ())
    told = Estimate(run_s, run_s, run_s, Source.MEASURED)
    option = Candidate((job_id,), Configuration(gpus, shares), told)
    return SimJob(job_id, submit_s, gpus, 2 * run_s, (option,), {gpus: run_s}, run_s)


def most_held(runs: tuple[Run, ...]) -> dict[str, int]:
    """The most GPUs that were ever held on each node at once, counted between all moments."""
    most: defaultdict[str, int] = defaultdict(int)
    moments = sorted({r.start_s for r in runs} | {r.end_s for r in runs})
    for begin, end in pairwise(moments):
        held: defaultdict[str, int] = defaultdict(int)
        for run in runs:
            if run.start_s <= begin and end <= run.end_s:
                for node, gpus in run.seats.items():
                    held[node] += gpus
        for node, gpus in held.items():
            most[node] = max(most[node], gpus)
    return most


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10, deadline=None)
@given(case=cases(most=20))
def test_no_node_ever_holds_more_than_it_has(name: str, case: Case) -> None:
    sizes = [kind.gpus_per_node for kind in case.hardware.kinds for _ in range(kind.nodes)]
    most = most_held(case.run(policy_named(name)).runs)
    if case.hardware.pooled:
        assert most["n1"] <= sum(sizes)
    else:
        assert all(gpus <= sizes[int(node[1:]) - 1] for node, gpus in most.items())


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10, deadline=None)
@given(case=cases(), data=st.data())
def test_the_truth_of_a_job_changes_nothing_before_its_end(
    name: str, case: Case, data: st.DataObject
) -> None:
    """Whatever a job really takes, until it ends the same is decided: estimates are all that a
    policy sees."""
    place = data.draw(st.integers(0, len(case.jobs) - 1))
    factor = data.draw(st.sampled_from([0.3, 0.9, 1.4, 4.0]))
    job = case.jobs[place]
    work = {g: job.start_up_s + factor * (s - job.start_up_s) for g, s in job.true_run_s.items()}
    other = (*case.jobs[:place], replace(job, true_run_s=work), *case.jobs[place + 1 :])
    one, two = case.run(policy_named(name)), case.run(policy_named(name), other)

    def until(schedule: Schedule) -> float:
        return max(run.end_s for run in schedule.runs if run.job_id == job.job_id)

    # Progress is kept in shares of the truth: what is left of a run that was stopped differs.
    first = min(by_job(one)[job.job_id][0].end_s, by_job(two)[job.job_id][0].end_s)
    before = min(until(one), until(two), first)

    def past(schedule: Schedule) -> list[tuple[str, float, dict[str, int]]]:
        return [(r.job_id, r.start_s, dict(r.seats)) for r in schedule.runs if r.start_s < before]

    assert past(one) == past(two)


@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 8])),
        min_size=2,
        max_size=14,
    )
)
def test_backfilling_never_delays_the_head_of_the_queue(jobs: list[tuple[int, int, int]]) -> None:
    """What was promised to the first job that did not fit is kept, whoever started behind it."""
    promised: dict[str, float] = {}

    class Listening(Backfill):
        def __call__(self, view: View, now: float) -> Plan:
            plan = super().__call__(view, now)
            for decision in plan.decisions.values():
                if decision.verdict is Verdict.RESERVE and decision.expected_start_s is not None:
                    promised.setdefault(decision.job_id, decision.expected_start_s)
            return plan

    rows = [rigid(f"j{i:02}", at, run, gpus) for i, (at, run, gpus) in enumerate(jobs)]
    schedule = replay(rows, Hardware(2, 4), Listening(), brief=False)
    begun = {run.job_id: run.start_s for run in schedule.runs}
    assert all(begun[key] <= at for key, at in promised.items())


def srpt(jobs: list[tuple[int, int]]) -> list[float]:
    """Ends under shortest remaining time first on one machine that may switch at any time."""
    order = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    ends = [0.0] * len(jobs)
    queue: list[tuple[float, int]] = []
    now, place = 0.0, 0
    while queue or place < len(order):
        if not queue:
            now = max(now, jobs[order[place]][0])
        while place < len(order) and jobs[order[place]][0] <= now:
            heapq.heappush(queue, (jobs[order[place]][1], order[place]))
            place += 1
        left, job = heapq.heappop(queue)
        until = jobs[order[place]][0] if place < len(order) else float("inf")
        if now + left <= until:
            now += left
            ends[job] = now
        else:
            heapq.heappush(queue, (left - (until - now), job))
            now = until
    return ends


@settings(max_examples=60, deadline=None)
@given(jobs=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=12))
def test_preemptive_srtf_without_costs_is_srpt(jobs: list[tuple[int, int]]) -> None:
    rows = [rigid(f"j{i:02}", at, run) for i, (at, run) in enumerate(jobs)]
    schedule = replay(rows, Hardware(1, 1), policy_named("srtf-preemptive"))
    ends = {run.job_id: run.end_s for run in schedule.runs if run.cause == "done"}
    total = sum(ends.values())
    # Among equals either may be first, so that sums are compared; SRPT has the least possible one.
    assert total == pytest.approx(sum(srpt(jobs)))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8, deadline=None)
@given(case=cases(most=16))
def test_every_number_follows_from_the_runs(name: str, case: Case) -> None:
    schedule, base = case.run(policy_named(name)), case.run(policy_named("srtf"))
    found = summarise(schedule, base)
    runs = by_job(schedule)
    jct = {job.job_id: runs[job.job_id][-1].end_s - job.submit_s for job in case.jobs}
    held = {key: sum(run.end_s - run.start_s for run in mine) for key, mine in runs.items()}
    area = sum(run.gpus * (run.end_s - run.start_s) for run in schedule.runs)
    times = np.array(list(jct.values()))
    waits = np.array([max(0.0, jct[key] - held[key]) for key in jct])
    span = max(r.end_s for r in schedule.runs) - min(job.submit_s for job in case.jobs)
    total = sum(kind.nodes * kind.gpus_per_node for kind in case.hardware.kinds)
    before = {key: mine[-1].end_s - mine[-1].submit_s for key, mine in by_job(base).items()}
    expected = {
        "avg_jct_s": times.mean(),
        "median_jct_s": np.median(times),
        "p95_jct_s": np.percentile(times, 95),
        "p99_jct_s": np.percentile(times, 99),
        "avg_wait_s": waits.mean(),
        "p99_wait_s": np.percentile(waits, 99),
        "makespan_s": span,
        "gpu_utilisation": area / (total * span),
        "worst_slowdown": max(jct[job.job_id] / job.error_free_s for job in case.jobs),
        "queue_share_of_jct": sum(jct[key] - held[key] for key in jct) / times.sum(),
        "starts_per_job": len(schedule.runs) / len(case.jobs),
        "gpu_s_lost": sum(run.gpus * run.lost_s for run in schedule.runs),
        "share_better_than_srtf": np.mean([jct[k] <= 0.9 * before[k] + 1e-9 for k in jct]),
        "share_worse_than_srtf": np.mean([jct[k] >= 1.1 * before[k] - 1e-9 for k in jct]),
    }
    for key, value in expected.items():
        assert getattr(found, key) == pytest.approx(value, abs=1e-9), key
    rows = {str(row["job_id"]): row for row in job_rows(schedule.runs)}
    assert rows.keys() == jct.keys()
    for key, mine in runs.items():
        assert rows[key]["start_s"] == mine[0].start_s
        assert rows[key]["end_s"] == mine[-1].end_s
        assert rows[key]["gpus"] == mine[-1].gpus


def test_equal_input_gives_equal_bytes_whatever_python_hashes(tmp_path: Path) -> None:
    outages = tmp_path / "outages.csv"
    outages.write_text("node,down_s,up_s\nn3,1000,5000\nn1,2000,\n")
    written = []
    for seed in ("0", "1", "4242"):
        out = tmp_path / f"{seed}.json"
        words = (
            "simulate --trace FM-1-vit --limit 60 --cluster 3x4xV100,2x8xV100 --estimate-error 50 "
            f"--policy {','.join(POLICIES)} --merge 0.5,0.2 --outages {outages} --json {out} -q"
        )
        subprocess.run(
            [sys.executable, "-m", "slurm_ext", *words.split()],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            timeout=120,
        )
        written.append(out.read_bytes())
    assert written[0] == written[1] == written[2]
    assert json.loads(written[0])["jobs"].keys() == POLICIES.keys()


def test_runs_too_short_for_the_clock_are_shares_of_nothing() -> None:
    """Late in a trace a nanosecond adds nothing to the time of the day."""
    schedule = replay([rigid("a", 1e9, 1e-9)], Hardware(1, 4), policy_named("srtf"))
    found = summarise(schedule, schedule)
    assert (found.avg_jct_s, found.gpu_utilisation, found.queue_share_of_jct) == (0, 0, 0)
    assert (found.share_better_than_srtf, found.share_worse_than_srtf) == (0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_on_nodes_of_two_sizes_every_placement_is_tried(name: str) -> None:
    """Four GPUs are two small nodes or a large one: which of the two is free matters to nobody."""
    machine = Hardware(3, 4, groups=(NodeGroup(2, 2), NodeGroup(1, 4)))

    def four(job_id: str, submit_s: float, run_s: float) -> SimJob:
        told = Estimate(run_s, run_s, run_s, Source.MEASURED)
        ways = tuple(
            Candidate((job_id,), Configuration(4, shares), told)
            for shares in machine.placements(4, "")
        )
        assert len(ways) == 2
        return SimJob(job_id, submit_s, 4, 2 * run_s, ways, {4: run_s}, run_s)

    schedule = replay([four(f"j{n}", n, 100) for n in range(2)], machine, policy_named(name))
    assert [run.start_s for run in schedule.runs] == [0, 1]
    assert sorted(len(run.seats) for run in schedule.runs) == [1, 2]

"""The published results of the titan_fm workloads, made again by our engine and policies.

The author's SRTF and Tiresias must come out as published: the numbers are printed to 0.001 h, which
is up to 0.15 % of the smallest, so that 0.3 % is rounding and nothing else.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from slurm_ext.sim.author import AuthorsRule
from slurm_ext.sim.engine import replay, seats_overlap
from slurm_ext.sim.library import find_workload, starter_truth
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.truth import consolidated
from slurm_ext.sim.workload import read_workload
from tests.bench.titan_fm_data import (
    HARDWARE,
    REFERENCE,
    WORKLOADS,
    Case,
    jobs_any_count,
    jobs_as_published,
    lower_bound_s,
    ours,
    p99_s,
    published,
    reproduced,
)

HOUR = 3600.0
ROUNDING = 0.003
PER_JOB = REFERENCE.parent / "srtf_jobs_FM-1-vit-large.csv"


def _case(workload: str, name: str) -> Case:
    return next(case for case in [*reproduced(workload), *ours(workload)] if case.name == name)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", ["srtf", "tiresias"])
def test_the_authors_results_come_out_again(name: str, workload: str) -> None:
    case = _case(workload, name)
    schedule = replay(case.jobs, HARDWARE, case.policy, interval_s=case.interval_s)
    assert seats_overlap(schedule.runs, HARDWARE) == ""
    found, theirs = summarise(schedule), published()[name, workload]
    assert found.avg_jct_s / HOUR == pytest.approx(theirs.avg_jct_h, rel=ROUNDING)
    assert found.makespan_s / HOUR == pytest.approx(theirs.makespan_h, rel=ROUNDING)
    assert found.starts_per_job == pytest.approx(theirs.starts, abs=0.001)
    assert p99_s(schedule.runs) / HOUR == pytest.approx(theirs.p99_jct_h, rel=ROUNDING)


def test_every_job_of_the_authors_srtf_starts_and_ends_when_it_did() -> None:
    case = _case("FM-1-vit-large", "srtf")
    schedule = replay(case.jobs, HARDWARE, case.policy, interval_s=case.interval_s)
    runs = {run.job_id: run for run in schedule.runs}
    rows = _per_job()
    assert runs.keys() == rows.keys()
    for job_id, (pending_s, staying_s) in rows.items():
        run = runs[job_id]
        assert run.start_s - run.submit_s == pytest.approx(pending_s, abs=1.0)
        # His seconds of training are rounded, ours are not.
        assert run.end_s - run.submit_s == pytest.approx(staying_s, abs=1.5)


def test_the_run_time_rule_holds_for_every_job() -> None:
    rule = AuthorsRule(starter_truth())
    jobs = {job.job_id: job for job in read_workload(find_workload("FM-1-vit-large"))}
    ratios = []
    for job_id, (pending_s, staying_s) in _per_job().items():
        job = jobs[job_id]
        predicted = rule.run_s(job, consolidated(job.gpus, 4))
        ratios.append(predicted / (staying_s - pending_s))
    assert len(ratios) == 160
    assert median(ratios) == pytest.approx(1.0, abs=0.01)
    assert max(abs(ratio - 1.0) for ratio in ratios) < 0.01


@pytest.mark.parametrize(("name", "within"), [("titan-published", 0.07), ("optimus", 0.13)])
def test_the_authors_elastic_policies_come_near(name: str, within: float) -> None:
    # Not the same to the last job: other optima among equals, and his tables were asked for counts
    # above 16 too. FM-2-vit, the largest, is the nearest: 2 %.
    for workload, bound in (("FM-2-vit", 0.03), ("FM-1-roberta-base", within)):
        case = _case(workload, name)
        schedule = replay(case.jobs, HARDWARE, case.policy, interval_s=case.interval_s)
        theirs = published()[case.theirs, workload]
        found = summarise(schedule)
        assert found.avg_jct_s / HOUR == pytest.approx(theirs.avg_jct_h, rel=bound)
        assert found.makespan_s / HOUR == pytest.approx(theirs.makespan_h, rel=0.02)


@pytest.mark.parametrize("workload", ["FM-1-vit-large", "FM-1-roberta-base"])
def test_ours_is_better_without_paying_with_the_tail(workload: str) -> None:
    # The two smallest; `python -m tests.bench.titan_fm` judges all eight.
    case = _case(workload, "titan")
    schedule = replay(case.jobs, HARDWARE, case.policy)
    assert seats_overlap(schedule.runs, HARDWARE) == ""
    found, theirs = summarise(schedule), published()["titan", workload]
    assert lower_bound_s(workload) < found.avg_jct_s <= 0.97 * theirs.avg_jct_h * HOUR
    assert p99_s(schedule.runs) <= theirs.p99_jct_h * HOUR
    assert found.makespan_s <= 1.02 * theirs.makespan_h * HOUR


def test_his_predictions_count_one_micro_batch_too_many() -> None:
    rule = AuthorsRule(starter_truth())
    for job in read_workload(find_workload("FM-1-vit"))[:40]:
        placement = consolidated(job.gpus, 4)
        micro = rule.split(job.model, job.batch_size, job.gpus).micro_batches
        real, told = rule.work_s(job, placement), rule.predicted_s(job, placement)
        assert real < told <= (micro + 1) / micro * real + 0.5
        assert told == round(told)
    by_id = {job.job_id: job for job in jobs_as_published("FM-1-vit")}
    one = by_id[job.job_id]
    assert one.candidates[0].remaining_s.value == one.start_up_s + told
    assert one.true_run_s[job.gpus] == one.start_up_s + real


def test_the_batch_is_cut_to_whole_samples_per_gpu() -> None:
    rule = AuthorsRule(starter_truth())
    split = rule.split("vit", 1000, 1)
    # 1000 samples need four micro-batches of at most 256; the rest of the division is cut off.
    assert (split.local_batch, split.micro_batches) == (250, 4)
    split = rule.split("vit", 1023, 4)
    assert (split.local_batch, split.micro_batches) == (255, 1)
    assert rule.split("roberta-base", 16, 16).local_batch == 2  # the smallest that was measured


def test_a_published_policy_may_use_every_measured_count() -> None:
    counts = {tuple(sorted(job.true_run_s)) for job in jobs_any_count("FM-1-vit-large")}
    assert counts == {tuple(range(1, 17))}


def _per_job() -> dict[str, tuple[float, float]]:
    with Path(PER_JOB).open(newline="", encoding="utf-8") as file:
        return {
            row["job_id"]: (float(row["pending_s"]), float(row["staying_s"]))
            for row in csv.DictReader(file)
        }

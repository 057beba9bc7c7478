"""The data that come with the package, and the author's run times that they reproduce."""

from __future__ import annotations

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.policy.backfill import Backfill
from slurm_ext.sim.engine import Hardware, replay
from slurm_ext.sim.jobs import Rules, build_jobs
from slurm_ext.sim.library import find_workload, starter_truth, workload_names
from slurm_ext.sim.metrics import measure, outcomes_of
from slurm_ext.sim.workload import read_workload


def test_every_workload_can_be_read_and_has_true_times() -> None:
    assert "FM-1-vit-large" in workload_names()
    truth = starter_truth()
    for name in workload_names():
        jobs = read_workload(find_workload(name))
        assert len(build_jobs(jobs, truth, Hardware(), Rules())) == len(jobs) > 100


def test_unknown_workload_lists_the_names() -> None:
    with pytest.raises(DataError, match="FM-1-vit-large"):
        find_workload("FM-3-gpt")


def test_known_average_of_an_ideal_easy_replay() -> None:
    # 0.727 h is known from an independent implementation of the same rule.
    hardware = Hardware(pooled=True)
    jobs = build_jobs(
        read_workload(find_workload("FM-1-vit-large")), starter_truth(), hardware, Rules()
    )
    found = measure(outcomes_of(replay(jobs, hardware, Backfill()).runs), hardware.gpus)
    assert found.avg_jct_s / 3600 == pytest.approx(0.727, abs=0.001)

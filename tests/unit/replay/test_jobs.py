"""Jobs in compressed time: numbers, the script, and the body of the script run for real."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.replay.jobs import (
    BODY,
    ROOT,
    ReplayJob,
    compress,
    directives,
    limit_minutes,
    script,
    truth_file,
)
from ci.replay.options import Variant
from ci.replay.records import parse_stamps
from slurm_ext.domain.options import BY_NAME
from slurm_ext.sim.engine import SimJob
from slurm_ext.sim.workload import WorkloadJob

WORK = WorkloadJob("vit-large@food#1", 120.0, "vit-large", "food", 8, 192, 66283.4)
JOB = ReplayJob("ft-7", WORK, 2.0, 2, 3, {1: 0.2, 8: 0.01}, 60.0)


def test_compress_divides_every_time_by_the_scale() -> None:
    first = WorkloadJob("a", 60.0, "m", "t", 1, 48, 100.0)
    second = WorkloadJob("b", 120.0, "m", "t", 8, 48, 100.0)
    truth = [
        SimJob("a", 60, 1, 5400, (), {1: 3600.0, 2: 1800.0}, 3000.0),
        SimJob("b", 120, 8, 7201 * 60, (), {8: 288060.0}, 200000.0),
    ]
    short, long = compress([first, second], truth, scale=60, gpus_per_node=4)
    assert short.arrives_s == 0
    assert long.arrives_s == 1
    assert short.sleep_s == {1: 60.0, 2: 30.0}
    assert (short.limit_min, long.limit_min) == (2, 121)
    assert (short.nodes, long.nodes) == (1, 2)
    # The yardstick of slowdown stays in workload seconds.
    assert short.error_free_s == 3000.0


@given(st.floats(0.001, 1e6))
def test_limit_is_never_shorter_than_asked_and_less_than_a_minute_longer(seconds: float) -> None:
    minutes = limit_minutes(seconds)
    assert minutes * 60 >= seconds - 1e-3
    assert minutes == 1 or minutes * 60 - seconds < 60


def test_plain_scripts_need_no_plugin() -> None:
    assert "--ft-" not in script(JOB, Variant.PLAIN)


def test_ordered_jobs_keep_the_count_that_they_asked_for() -> None:
    assert not any(line.startswith("--ft-gpus") for line in directives(JOB, Variant.ORDER))
    assert "--ft-gpus=auto" in directives(JOB, Variant.FULL)


@pytest.mark.parametrize("variant", [Variant.ORDER, Variant.FULL])
def test_every_directive_is_an_option_of_the_product(variant: Variant) -> None:
    names = [line.removeprefix("--ft-").partition("=")[0] for line in directives(JOB, variant)]
    assert set(names) <= set(BY_NAME)
    assert len(names) == len(set(names))


def test_script_asks_for_one_rank_per_gpu_on_the_fewest_nodes() -> None:
    lines = script(JOB, Variant.FULL).splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("--nodes=2", "--ntasks=8", "--gpus-per-task=1", "--time=3", "--ft-samples=66283"):
        assert f"#SBATCH {line}" in lines


GRANTED = {
    "SLURM_JOB_NAME": "ft-7",
    "SLURM_JOB_ID": "41",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "SLURM_JOB_NODELIST": "n[3-4]",
}


def run_body(folder: Path, **change: str) -> tuple[int, str]:
    """The body with its folder moved here: exit code and what it stamped."""
    for name in ("truth", "stamps"):
        (folder / name).mkdir()
    (folder / "truth" / "ft-7").write_text(truth_file(JOB))
    environment = {"PATH": os.environ["PATH"], **GRANTED, **change}
    done = subprocess.run(
        ["bash", "-c", BODY.replace(ROOT, str(folder))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    stamp = folder / "stamps" / "ft-7"
    return done.returncode, stamp.read_text() if stamp.exists() else done.stderr


def test_body_runs_for_the_time_of_the_granted_count(tmp_path: Path) -> None:
    code, text = run_body(tmp_path)
    assert code == 0
    (attempt,) = parse_stamps(text, "ft-7")
    assert attempt.seats == {"n3": 4, "n4": 4}
    assert attempt.end_s is not None
    assert attempt.end_s - attempt.start_s >= 0.01


def test_body_takes_the_count_from_the_grant_not_from_the_request(tmp_path: Path) -> None:
    code, text = run_body(
        tmp_path,
        SLURM_NTASKS="1",
        SLURM_TASKS_PER_NODE="1",
        SLURM_GPUS_ON_NODE="1",
        CUDA_VISIBLE_DEVICES="2",
        SLURM_JOB_NODELIST="n5",
        SLURM_RESTART_COUNT="1",
    )
    assert code == 0
    (attempt,) = parse_stamps(text, "ft-7")
    assert (attempt.gpus, attempt.restart) == (1, 1)
    assert attempt.end_s is not None
    assert attempt.end_s - attempt.start_s >= 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "4"},
        {"SLURM_GPUS_ON_NODE": "2"},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"SLURM_TASKS_PER_NODE": "4,3"},
        {"SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"},  # no run time is known for 4
    ],
)
def test_environment_that_does_not_fit_the_grant_ends_the_job(
    tmp_path: Path, change: dict[str, str]
) -> None:
    code, text = run_body(tmp_path, **change)
    assert code == 3
    assert text.startswith("unfit ")
    assert "end" not in text.split()


def test_truth_file_rounds_to_a_tenth_of_a_millisecond() -> None:
    rows = [line.split() for line in truth_file(JOB).splitlines()]
    assert [int(count) for count, _ in rows] == [1, 8]
    assert math.isclose(float(rows[1][1]), 0.01)

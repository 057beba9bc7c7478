"""``slurm-ext table profile`` as a job of a real Slurm: steps in one allocation, then rows."""

from __future__ import annotations

import io
import shlex

import pytest

from ci.cluster import Cluster
from slurm_ext.cli.measure import StepLauncher
from slurm_ext.estimate.csvtext import parse
from slurm_ext.estimate.trials import Trial
from tests.cluster import ft

ENVIRONMENT = ("USE_LIBUV=0", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1")


@pytest.mark.timeout(300)
def test_a_profile_job_measures_each_count_in_one_allocation(ranks: Cluster, desk: ft.Desk) -> None:
    words = ["python3", "-m", "slurm_ext.cli.main", "table", "profile", "--model=small", "-G1,3"]
    words += ["--gpus-per-node=2", "-b2", "--steps=8", "--warmup=2", "--limit=100"]
    words += ["--trainer=--threads=1 --dim=16 --depth=2 --image=8", "--gpu-type=fake"]
    words += ["--output=rows.csv"]
    line = f"cd {ft.HOME} && env {shlex.join(ENVIRONMENT)} {shlex.join(words)}"
    said = ranks.exec(["bash", "-c", line], user="alice").stdout
    assert said.startswith("job "), said
    number = int(said.split()[1])
    desk.made.append(number)
    job = ft.Job(ranks, number, "")
    job.wait(lambda: job.state in ("COMPLETED", "FAILED", "TIMEOUT"), 240, "end")
    output = ranks.get(f"{ft.HOME}/profile-small-{number}.out").decode()
    assert job.state == "COMPLETED", output
    assert job.restarts == 0
    assert "4 allocated" in output
    rows = parse(io.StringIO(ranks.get(f"{ft.HOME}/rows.csv").decode()), "rows.csv")
    assert not rows.errors
    found = {row.key.placement: row for row in rows.measurements}
    assert sorted(found) == [(1,), (2, 1)]
    assert all(row.throughput > 0 and row.key.gpu_type == "fake" for row in found.values())
    assert found[2, 1].key.global_batch == 6


@pytest.mark.timeout(120)
def test_a_step_stands_where_its_row_says(ranks: Cluster, desk: ft.Desk) -> None:
    """Whole nodes first: Slurm by itself would spread three of four ranks otherwise."""
    argv = StepLauncher().argv(Trial(4, (3, 1), 1))
    srun = argv[: next(i for i, word in enumerate(argv) if not word.startswith(("srun", "--")))]
    script = f"#!/bin/bash\n{shlex.join(srun)} printenv SLURMD_NODENAME\n"
    shape = ("--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--gpus-per-task=1", "--time=2")
    number = ranks.sbatch(script, *shape)
    desk.made.append(number)
    job = ft.Job(ranks, number, "")
    job.assert_completed()
    nodes = job.output().split()
    assert sorted(nodes.count(node) for node in set(nodes)) == [1, 3], job.output()

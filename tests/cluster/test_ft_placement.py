"""Whether ft-run numbers the ranks does not hang on where Slurm places the tasks."""

from __future__ import annotations

import pytest

from ci.cluster import Cluster

SCRIPT = """#!/bin/bash
srun ft-run -- sh -c 'echo "rank=$RANK size=$WORLD_SIZE in=$ENVIRONMENT"'
"""
ENDS = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    """The shared cluster with the product in it."""
    cluster.install_product()
    return cluster


def printed(cluster: Cluster, *options: str) -> str:
    """What a job of two tasks prints; its messages too."""
    job = cluster.sbatch(SCRIPT, "--time=5", *options)
    state = cluster.wait_state(job, *ENDS, limit_s=60)["JobState"]
    said = cluster.get(f"/home/alice/slurm-{job}.out").decode()
    assert state == "COMPLETED", said
    return said


@pytest.mark.timeout(240)
def test_tasks_with_gpus_of_their_own_have_ranks_on_one_node_and_on_two(
    installed: Cluster,
) -> None:
    for nodes in ("--nodes=1", "--nodes=2"):
        said = printed(installed, nodes, "--ntasks=2", "--gpus-per-task=2")
        for rank in (0, 1):
            assert f"rank={rank} size=2 in=BATCH" in said
        assert "launcher" not in said
        assert said.count("--open-mode=append") == 1
    said = printed(installed, "--nodes=2", "--gres=gpu:2")
    assert said.count("rank= size= in=BATCH") == 2
    assert said.count("one task stands on each node, with 2 GPUs") == 1
    for gpus in ("--gres=gpu:2", "--gpus-per-task=2"):
        said = printed(installed, "--nodes=2", "--ntasks-per-node=1", gpus)
        assert said.count("rank= size=") == 2
        assert said.count("--ntasks-per-node=1 was asked for, with 2 GPUs") == 1


def test_srun_at_a_terminal_has_no_output_file_to_keep(installed: Cluster) -> None:
    done = installed.exec(["srun", "-n1", "ft-run", "--", "true"], user="alice")
    assert done.stderr == ""

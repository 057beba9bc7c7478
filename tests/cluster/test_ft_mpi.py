"""A job whose ranks are MPI's, started by `srun --mpi=pmix`, without torch."""

from __future__ import annotations

import pytest

from ci.cluster import Cluster
from tests.cluster import ft

STEPS = 60


@pytest.mark.usefixtures("pmix")
@pytest.mark.timeout(180)
def test_mpi_ranks_leave_together_and_come_back(ranks: Cluster, desk: ft.Desk) -> None:
    """One rank of three hears the signal (sig-one-rank); the session agrees over MPI."""
    job = desk.submit(
        "mpi",
        f"ft_loop.py --mpi --steps {STEPS} --step-s 0.3 --hurry",
        "-N2",
        "-n3",
        "--nodelist=n1,n3",
        srun="--mpi=pmix",
    )
    job.wait_step(4)
    argv = ["pgrep", "-u", "alice", "-f", f"^python3 .*{job.log_path}"]
    victim = ranks.exec(argv, container="c2").stdout.split()[-1]
    ranks.exec(["kill", "-USR2", victim], container="c2")
    job.wait_restarts(1)
    job.assert_completed()
    log = job.log()
    assert {row["ranks"] for row in log} == {3}
    assert (log[-1]["step"], log[-1]["sum"]) == (STEPS, STEPS * (STEPS + 1) // 2)
    first, second = job.attempts()
    assert second.restored_step == first.saved_step == job.last_step(0)
    assert first.ranks == 3


@pytest.mark.usefixtures("pmix")
@pytest.mark.timeout(180)
def test_two_nodes_of_one_container_start_mpi_steps_without_fail(ranks: Cluster) -> None:
    """Each node has a TmpFS of its own: with a shared one a fifth of such steps failed to start."""
    script = "\n".join(
        (
            "#!/bin/bash",
            "for step in $(seq 1 40); do",
            "    srun --mpi=pmix true || exit 1",
            "done",
        )
    )
    job = ranks.sbatch(script, "-N2", "-n4", "--nodelist=n1,n2", "-t5")
    ranks.wait(lambda: ranks.job(job)["JobState"] not in {"PENDING", "RUNNING"}, 120, "40 steps")
    assert ranks.job(job)["JobState"] == "COMPLETED"

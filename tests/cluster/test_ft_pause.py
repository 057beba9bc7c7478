"""Pausing real jobs by the command line: longer than the time-out, then as if nothing was."""

from __future__ import annotations

import time

import pytest

from ci.cluster import Cluster
from tests.cluster import ft

TIMEOUT_S = 12


def held(job: ft.Job, seconds: float) -> None:
    """The job does no step for this long."""
    before = job.last_step(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert job.last_step(0) == before
        time.sleep(1.0)


def command(cluster: Cluster, *argv: str) -> str:
    """slurm-ext as the job's user, on the login node."""
    return cluster.exec(["slurm-ext", *argv], user="alice").stdout


@pytest.mark.timeout(300)
def test_paused_for_longer_than_the_collective_timeout(ranks: Cluster, desk: ft.Desk) -> None:
    """watchdog: four ranks on two nodes; the loss curve is that of the undisturbed job."""
    steps = 40
    calm = desk.submit("calm", f"ft_train.py --noise --steps {steps}", "-N2", "-n4")
    calm.assert_completed()
    wanted = ft.losses(calm.log())
    job = desk.submit(
        "paused",
        f"ft_train.py --noise --step-s 0.4 --steps {steps}",
        "-N2",
        "-n4",
        ft_run=f"--collective-timeout={TIMEOUT_S}",
    )
    job.wait_step(5)
    said = command(ranks, "pause", str(job.id), "--for=5m", "--release=memory", "--timeout=20s")
    assert "all ranks are paused" in said
    held(job, TIMEOUT_S * 1.5)
    assert "all ranks go on" in command(ranks, "resume", str(job.id))
    job.assert_completed(120)
    assert job.restarts == 0
    assert ft.losses(job.log()) == wanted


@pytest.mark.timeout(300)
def test_another_user_can_neither_pause_nor_resume(ranks: Cluster, desk: ft.Desk) -> None:
    job = desk.submit("mine", "ft_train.py --step-s 0.3 --steps 60", "-N2", "-n2")
    job.wait_step(3)
    for verb in ("pause", "resume"):
        done = ranks.exec(["slurm-ext", verb, str(job.id)], user="bob", check=False)
        assert done.rc == 1
    # The key is nobody else's to read.
    state = f"{ft.HOME}/.slurm-ext/state"
    done = ranks.exec(["sh", "-c", f"cat {state}/*-{job.id}/pause-0.key"], user="bob", check=False)
    assert done.rc != 0
    job.assert_completed(120)
    assert job.restarts == 0


@pytest.mark.timeout(300)
def test_gpus_given_back_and_resumed(ranks: Cluster, desk: ft.Desk) -> None:
    """The last rung: saved, requeued, kept from starting, then let go on."""
    steps = 60
    job = desk.submit(
        "given-back", f"ft_train.py --noise --hurry --step-s 0.4 --steps {steps}", "-N2", "-n2"
    )
    job.wait_step(5)
    said = command(ranks, "pause", str(job.id), "--for=1h", "--release=job", "--timeout=20s")
    assert "requeued" in said
    assert job.state == "PENDING"
    time.sleep(ft.CRED_EXPIRE_S + 3)
    assert job.state == "PENDING"
    assert "may start" in command(ranks, "resume", str(job.id))
    job.assert_completed(120)
    assert job.restarts == 1
    first, second = job.attempts()
    assert second.restored_step == first.saved_step


@pytest.mark.timeout(300)
def test_an_mpi_job_is_paused(ranks: Cluster, desk: ft.Desk) -> None:
    """Ranks agree over MPI, and no torch is anywhere; every step is done once."""
    steps = 60
    job = desk.submit(
        "mpi-paused",
        f"ft_loop.py --mpi --steps {steps} --step-s 0.2",
        "-N2",
        "-n4",
        srun="--mpi=pmix",
        ft_run=f"--collective-timeout={TIMEOUT_S}",
    )
    job.wait_step(5)
    said = command(ranks, "pause", str(job.id), "--for=5m", "--release=nothing", "--timeout=20s")
    assert "all ranks are paused" in said
    held(job, TIMEOUT_S * 1.5)
    assert "all ranks go on" in command(ranks, "resume", str(job.id))
    job.assert_completed(120)
    assert job.restarts == 0
    log = job.log()
    assert [row["step"] for row in log] == list(range(1, steps + 1))
    assert log[-1]["sum"] == steps * (steps + 1) // 2


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_node_cut_off_while_paused_sends_the_job_back(ranks: Cluster, desk: ft.Desk) -> None:
    """Its ranks can read no decision any more; the job comes back and ends with the same curve."""
    steps = 40
    calm = desk.submit("calm-cut", f"ft_train.py --noise --steps {steps}", "-N2", "-n2")
    calm.assert_completed()
    wanted = ft.losses(calm.log())
    # So that the job is on both containers at first, and on the one that is left afterwards.
    blocker = ranks.sbatch("#!/bin/bash\nsleep 600\n", "--nodelist=n2", "--exclusive")
    desk.made.append(blocker)
    ranks.wait(lambda: ranks.job(blocker)["JobState"] == "RUNNING", 30, "job on n2")
    job = desk.submit(
        "cut",
        f"ft_train.py --noise --hurry --step-s 0.4 --steps {steps}",
        "-N2",
        "-n2",
        "--exclude=n4",
        ft_run=f"--collective-timeout={TIMEOUT_S}",
    )
    job.wait_step(5)
    said = command(ranks, "pause", str(job.id), "--for=5m", "--release=nothing", "--timeout=20s")
    assert "all ranks are paused" in said
    ranks.cut_off("c2")
    try:
        desk.cancel(blocker)
        job.wait_restarts(1, 120)
        job.assert_completed(180)
    finally:
        ranks.reconnect("c2")
    assert "undecided" in job.output() or "node fail" in job.output().lower()
    found = ft.losses(job.log())
    assert found == wanted


@pytest.mark.timeout(300)
def test_suspended_by_slurm_for_longer_than_the_timeout(ranks: Cluster, desk: ft.Desk) -> None:
    """SIGTSTP, two seconds, SIGSTOP: by then all ranks are at a safe point."""
    steps = 40
    calm = desk.submit("calm-suspend", f"ft_train.py --noise --steps {steps}", "-N2", "-n4")
    calm.assert_completed()
    wanted = ft.losses(calm.log())
    job = desk.submit(
        "suspended",
        f"ft_train.py --noise --step-s 0.3 --steps {steps}",
        "-N2",
        "-n4",
        ft_run=f"--collective-timeout={TIMEOUT_S}",
    )
    job.wait_step(5)
    ranks.exec(["scontrol", "suspend", str(job.id)])
    job.wait(lambda: job.state == "SUSPENDED", 20, "suspension")
    time.sleep(3.0)
    held(job, TIMEOUT_S * 1.5)
    ranks.exec(["scontrol", "resume", str(job.id)])
    job.assert_completed(120)
    assert job.restarts == 0
    assert ft.losses(job.log()) == wanted
    assert "all ranks were at a safe point" in job.output()

"""ft-run itself dies, or one rank cannot start: who requeues, and who is not kept waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft
from tests.cluster.daemon import CONFIG, Daemon
from tests.cluster.test_ft_causes import pids

STEPS = 60
TRAIN = f"ft_train.py --hurry --step-s 0.3 --steps {STEPS}"
# The step's nodes: ranks 0 and 1 on n1, rank 2 on n3, which is another machine.
SPREAD = ("-N2", "-n3", "--nodelist=n1,n3", "--gpus-per-task=1")
OFTEN = "--checkpoint-interval=1"


def ft_run_of(cluster: Cluster, job: ft.Job, rank: int, container: str) -> str:
    """Process id of a rank's ft-run: the parent of its program."""
    for child in pids(cluster, container, f"^python3 .*{job.log_path}"):
        words = cluster.exec(["cat", f"/proc/{child}/environ"], container=container).stdout
        if f"SLURM_PROCID={rank}" in words.split("\0"):
            return cluster.exec(["ps", "-o", "ppid=", "-p", child], container=container).stdout
    raise AssertionError(f"rank {rank} of job {job.id} runs no program in {container}")


def kill_ft_run(cluster: Cluster, job: ft.Job, rank: int = 0, container: str = "c1") -> None:
    parent = ft_run_of(cluster, job, rank, container).strip()
    command = cluster.exec(["cat", f"/proc/{parent}/cmdline"], container=container).stdout
    assert "ft-run" in command, command
    cluster.exec(["kill", "-KILL", parent], container=container)


@pytest.mark.timeout(400)
def test_rank_0_s_ft_run_is_killed_and_another_one_requeues_once(
    ranks: Cluster, desk: ft.Desk
) -> None:
    job = desk.submit("leaderless", TRAIN, *SPREAD, ft_run=OFTEN)
    job.wait_step(12, limit_s=120)
    kill_ft_run(ranks, job)
    job.wait_restarts(1, 90)
    job.assert_completed(90)
    assert job.restarts == 1, job.output()
    first, second = job.attempts()
    assert (first.cause, first.requeued) == (Cause.LOST_PEER, True), job.output()
    assert "the ft-run of rank 0 is gone, and rank 1 takes its place" in first.reason
    assert job.output().count("takes its place; job") == 1, job.output()
    assert second.restored_step
    assert job.log()[-1]["step"] == STEPS
    # Of torch 2.6 about itself, in every rank's first save.
    assert "TypedStorage" not in job.output()


@pytest.mark.timeout(400)
def test_a_step_that_slurm_kills_whole_is_requeued_by_the_batch_script(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Under --kill-on-bad-exit all ft-runs die some seconds after the first one."""
    job = desk.submit(
        "whole-step",
        TRAIN,
        *SPREAD,
        srun="--kill-on-bad-exit",
        ft_run=OFTEN,
        after="ft-run --after=$code",
    )
    job.wait_step(12, limit_s=120)
    kill_ft_run(ranks, job)
    job.wait_restarts(1, 60)
    job.assert_completed(90)
    assert job.restarts == 1, job.output()
    first = job.attempts()[0]
    assert (first.cause, first.requeued) == (Cause.LOST_PEER, True), job.output()
    assert "no ft-run of its step is left" in first.reason
    assert job.attempts()[1].restored_step
    assert job.output().count("no ft-run of its step is left; job") == 1, job.output()


@pytest.mark.usefixtures("pmix")
@pytest.mark.timeout(400)
def test_an_mpi_step_that_loses_an_ft_run_comes_back(ranks: Cluster, desk: ft.Desk) -> None:
    """MPI ends all ranks of a step that lost one, and their ft-runs with them."""
    job = desk.submit(
        "mpi-loses",
        f"ft_loop.py --mpi --steps {STEPS} --step-s 0.3 --hurry",
        *SPREAD[:3],
        srun="--mpi=pmix",
        ft_run=OFTEN,
        after="ft-run --after=$code",
    )
    job.wait_step(12, limit_s=120)
    kill_ft_run(ranks, job, 2, "c2")
    job.wait_restarts(1, 90)
    job.assert_completed(90)
    assert job.restarts == 1, job.output()
    first, second = job.attempts()
    assert (first.cause, first.requeued) == (Cause.LOST_PEER, True), job.output()
    assert second.restored_step


@pytest.fixture
def daemon(ranks: Cluster) -> Iterator[Daemon]:
    found = Daemon(ranks)
    yield found
    found.stop("KILL")


@pytest.mark.timeout(400)
def test_a_job_that_its_owner_paused_is_told_as_such(
    ranks: Cluster, desk: ft.Desk, daemon: Daemon
) -> None:
    """Not as a start that was put off by somebody else, and not let go by the daemon."""
    daemon.prepare(cycle_s=1, partitions={"main": {"act": ["order", "lease"]}})
    daemon.start()
    job = desk.submit(
        "paused",
        "ft_loop.py --steps 400 --step-s 0.2",
        "-n1",
        "--gpus-per-task=1",
        "--ft-model=vit-large",
    )
    job.wait_step(5)
    number = str(job.id)
    argv = ["slurm-ext", "pause", number, "--for=1h", "--release=job", f"--config={CONFIG}"]
    assert "requeued" in ranks.exec(argv, user="alice").stdout
    words = ""

    def told() -> bool:
        nonlocal words
        daemon.wait_cycles(1)
        argv = ["slurm-ext", "queue", "-h", "-j", number, "-o", "%R", f"--config={CONFIG}"]
        words = ranks.exec(argv, user="alice").stdout
        return "alice paused it until" in words

    ranks.wait(told, 30, "the pause in the queue")
    assert "not by the daemon" not in words
    explained = ranks.exec(
        ["slurm-ext", "explain", number, f"--config={CONFIG}"], user="alice"
    ).stdout
    assert "alice paused it until" in explained
    assert "paused by alice for 3600 s" in explained
    daemon.wait_cycles(3)
    assert job.state == "PENDING"
    ranks.exec(["slurm-ext", "resume", number, f"--config={CONFIG}"], user="alice")
    job.wait_step(6, attempt=1)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_step_that_a_node_does_not_take_is_requeued_by_the_batch_script(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Its slurmd dies before srun begins: rank 0's program is killed while it waits for others."""
    go = f"{ft.HOME}/unlaunched-go"
    ranks.exec(["rm", "-f", go])
    job = desk.submit(
        "unlaunched",
        TRAIN,
        "-N2",
        "-n2",
        "--nodelist=n1,n3",
        before=f"until [ -e {go} ]; do sleep 0.2; done",
        after="ft-run --after=$code",
    )
    job.wait(lambda: job.marks("begin"), 60, "batch script")
    (slurmd,) = ranks.exec(["pgrep", "-f", "^slurmd -N n3"], container="c2").stdout.split()
    ranks.exec(["kill", "-KILL", slurmd], container="c2")
    try:
        ranks.exec(["touch", go], user="alice")
        job.wait_restarts(1, 120)
    finally:
        ranks.exec(["slurmd", "-N", "n3"], container="c2")
        ranks.exec(["scontrol", "update", "NodeName=n3", "State=RESUME"], check=False)
    job.assert_completed(120)
    first = job.attempts()[0]
    assert (first.cause, first.requeued) == (Cause.LOST_PEER, True), job.output()
    assert "a node did not answer" in first.reason


@pytest.mark.timeout(120)
def test_the_batch_script_requeues_no_error_of_the_program(ranks: Cluster, desk: ft.Desk) -> None:
    job = desk.submit(
        "wrong-whole",
        "ft_loop.py --steps 20 --step-s 0.01 --fail-at 7",
        after="ft-run --after=$code",
    )
    assert job.wait_end() == "FAILED"
    facts = job.facts()
    assert (facts["ExitCode"], facts["Restarts"]) == ("3:0", "0"), job.output()
    (attempt,) = job.attempts()
    assert (attempt.cause, attempt.requeued) == (Cause.USER_ERROR, False)


@pytest.mark.timeout(120)
def test_a_program_that_is_missing_on_one_node_ends_all_ranks(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """The others would wait for its rendezvous for a quarter of an hour."""
    ranks.exec(["ln", "-sf", "/usr/bin/python3", "/opt/ft/python-here"], container="c1")
    job = desk.submit("half", TRAIN, *SPREAD, python="/opt/ft/python-here")
    job.wait(lambda: job.state == "RUNNING", 30, "start")
    begun = time.monotonic()
    assert job.wait_end(60) == "FAILED"
    assert time.monotonic() - begun < 30
    facts = job.facts()
    assert (facts["ExitCode"], facts["Restarts"]) == ("127:0", "0"), job.output()
    told = [line for line in job.output().splitlines() if line.startswith("ft-run:")]
    assert [line for line in told if "the other ranks are ended" in line] == [
        "ft-run: rank 2 on n3 could not start: /opt/ft/python-here: No such file or directory;"
        " the other ranks are ended"
    ], job.output()
    (attempt,) = job.attempts()
    assert (attempt.cause, attempt.exit_code) == (Cause.USER_ERROR, 127)
    assert "rank 2 on n3" in attempt.reason

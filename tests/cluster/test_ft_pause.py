"""Pausing real jobs by the command line: longer than the time-out, then as if nothing was."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ci.cluster import DAEMON_USER, Cluster, ClusterTimeoutError
from ci.cluster.engine import Completed
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft
from tests.cluster.daemon import CONFIG, LOG, SPOOL, Daemon

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
    key = ["sh", "-c", f"cat {ft.HOME}/.slurm-ext/state/*-{job.id}/pause-{job.id}-0.*key"]
    assert '"key"' in ranks.exec(key, user="alice").stdout
    assert ranks.exec(key, user="bob", check=False).rc != 0
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
    assert (first.cause, first.reason) == (Cause.OPERATOR, "paused by alice for 3600 s")


@pytest.mark.usefixtures("pmix")
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


@pytest.fixture
def daemon(ranks: Cluster) -> Iterator[Daemon]:
    """A daemon beside the jobs; each test starts it with its own configuration."""
    found = Daemon(ranks)
    yield found
    found.stop("KILL")
    ranks.exec(["scontrol", "update", "NodeName=n3,n4", "State=RESUME"], check=False)


def as_user(cluster: Cluster, user: str, *argv: str) -> Completed:
    """slurm-ext as anybody, with the daemon's configuration."""
    return cluster.exec(["slurm-ext", *argv, f"--config={CONFIG}"], user=user, check=False)


@pytest.mark.timeout(400)
def test_an_operator_pauses_and_another_user_does_not(
    ranks: Cluster, desk: ft.Desk, daemon: Daemon
) -> None:
    """Real munge on every way: operator by the daemon, the daemon's user itself, forged ones."""
    daemon.prepare(partitions={})
    daemon.start()
    daemon.wait_cycles(1)
    job = desk.submit("operated", "ft_train.py --step-s 0.3 --steps 150", "-N2", "-n2")
    number = str(job.id)
    job.wait_step(3)

    for verb in ("pause", "resume"):
        done = as_user(ranks, "bob", verb, number)
        assert done.rc == 1
        assert "operators of Slurm" in done.stderr
    # Without asking leave: a request as an operator would write it, with bob's true credential.
    forged = ranks.exec(["python3", "-c", _FORGE, SPOOL, number], user="bob")
    assert forged.rc == 0, forged.stderr
    # Nor into the daemon's part, nor over the answer.
    for place in (f"{SPOOL}/plans/x", f"{SPOOL}/{ranks.ids('alice')[0]}/x"):
        assert ranks.exec(["touch", place], user="bob", check=False).rc != 0
    daemon.wait_cycles(6)
    before = job.last_step(0)
    job.wait_step(before + 3)

    done = as_user(ranks, "admin", "pause", number, "--for=5m", "--release=nothing")
    assert "all ranks are paused" in done.stdout, f"{done.stderr}\n{job.output()}"
    assert as_user(ranks, "bob", "resume", number).rc == 1
    held(job, 4.0)
    assert "all ranks go on" in command(ranks, "resume", number)
    job.wait_step(job.last_step(0) + 2)

    # The daemon's own user needs nobody to pass anything on, and an operator may resume.
    done = as_user(ranks, DAEMON_USER, "pause", number, "--for=5m", "--release=nothing")
    assert "all ranks are paused" in done.stdout, f"{done.stderr}\n{job.output()}"
    held(job, 2.0)
    done = as_user(ranks, "admin", "resume", number)
    assert "all ranks go on" in done.stdout, done.stderr
    # A request that was obeyed lies nowhere, and a stolen one is worth nothing.
    daemon.wait_cycles(2)
    lying = ranks.exec(["sh", "-c", f"ls {SPOOL}/*/ | grep pause-ask"]).stdout.split()
    assert len(lying) == 1, "that of bob alone"
    job.assert_completed(180)
    assert job.restarts == 0
    rows = daemon.logged("asked by admin, an operator")
    assert rows == 2


# A request in bob's own part of the spool, for alice's job.
_FORGE = """
import os, sys
from pathlib import Path
from slurm_ft.pause import asking
from slurm_ext.domain.pausing import PAUSE
spool, job = Path(sys.argv[1]), sys.argv[2]
place = asking.operators_place(spool, 0, os.getuid())
asking.send(place, asking.new_ask(job, PAUSE, hold_s=600.0), lambda: None)
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_without_munge_on_its_node_a_job_obeys_its_owner_alone(
    ranks: Cluster, desk: ft.Desk, daemon: Daemon
) -> None:
    """An operator is told why, by the only one who knows; nothing is half paused."""
    daemon.prepare(partitions={})
    daemon.start()
    daemon.wait_cycles(1)
    job = desk.submit("unvouched", "ft_train.py --step-s 0.3 --steps 150", "-N1", "-n2", "-wn1")
    number = str(job.id)
    job.wait_step(3)
    ranks.exec(["pkill", "-KILL", "-x", "munged"], container="c1")
    try:
        for user in ("admin", DAEMON_USER):
            done = as_user(ranks, user, "pause", number, "--for=5m")
            assert done.rc == 1
            assert "refused: c1 cannot check who asks: credential: munge" in done.stderr
        before = job.last_step(0)
        job.wait_step(before + 2)
        done = as_user(ranks, "alice", "pause", number, "--for=5m")
        assert "all ranks are paused" in done.stdout, done.stderr
        done = as_user(ranks, "admin", "resume", number)
        assert "cannot check who asks" in done.stderr
        held(job, 2.0)
        assert "all ranks go on" in as_user(ranks, "alice", "resume", number).stdout
    finally:
        ranks.exec(["runuser", "-u", "munge", "--", "/usr/sbin/munged"], container="c1")
    # As soon as it is back, so is everything else.
    done = as_user(ranks, "admin", "pause", number, "--for=2s", "--release=nothing")
    assert "all ranks are paused" in done.stdout, done.stderr
    job.wait_step(job.last_step(0) + 1)
    assert job.restarts == 0


@pytest.mark.timeout(400)
def test_the_daemon_moves_a_job_out_of_the_way(
    ranks: Cluster, desk: ft.Desk, daemon: Daemon
) -> None:
    """Two free GPUs on each of two nodes, a job for four of one: one that allows it moves over."""
    main = {"act": ["order", "lease", "move"]}
    daemon.prepare(cycle_s=1, partitions={"main": main})
    sleeper = "#!/bin/bash\nsleep 900\n"

    # Not by other jobs, of which only the time limit is known: they may end at any moment.
    ranks.exec(["scontrol", "update", "NodeName=n3,n4", "State=DRAIN", "Reason=test"])
    whole = ranks.sbatch(sleeper, "-wn1", "--gres=gpu:4", "-phigh", "--time=20", user="bob")
    desk.made.append(whole)
    ranks.wait(lambda: ranks.job(whole)["JobState"] == "RUNNING", 30, "job on n1")

    def training(name: str, *options: str) -> ft.Job:
        options = ("-N1", "-n2", "--gpus-per-task=1", "--ft-model=vit-large", *options)
        program = "ft_train.py --noise --step-s 0.4 --steps 1000"
        return desk.submit(name, program, *options, ft_run="--checkpoint-interval=2")

    mover = training("mover", "--ft-max-pause=10")
    mover.wait_step(12)
    assert mover.facts()["NodeList"] == "n2"
    desk.cancel(whole)
    # Reports as well, so that it is known not to end at any moment; but its owner allows nothing.
    training("other", "-wn1").wait_step(12)
    waiting = ranks.sbatch(
        sleeper, "-N1", "-n4", "--gres=gpu:4", "--time=5", "--ft-model=vit-large"
    )
    desk.made.append(waiting)
    daemon.start()
    try:
        ranks.wait(lambda: ranks.job(waiting)["JobState"] == "RUNNING", 60, "the waiting job")
    except ClusterTimeoutError as exc:
        told = as_user(ranks, "alice", "explain", str(waiting)).stdout
        log = daemon.sh(f"tail -40 {LOG}; cat {SPOOL}/*/progress-*")
        raise AssertionError(f"{exc}\n{told}\n{log}\n{mover.output()}") from exc
    assert ranks.job(waiting)["NodeList"] == "n2"
    mover.wait(lambda: mover.last_step(1) > 0, 60, "second attempt")
    assert mover.facts()["NodeList"] == "n1"
    first = mover.attempts()[0]
    assert first.cause is Cause.DAEMON
    assert first.saved_step == mover.last_step(0), "no step is lost"
    assert min(row["step"] for row in mover.log() if row["attempt"] == 1) == first.saved_step + 1
    assert daemon.logged('"action": "move"') == 2
    told = ranks.exec(["slurm-ext", "explain", str(waiting), f"--config={CONFIG}"]).stdout
    assert f"job {mover.id} (2 GPUs) saves and is requeued" in told

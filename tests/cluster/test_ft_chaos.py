"""One job, sent back to the queue over and over at random moments, in every way that Slurm has.

Whatever happens, its sum of all steps is right at the end, and no attempt begins before a step
that an earlier attempt had saved. The seed is printed; FT_SEED repeats a run.
"""

from __future__ import annotations

import os
import random

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft

# A warning that the job understands, a preemption, a person's `scontrol requeue`.
WAYS = ("signal", "preempt", "requeue")
STEP_S = 0.02


@pytest.mark.parametrize(
    ("times", "program"),
    [
        (5, "ft_loop.py"),
        pytest.param(50, "ft_loop.py", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
        pytest.param(10, "ft_train.py", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)
def test_requeued_again_and_again(ranks: Cluster, desk: ft.Desk, times: int, program: str) -> None:
    seed = int(os.environ.get("FT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"FT_SEED={seed}")
    rng = random.Random(seed)
    # It must outlive all its disturbances: at most three seconds of steps between two.
    steps = times * int(4 / STEP_S)
    job = desk.submit(
        "chaos",
        f"{program} --steps {steps} --step-s {STEP_S} --hurry {times}",
        "--partition=preempt",
        "-n2" if program == "ft_train.py" else "-n1",
        "--nodelist=n3",
        "--time=30",
        ft_run="--checkpoint-interval=1",
    )
    for number in range(times):
        job.wait(lambda: job.state == "RUNNING", 60, "start")
        if rng.random() < 0.8:
            job.wait_step(1, attempt=number)
        pause_s = rng.random() * 2
        _after(ranks, pause_s)
        _disturb(ranks, desk, job, rng.choice(WAYS))
        job.wait_restarts(number + 1)
        job.wait(lambda: job.state == "PENDING", 60, "end of COMPLETING")
        _hurry(ranks, job)
    job.assert_completed(120)
    log = job.log()
    assert log[-1]["step"] == steps
    if program == "ft_loop.py":
        assert log[-1]["sum"] == steps * (steps + 1) // 2
    attempts = job.attempts()
    numbers = [attempt.number for attempt in attempts]
    # Slurm may take the end of the job for that of a preemption, and start it for nothing.
    assert numbers in (list(range(times + 1)), list(range(times + 2)))
    assert {a.cause for a in attempts[times:]} == {Cause.COMPLETED}
    saved = 0
    for attempt in attempts:
        # Left before its session began: it tells nothing.
        if attempt.restored_step is not None:
            assert attempt.restored_step >= saved, attempts
        saved = max(saved, attempt.saved_step or 0)
        assert attempt.cause is not None, attempts


def _after(cluster: Cluster, seconds: float) -> None:
    """A moment later, by the cluster's own clock."""
    cluster.exec(["sleep", f"{seconds:.3f}"])


def _disturb(cluster: Cluster, desk: ft.Desk, job: ft.Job, way: str) -> None:
    if way == "preempt":
        thief = desk.preempt("--nodelist=n3")
        cluster.wait_state(thief, "RUNNING", limit_s=ft.GRACE_S + 30)
        desk.cancel(thief)
    elif way == "signal":
        cluster.exec(["scancel", "--signal=USR2", str(job.id)], user="alice")
    else:
        cluster.exec(["scontrol", "requeue", str(job.id)], user="alice")


def _hurry(cluster: Cluster, job: ft.Job) -> None:
    """Lift most of Slurm's delay, which is not what this test is about.

    Not all of it: in the second in which an attempt ended, its node refuses the next one.
    """
    cluster.exec(["scontrol", "update", f"JobId={job.id}", "StartTime=now+2"])

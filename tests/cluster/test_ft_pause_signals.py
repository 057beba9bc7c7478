"""A paused job that is told to leave: it comes out of the pause, saves its step, and comes back.

Slurm signals every process of a step, also the one that serves the store of the pause: only a real
one shows that it is still there when the ranks need it.
"""

from __future__ import annotations

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from slurm_ft import exits
from tests.cluster import ft

STEPS = 30
# So that nobody takes the signal for the warning before the end.
LONG = "--time=3:00:00"
# Slurm looks at time limits once in a while, and warns up to a minute early.
LIMIT_S = 150.0


def paused(cluster: Cluster, desk: ft.Desk, name: str, rung: str, *options: str) -> ft.Job:
    """A job of two ranks that stands still, for much longer than these tests wait."""
    job = desk.submit(
        name, f"ft_train.py --noise --hurry --step-s 0.4 --steps {STEPS}", "-N1", "-n2", *options
    )
    job.wait_step(4)
    argv = ["slurm-ext", "pause", str(job.id), "--for=1h", f"--release={rung}", "--timeout=20s"]
    assert "all ranks are paused" in cluster.exec(argv, user="alice").stdout
    return job


def assert_nothing_lost(job: ft.Job, cause: Cause, limit_s: float = 60.0) -> None:
    """It saved where it stood, left in order, and did every step once."""
    job.wait_restarts(1, limit_s)
    job.assert_completed(120)
    # A short time limit may come once more, before the program has begun.
    first, *others = job.attempts()
    restored = next(again.restored_step for again in others if again.restored_step is not None)
    assert first.exit_code == exits.REQUEUE, job.output()
    assert (first.saved_step, restored) == (job.last_step(0), job.last_step(0))
    assert [row["step"] for row in job.log()] == list(range(1, STEPS + 1))
    assert first.cause is cause
    assert "undecided" not in job.output()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rung", ["nothing", "memory"])
def test_preempted_with_grace_while_paused(ranks: Cluster, desk: ft.Desk, rung: str) -> None:
    job = paused(ranks, desk, f"grace-{rung}", rung, "--partition=preempt", "--signal=USR2@60")
    thief = desk.preempt(f"--nodelist={job.marks('begin')[0][2]}")
    job.wait_restarts(1)
    desk.cancel(thief)
    assert_nothing_lost(job, Cause.PREEMPTED)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rung", ["nothing", "memory"])
def test_told_by_a_person_while_paused(ranks: Cluster, desk: ft.Desk, rung: str) -> None:
    job = paused(ranks, desk, f"told-{rung}", rung, LONG)
    ranks.exec(["scancel", "--signal=USR2", str(job.id)], user="alice")
    assert_nothing_lost(job, Cause.OPERATOR)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_time_limit_comes_while_paused(ranks: Cluster, desk: ft.Desk) -> None:
    job = paused(ranks, desk, "limit", "nothing", "--time=4", "--signal=USR2@150")
    assert_nothing_lost(job, Cause.TIME_LIMIT, LIMIT_S)


@pytest.mark.timeout(300)
def test_one_ft_run_is_signalled_while_paused(ranks: Cluster, desk: ft.Desk) -> None:
    """By its process id, on its node: the other rank hears of it from its peers alone."""
    job = paused(ranks, desk, "single", "nothing", LONG)
    script = (
        "for pid in $(pgrep -u alice -f 'ft-run .*-- ' ); do"
        f' tr "\\0" "\\n" < /proc/$pid/environ | grep -qx SLURM_JOB_ID={job.id} || continue;'
        ' tr "\\0" "\\n" < /proc/$pid/environ | grep -qx SLURM_PROCID=1 || continue;'
        " kill -USR2 $pid && echo $pid; done"
    )
    told = [
        pid
        for host in ranks.containers()
        for pid in ranks.exec(["bash", "-c", script], container=host).stdout.split()
    ]
    assert len(told) == 1, "which is the ft-run of rank 1?"
    assert_nothing_lost(job, Cause.OPERATOR)

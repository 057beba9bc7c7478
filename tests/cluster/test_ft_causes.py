"""Why a job under ft-run comes back, and why it does not, each on a real Slurm.

A time limit is a minute at least, so the jobs that wait for one run beside the other tests: the
fixture `limited` submits them at the beginning of the module, and the last tests look at them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Cause
from tests.cluster import ft
from tests.cluster.test_cluster_up import saved_state_holds

# Outlives a time limit of a minute, which Slurm checks every half; later attempts do not sleep.
STEPS = 600
LOOP = f"ft_loop.py --steps {STEPS} --step-s 0.25 --hurry"
# Where jobs with a time limit are, and nothing that a test kills.
QUIET = "--nodelist=n1"


def pids(cluster: Cluster, container: str, pattern: str) -> list[str]:
    """Processes of alice's in a node container, by their command line."""
    argv = ["pgrep", "-u", "alice", "-f", pattern]
    return cluster.exec(argv, container=container, check=False).stdout.split()


def assert_nothing_lost(job: ft.Job, steps: int = STEPS) -> None:
    """The sum of all steps is right, and no attempt but the first began at nought."""
    log = job.log()
    assert (log[-1]["step"], log[-1]["sum"]) == (steps, steps * (steps + 1) // 2)
    starts = {row["attempt"]: row["step"] for row in reversed(log)}
    assert len(starts) > 1
    assert all(step > 1 for attempt, step in starts.items() if attempt), starts


@pytest.fixture(scope="module", autouse=True)
def limited(ranks: Cluster) -> Iterator[dict[str, ft.Job]]:
    """Jobs that meet their time limit while the other tests run."""
    desk = ft.Desk(ranks)
    yield {
        "warned": desk.submit("warned", LOOP, QUIET, "--time=1", "--signal=USR2@10"),
        "term": desk.submit("term", LOOP, QUIET, "--time=1"),
    }
    desk.cancel()


# -- no requeue ------------------------------------------------------------------------------------


def test_an_error_of_the_program_ends_the_job_with_its_own_code(desk: ft.Desk) -> None:
    job = desk.submit("wrong", "ft_loop.py --steps 20 --step-s 0.01 --fail-at 7")
    assert job.wait_end() == "FAILED"
    facts = job.facts()
    assert (facts["ExitCode"], facts["Restarts"]) == ("3:0", "0"), job.output()
    (attempt,) = job.attempts()
    assert (attempt.cause, attempt.exit_code) == (Cause.USER_ERROR, 3)
    assert not attempt.requeued
    assert attempt.reason


def test_a_cancelled_job_does_not_come_back(ranks: Cluster, desk: ft.Desk) -> None:
    """SIGTERM of scancel looks like that of a preemption; Slurm's record tells them apart."""
    job = desk.submit("cancelled", LOOP)
    job.wait_step(2)
    ranks.exec(["scancel", str(job.id)], user="alice")
    assert job.wait_end(30) == "CANCELLED"
    assert job.restarts == 0
    ranks.wait(lambda: not pids(ranks, "c1", job.log_path), 10, "end of its processes")
    (attempt,) = job.attempts()
    assert attempt.cause in (Cause.CANCELLED, None), attempt
    assert not attempt.requeued


def test_a_program_that_ends_well_while_it_is_preempted_is_not_run_again(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Slurm requeues whatever ends within the grace, also with exit code 0."""
    job = desk.submit("deaf", "ft_deaf.py 4", "--partition=preempt", "--nodelist=n4")
    job.wait_step(1)
    thief = desk.preempt("--nodelist=n4")
    job.wait_restarts(1)
    desk.cancel(thief)
    job.assert_completed()
    assert len(job.log()) == 1, job.output()
    assert [attempt.cause for attempt in job.attempts()] == [Cause.COMPLETED, Cause.COMPLETED]
    assert "ended well in attempt 0" in job.output()


def test_a_preemption_without_grace_is_told_as_one_and_spares_the_hook(
    ranks: Cluster, desk: ft.Desk
) -> None:
    """Slurm requeues at once and signals the hook, too; the accounting alone tells the cause."""
    saved = f"{ft.HOME}/saved-without-grace"
    hook = f"--on-preempt='sleep 1; touch {saved}'"
    job = desk.submit(
        "abrupt", "ft_deaf.py 600", "--partition=abrupt", "--nodelist=n4", ft_run=hook
    )
    job.wait_step(1)
    thief = desk.preempt("--nodelist=n4")
    ranks.wait(lambda: "it was preempted" in job.output(), 20, "the accounting's word")
    (attempt,) = job.attempts()
    assert (attempt.cause, attempt.requeued) == (Cause.PREEMPTED, True), job.output()
    assert "Slurm preempted the job" in attempt.reason
    assert ranks.exec(["test", "-e", saved], check=False).rc == 0, job.output()
    assert "--on-preempt ended with" not in job.output()
    desk.cancel(job.id, thief)


# -- requeue ---------------------------------------------------------------------------------------


def test_sig_array_a_task_requeues_itself_only(ranks: Cluster, desk: ft.Desk) -> None:
    """sig-array: the id that a task has in its environment may be that of the whole array."""
    array = desk.submit("array", LOOP.replace("--hurry", ""), "--array=1-3")
    tasks = [f"{array.id}_{index}" for index in (1, 2, 3)]
    ranks.wait(
        lambda: all(ranks.job(task)["JobState"] == "RUNNING" for task in tasks), 30, "all tasks"
    )
    before = ranks.job(tasks[1])
    array.wait_step(3)
    # The last task has the array's own number.
    for task in (tasks[0], tasks[2]):
        ranks.exec(["scancel", "--signal=USR2", task], user="alice")
    ranks.wait(
        lambda: [ranks.job(task)["Restarts"] for task in tasks] == ["1", "0", "1"],
        30,
        "requeue of the first and the last task",
    )
    after = ranks.job(tasks[1])
    assert (after["JobState"], after["StartTime"]) == ("RUNNING", before["StartTime"])


def test_the_controller_is_killed_when_the_job_wants_to_leave(
    ranks: Cluster, desk: ft.Desk
) -> None:
    job = desk.submit("headless", LOOP, "--nodelist=n2")
    job.wait_step(3)
    ranks.wait(lambda: saved_state_holds(ranks, job.id), 30, "saved state of the job")
    ranks.stop_slurmctld(kill=True)
    try:
        (child,) = pids(ranks, "c1", f"^python3 .*{job.log_path}")
        ranks.exec(["kill", "-USR2", child], container="c1")
        ranks.wait(
            lambda: not pids(ranks, "c1", f"^python3 .*{job.log_path}"), 20, "end of the program"
        )
    finally:
        ranks.start_slurmctld()
    job.wait_restarts(1)
    job.assert_completed()
    assert_nothing_lost(job)


def test_a_rank_is_killed(ranks: Cluster, desk: ft.Desk) -> None:
    """The other rank sees the exchange fail; the job returns to its last checkpoint."""
    steps = 60
    job = desk.submit(
        "murdered",
        f"ft_train.py --hurry --step-s 0.3 --steps {steps}",
        "--nodelist=n3",
        "-n2",
        ft_run="--checkpoint-interval=1",
    )
    # Some seconds of steps, and a checkpoint about every second.
    job.wait_step(12)
    victim = pids(ranks, "c2", f"^python3 .*{job.log_path}")[-1]
    ranks.exec(["kill", "-KILL", victim], container="c2")
    job.wait_restarts(1, 60)
    job.assert_completed(60)
    assert job.log()[-1]["step"] == steps
    assert job.attempts()[0].cause is Cause.LOST_PEER


@pytest.mark.timeout(240)
def test_nodes_die(ranks: Cluster, desk: ft.Desk) -> None:
    """n3 and n4 die at once: one job loses a rank, the other one its batch script too."""
    steps = 60
    jobs = {
        nodes: desk.submit(
            f"on-{nodes.replace(',', '-')}",
            f"ft_train.py --hurry --step-s 0.3 --steps {steps}",
            "-N2",
            "-n2",
            f"--nodelist={nodes}",
            ft_run="--checkpoint-interval=1",
        )
        for nodes in ("n2,n3", "n3,n4")
    }
    for job in jobs.values():
        job.wait_step(10)
    ranks.kill_node("c2")
    try:
        for job in jobs.values():
            job.wait_restarts(1, 60)
            ranks.exec(["scontrol", "update", f"JobId={job.id}", "ReqNodeList=", "NumNodes=1"])
        for job in jobs.values():
            job.assert_completed(90)
    finally:
        ranks.start_node("c2")
        ranks.wait(lambda: ranks.node_states()["n3"] in ("idle", "mixed"), 60, "n3 again")
    for job in jobs.values():
        assert job.log()[-1]["step"] == steps
        assert job.attempts()[1].restored_step
    # A rank that is left sees its peer vanish long before Slurm believes that the node is dead.
    assert jobs["n2,n3"].attempts()[0].cause in (Cause.LOST_PEER, Cause.NODE_FAIL)
    assert jobs["n3,n4"].attempts()[0].cause is Cause.NODE_FAIL


# -- the spool -------------------------------------------------------------------------------------


def test_spools_that_take_nothing(ranks: Cluster, desk: ft.Desk) -> None:
    """Read-only, full, and none at all: the job runs, says so, leaves and comes back."""
    fill = {"read-only": "mount -o remount,ro {0}", "full": "head -c 4096 /dev/zero >{0}/full"}
    for kind, command in fill.items():
        spool = f"/mnt/{kind}"
        script = f"mkdir -p {spool}; mount -t tmpfs -o size=4k,mode=1777 none {spool}; {command}"
        for host in ("c1", "c2"):
            ranks.exec(["sh", "-ec", script.format(spool)], container=host)
    jobs = {
        kind: desk.submit(f"spool-{kind}", LOOP, ft_run=f"--spool=/mnt/{kind}")
        for kind in (*fill, "missing")
    }
    for job in jobs.values():
        job.wait_step(3)
        ranks.exec(["scancel", "--signal=USR2", str(job.id)], user="alice")
    for kind, job in jobs.items():
        job.assert_completed()
        assert_nothing_lost(job)
        complaints = [line for line in job.output().splitlines() if f"/mnt/{kind}" in line]
        # Once per attempt and writer, not once per report.
        assert (kind != "missing") <= len(complaints) <= 4, job.output()


# -- time limits -----------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["warned", "term"])
def test_a_time_limit(limited: dict[str, ft.Job], kind: str) -> None:
    """`warned` asked for USR2 before it; `term` learns it from SIGTERM (sig-term-only)."""
    job = limited[kind]
    job.wait_restarts(1, 150)
    job.assert_completed()
    assert_nothing_lost(job)
    first = job.attempts()[0]
    assert first.cause is Cause.TIME_LIMIT
    assert first.requeued
    assert job.last_step(0) - 1 <= (job.attempts()[1].restored_step or 0) <= job.last_step(0)

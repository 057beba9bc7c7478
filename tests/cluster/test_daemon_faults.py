"""What the daemon survives, and what survives the daemon, on a real Slurm.

Every test ends with the same question: did every job run, in a size that its environment agrees
with, and was no running job touched? The shared cluster has four nodes of four GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ci.cluster import Cluster
from tests.cluster.conftest import MakeCluster
from tests.cluster.daemon import HOME, MODE, SPOOL, TABLE, WORK, Daemon

# One rank per GPU; each rank says where it is, at the start and at the end.
BODY = """#!/bin/bash
#SBATCH --ft-model=vit-large --ft-samples=20000 --ft-batch=256
#SBATCH --ntasks=4 --gpus-per-task=1 --time=5
srun bash -c 'echo start $SLURM_PROCID $SLURM_NTASKS; sleep {seconds}; echo end $SLURM_PROCID'
"""
STAGES = (
    "observe",
    "remember",
    "decide",
    "journal",
    "announce",
    "act",
    "act.journal",
    "act.write",
    "act.read_back",
    "tell",
    "beat",
)


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The shared cluster with the product in it."""
    cluster.install_product()
    return cluster


@pytest.fixture
def daemon(installed: Cluster) -> Iterator[Daemon]:
    """A daemon with a fresh state, ended after the test."""
    found = Daemon(installed)
    found.prepare()
    yield found
    found.stop("KILL")


def submit(cluster: Cluster, seconds: float = 1, *options: str, gpus: str = "auto") -> int:
    """A resizable job of four GPUs."""
    return cluster.sbatch(BODY.format(seconds=seconds), f"--ft-gpus={gpus}", *options)


def fill(cluster: Cluster) -> int:
    """Occupy all sixteen GPUs with a job that is not resizable."""
    job = cluster.sbatch("#!/bin/bash\nsleep 600\n", "-N4", "--gres=gpu:4", "--time=20")
    cluster.wait_state(job, "RUNNING", limit_s=30)
    return job


def begin_times(cluster: Cluster, jobs: list[int]) -> dict[int, float]:
    """Seconds until each pending job may start, 0 where it may now."""
    words = ["squeue", "-h", "-t", "PD", "-O", "JobID:|,EligibleTime:|"]
    rows = cluster.exec(words, env={"SLURM_TIME_FORMAT": "%s"}).stdout.splitlines()
    found = dict(row.split("|")[:2] for row in rows)
    now = time.time()
    return {
        job: max(0.0, float(found[str(job)].strip()) - now)
        for job in jobs
        if str(job) in {key.strip() for key in found}
    }


def wait_leased(cluster: Cluster, daemon: Daemon, jobs: list[int]) -> None:
    """Wait until every one of these jobs holds a lease of the daemon's."""

    def leased() -> bool:
        held = daemon.ours()
        return all((held.get(str(job)) or {}).get("lease_until_s") for job in jobs)

    cluster.wait(leased, 30, f"leases on {jobs}")


def assert_ran_whole(cluster: Cluster, jobs: list[int], limit_s: float = 90) -> dict[int, int]:
    """Every job ends well, with all the ranks that it began with. Returns ranks by job."""
    ranks: dict[int, int] = {}
    for job in jobs:
        cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", limit_s=limit_s)
        facts = cluster.job(job)
        text = cluster.get(f"/home/alice/slurm-{job}.out").decode()
        assert facts["JobState"] == "COMPLETED", f"{facts}\n{text}"
        starts = [line.split() for line in text.splitlines() if line.startswith("start")]
        ends = [line for line in text.splitlines() if line.startswith("end")]
        told = {int(row[2]) for row in starts}
        assert told == {len(starts)} == {len(ends)}, f"job {job} lost ranks:\n{text}"
        assert f"gres/gpu={len(starts)}" in facts["AllocTRES"].split(","), facts["AllocTRES"]
        ranks[job] = len(starts)
    return ranks


# -- sources -------------------------------------------------------------------------------------


def test_a_squeue_that_stumbles_skips_cycles_and_changes_nothing(
    installed: Cluster, daemon: Daemon
) -> None:
    """Hanging, failing, cut off in the middle of a row, cut off between two rows."""
    daemon.prepare(command_timeout_s=1)
    blocker = fill(installed)
    jobs = [submit(installed) for _ in range(3)]
    daemon.start(path=f"{WORK}/bin")
    wait_leased(installed, daemon, jobs)
    for mode in ("hang", "fail", "cut", "cut-rows"):
        skipped = daemon.logged("skipped")
        daemon.sh(f"echo {mode} >{MODE}")
        installed.wait(
            lambda past=skipped: daemon.logged("skipped") >= past + 2, 30, f"{mode}: two skips"
        )
        before, writes = daemon.beat(), daemon.logged('"message": "write"')
        installed.wait(
            lambda past=skipped: daemon.logged("skipped") >= past + 3, 30, f"{mode}: a third"
        )
        assert daemon.beat() == before, mode
        assert daemon.logged('"message": "write"') == writes, mode
        assert set(begin_times(installed, jobs)) == set(jobs), mode
        daemon.sh(f"echo ok >{MODE}")
        daemon.wait_cycles(1)
    installed.exec(["scancel", str(blocker)])
    assert_ran_whole(installed, jobs)
    assert not daemon.logged("traceback")


def test_slurmctld_restarting_under_a_cycle(installed: Cluster, daemon: Daemon) -> None:
    blocker = fill(installed)
    jobs = [submit(installed) for _ in range(3)]
    daemon.start()
    wait_leased(installed, daemon, jobs)
    # slurmctld saves its state every few seconds; the leases have to be in it.
    daemon.wait_cycles(2)
    installed.stop_slurmctld()
    installed.wait(lambda: daemon.logged("skipped") >= 1, 60, "a skipped cycle")
    assert daemon.alive
    installed.start_slurmctld()
    daemon.wait_cycles(2, limit_s=60)
    installed.exec(["scancel", str(blocker)])
    assert_ran_whole(installed, jobs)
    assert not daemon.logged("traceback")


# -- the daemon dies -----------------------------------------------------------------------------


def test_killed_at_every_stage_and_started_again(installed: Cluster, daemon: Daemon) -> None:
    """Each stage meets a cycle that has to resize, lease and lift."""
    jobs: list[int] = []
    for stage in STAGES:
        jobs.append(submit(installed, 2))
        daemon.start_faulty(stage)
        daemon.wait_end()  # so the stage was reached
    daemon.start()
    ranks = assert_ran_whole(installed, jobs, limit_s=120)
    assert len(ranks) == len(STAGES)
    installed.wait(lambda: not holds_anything(daemon), 30, "nothing of ours left")


def holds_anything(daemon: Daemon) -> list[str]:
    """Pending jobs on which something of ours is out."""
    keys = ("factor", "lease_until_s", "written")
    pending = {row[0] for row in daemon.cluster.squeue("%i", "-t", "PD")}
    return [
        job
        for job, entry in daemon.ours().items()
        if job in pending and any(entry.get(key) for key in keys)
    ]


def test_killed_for_good_every_job_starts_as_submitted_and_in_native_order(
    installed: Cluster, daemon: Daemon
) -> None:
    lease_s = 8
    daemon.prepare(lease_s=lease_s)
    blocker = fill(installed)
    # The longest first, so that the daemon's order is not the native one.
    jobs = [submit(installed, 1, f"--ft-samples={20000 * (8 - n)}") for n in range(4)]
    daemon.start()
    wait_leased(installed, daemon, jobs)
    daemon.wait_cycles(2)
    daemon.signal("KILL")
    daemon.wait_end()
    died = time.monotonic()

    def timer() -> bool:
        """What the release timer does, once a second instead of once a minute."""
        out = daemon.sh(f"slurm-ext release --if-stale --config {WORK}/config.yaml 2>>{WORK}/log")
        return "daemon is alive" not in out

    installed.wait(timer, lease_s + 5, "release by the timer", poll_s=1.0)
    assert time.monotonic() - died <= lease_s + 4
    assert not any(begin_times(installed, jobs).values())
    for job in jobs:
        facts = installed.job(job)
        assert (facts["NumTasks"], facts["TimeLimit"]) == ("4", "00:05:00")
    ranked = installed.exec(["sprio", "-h", "-o", "%i %S"]).stdout.split()
    assert set(ranked[1::2]) <= {"0"}
    installed.exec(["scancel", str(blocker)])
    assert set(assert_ran_whole(installed, jobs).values()) == {4}
    starts = [installed.job(job)["StartTime"] for job in jobs]
    assert starts == sorted(starts)


def test_released_by_hand_beside_a_living_daemon(installed: Cluster, daemon: Daemon) -> None:
    blocker = fill(installed)
    jobs = [submit(installed) for _ in range(2)]
    daemon.start()
    wait_leased(installed, daemon, jobs)
    daemon.sh(f"slurm-ext release --config {WORK}/config.yaml 2>/dev/null")
    assert not any(begin_times(installed, jobs).values())
    daemon.wait_cycles(3)
    assert not any(begin_times(installed, jobs).values())
    daemon.sh(f"slurm-ext release --resume --config {WORK}/config.yaml 2>/dev/null")
    wait_leased(installed, daemon, jobs)
    daemon.stop("TERM")
    assert daemon.logged("stopped")
    daemon.start()
    installed.exec(["scancel", str(blocker)])
    assert_ran_whole(installed, jobs)


# -- jobs move under the daemon --------------------------------------------------------------------


def test_a_job_cancelled_between_plan_and_write(installed: Cluster, daemon: Daemon) -> None:
    gone, stays = submit(installed), submit(installed)
    daemon.start_faulty("write:shape", command=f"scancel {gone}")
    assert_ran_whole(installed, [stays])
    assert installed.job(gone)["JobState"] == "CANCELLED"
    assert not daemon.logged("traceback")
    assert daemon.logged("gone: it does not wait any more")


def test_a_job_that_starts_between_plan_and_write_keeps_every_rank(
    make_cluster: MakeCluster,
) -> None:
    """Without disable_job_shrink, where a late NumNodes= would take nodes from a running job."""
    own = make_cluster(nodes=4)
    own.install_product()
    parameters = own.spec.slurm_conf.get("SchedulerParameters") or _parameters(own)
    own.reconfigure(SchedulerParameters=str(parameters).replace(",disable_job_shrink", ""))
    daemon = Daemon(own)
    # Only two counts: 8 GPUs on two nodes as submitted, or one GPU on one node.
    daemon.prepare(max_gpus_per_job=1)
    job = own.sbatch(
        BODY.format(seconds=4), "--ft-gpus=1,8", "--ntasks=8", "--nodes=2", "--time=10"
    )
    blocker = own.sbatch("#!/bin/bash\nsleep 60\n", "-N3", "--gres=gpu:4", "--time=2")
    own.wait_state(blocker, "RUNNING", limit_s=20)
    # One node is free, so the plan shrinks the job. In the middle of it two nodes are free.
    started = (
        f"scancel {blocker}; scontrol update JobId={job} StartTime=now;"
        f" until scontrol show job {job} | grep -q JobState=RUNNING; do sleep 0.1; done"
    )
    daemon.start_faulty("write:shape", command=started)
    ranks = assert_ran_whole(own, [job])
    assert ranks == {job: 8}
    # The write was made, and Slurm refused it: the job was not spared by luck.
    late = [line for line in daemon.log() if line.get("action") == "shape"]
    assert [line["fields"]["NumTasks"] for line in late if "fields" in line] == ["1"]
    daemon.stop()


def _parameters(cluster: Cluster) -> str:
    for line in cluster.get("/etc/slurm/slurm.conf").decode().splitlines():
        if line.startswith("SchedulerParameters="):
            return line.partition("=")[2]
    raise AssertionError("slurm.conf has no SchedulerParameters")


def test_a_resize_that_slurm_takes_only_in_part_is_never_let_go_as_it_is(
    installed: Cluster, daemon: Daemon
) -> None:
    """The daemon dies after a wave of which another hand undoes one field."""
    job = submit(installed)
    undo = f"scontrol update JobId={job} NumTasks=3"
    daemon.start_faulty("act.read_back", command=undo)
    assert_ran_whole(installed, [job])


# -- nodes go away ---------------------------------------------------------------------------------


def test_nodes_drained_killed_and_cut_off_under_a_pin(make_cluster: MakeCluster) -> None:
    own = make_cluster(nodes=3, nodes_per_container=1, slurm_conf={"SlurmdTimeout": "6"})
    own.install_product()
    daemon = Daemon(own)
    daemon.prepare(max_gpus_per_job=4)
    # Dies when the job is pinned and resized, but not let go yet.
    job, pinned = _pinned(own, daemon)[0]
    own.exec(["scontrol", "update", f"NodeName={pinned}", "State=DRAIN", "Reason=test"])
    daemon.start()
    assert_ran_elsewhere(own, job, pinned)
    daemon.stop()
    own.exec(["scontrol", "update", f"NodeName={pinned}", "State=RESUME"])

    (first, killed), (second, lost) = _pinned(own, daemon, 2)
    assert killed != lost
    own.kill_node(f"c{killed[1:]}")
    own.cut_off(f"c{lost[1:]}")
    daemon.start()
    assert_ran_elsewhere(own, first, killed, lost)
    assert_ran_elsewhere(own, second, killed, lost)
    daemon.stop()


def _pinned(cluster: Cluster, daemon: Daemon, number: int = 1) -> list[tuple[int, str]]:
    """Jobs that a daemon pinned to a node each before it died."""
    jobs = [submit(cluster, 1) for _ in range(number)]
    daemon.start_faulty("act.read_back")
    daemon.wait_end()
    pins = [(job, cluster.job(job)["ReqNodeList"]) for job in jobs]
    assert all(node in cluster.spec.node_names() for _, node in pins), pins
    return pins


def assert_ran_elsewhere(cluster: Cluster, job: int, *dead: str) -> None:
    """The job ended well, and not on these nodes."""
    facts = cluster.wait_state(job, "COMPLETED", "FAILED", "CANCELLED", limit_s=90)
    assert facts["JobState"] == "COMPLETED", facts
    assert facts["NodeList"] not in dead, facts


# -- limits --------------------------------------------------------------------------------------


def test_limits_of_a_qos_hold_for_resized_jobs(make_cluster: MakeCluster) -> None:
    """QOS small: at most 4 GPUs and 2 nodes per job, 8 GPUs at once."""
    own = make_cluster(nodes=4, limits=True)
    own.install_product()
    daemon = Daemon(own)
    daemon.prepare()
    jobs = [submit(own, 3, "--qos=small") for _ in range(5)]
    daemon.start()
    most = 0
    ended: set[str] = set()

    def watch() -> bool:
        nonlocal most
        rows = own.exec(
            ["squeue", "-h", "-t", "R,CG", "-O", "JobID:|,tres-alloc:|"]
        ).stdout.splitlines()
        used = 0
        for row in rows:
            tres = dict(
                part.split("=") for part in row.split("|")[1].strip().split(",") if "=" in part
            )
            gpus = int(tres.get("gres/gpu", "0"))
            assert gpus <= 4, row
            used += gpus
        most = max(most, used)
        ended.update(str(j) for j in jobs if own.job(j)["JobState"] == "COMPLETED")
        return len(ended) == len(jobs)

    own.wait(watch, 90, "the end of all jobs", poll_s=0.2)
    assert most <= 8
    assert_ran_whole(own, jobs)
    daemon.stop()


# -- state on disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["lost", "damaged"])
def test_journal_and_table_gone(installed: Cluster, daemon: Daemon, damage: str) -> None:
    blocker = fill(installed)
    jobs = [submit(installed) for _ in range(3)]
    daemon.start()
    wait_leased(installed, daemon, jobs)
    # The documents follow the journal within the cycle. Killed between the two, a daemon whose
    # journal is lost as well has nothing left that tells of the leases.
    names = " ".join(f"{SPOOL}/plans/{job}.json" for job in jobs)
    noted = ["sh", "-c", f"grep -l '\"lease_until_s\":[0-9]' {names} | wc -l"]
    installed.wait(
        lambda: int(installed.exec(noted).stdout) == len(jobs), 30, "documents with the leases"
    )
    daemon.stop("KILL")
    if damage == "lost":
        daemon.sh(f"rm {HOME}/journal.sqlite* {TABLE}*")
    else:
        daemon.sh(f"for f in {HOME}/journal.sqlite {TABLE}; do echo garbage >$f; done")
    daemon.start()
    daemon.wait_cycles(2)
    assert daemon.logged("journal")
    assert daemon.logged(TABLE)
    held = daemon.ours()
    # Rebuilt from the spool: the leases are known to be ours, not taken for the users' --begin.
    assert all(held[str(job)]["lease_until_s"] for job in jobs)
    installed.exec(["scancel", str(blocker)])
    assert set(assert_ran_whole(installed, jobs).values()) == {4}
    daemon.sh(f"rm -f {TABLE}*")


def test_a_user_cannot_make_the_spool_lie(installed: Cluster, daemon: Daemon) -> None:
    """Links, other people's files and monstrous reports are not read; a true report is."""
    blocker = fill(installed)
    job = submit(installed)
    daemon.start()
    wait_leased(installed, daemon, [job])
    installed.exec(
        [
            "sh",
            "-c",
            f"mkdir -p {SPOOL}/2001 && cd {SPOOL}/2001 && ln -s /etc/shadow progress-{job}.json"
            f" && head -c 1000000 /dev/zero >request-{job}.json",
        ],
        user="alice",
    )
    installed.wait(lambda: daemon.logged("not read") >= 2, 30, "two refused files")
    installed.exec(["rm", f"{SPOOL}/2001/request-{job}.json"], user="alice")
    installed.exec(["slurm-ext", "pin", str(job), "--config", f"{WORK}/config.yaml"], user="alice")
    installed.wait(lambda: daemon.ours()[str(job)]["veto"], 30, "the pin")
    refused = installed.exec(
        ["slurm-ext", "pin", str(job), "--release", "--config", f"{WORK}/config.yaml"],
        user="bob",
        check=False,
    )
    assert refused.rc == 1
    assert "belongs to alice" in refused.stderr
    installed.exec(["scancel", str(blocker)])
    assert assert_ran_whole(installed, [job]) == {job: 4}

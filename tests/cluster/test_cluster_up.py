"""The containerized cluster itself: what every other cluster test takes for granted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ci.cluster import (
    DAEMON_USER,
    Cluster,
    ClusterError,
    ClusterSpec,
    ClusterTimeoutError,
    CommandError,
    conf,
    engine,
    registry,
)
from ci.cluster.conf import FIRST_SLURMD_PORT
from ci.cluster.spec import SUITE
from tests.cluster.conftest import MakeCluster
from tests.cluster.runner import hears_interrupts

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = "#!/bin/bash\nsrun bash -c 'echo rank=$SLURM_PROCID gpu=$CUDA_VISIBLE_DEVICES'\n"
SLEEP = "#!/bin/bash\nsleep 300\n"


def output(cluster: Cluster, job_id: int, user: str = "alice") -> str:
    """What a job has printed; empty until slurmstepd opens the file, some time after RUNNING."""
    try:
        return cluster.get(f"/home/{user}/slurm-{job_id}.out").decode()
    except FileNotFoundError:
        return ""


def leftovers(name: str) -> list[str]:
    """Names of containers, volumes and networks that contain the cluster's name."""
    client = engine.connect()
    found = [name_ for row in client.api.containers(all=True) for name_ in row["Names"]]
    found += [row["Name"] for row in client.api.volumes()["Volumes"] or []]
    found += [row["Name"] for row in client.api.networks()]
    return [item for item in found if name in item]


def saved_state_holds(cluster: Cluster, *job_ids: int) -> bool:
    """Whether slurmctld's state file is newer than the jobs' folders, which come with the jobs."""
    state = conf.STATE
    scripts = [f"{state}/hash.{job_id % 10}/job.{job_id}" for job_id in job_ids]
    newer = " && ".join(f"[ {state}/job_state -nt {script} ]" for script in scripts)
    return cluster.exec(["sh", "-c", newer], check=False).rc == 0


# --- up ----------------------------------------------------------------------------------------


def test_every_node_is_idle_with_its_gpus(cluster: Cluster) -> None:
    rows = cluster.exec(["sinfo", "-hN", "-p", "main", "-o", "%N|%T|%G|%c"]).stdout.splitlines()
    assert rows == [f"n{i}|idle|gpu:v100:4|32" for i in range(1, 5)]


def test_slurm_is_the_reference_release(cluster: Cluster) -> None:
    """Debian's stable suite stays with one release; sid has whatever is newest."""
    version = cluster.exec(["sinfo", "-V"]).stdout.split()[1]
    if cluster.spec.suite == SUITE:
        assert version.startswith("24.11.")
    else:
        assert tuple(int(part) for part in version.split(".")[:2]) >= (26, 5)


def test_starts_quickly(make_cluster: MakeCluster) -> None:
    """Eight nodes, image present: usually three seconds; a busy machine may need more."""
    begin = time.monotonic()
    own = make_cluster(nodes=8)
    assert time.monotonic() - begin < 15
    assert len(own.node_states()) == 8


def test_partitions_and_qos(cluster: Cluster) -> None:
    rows = cluster.exec(["scontrol", "-o", "show", "partition"]).stdout.splitlines()
    names = {row.split()[0].partition("=")[2]: row for row in rows}
    assert set(names) == {"main", "preempt", "high"}
    assert "PreemptMode=REQUEUE" in names["preempt"]
    assert "Default=YES" in names["main"]
    qos = cluster.exec(["sacctmgr", "-nP", "show", "qos", "format=name,maxtres,grptres"]).stdout
    assert "small|gres/gpu=4,node=2|gres/gpu=8" in qos.splitlines()


def test_plugin_is_in_every_container(cluster: Cluster) -> None:
    for container in cluster.containers():
        usage = cluster.exec(["srun", "--help"], user="alice", container=container).stdout
        assert "--ft-model" in usage, container


@pytest.mark.timeout(120)
def test_product_is_installed_everywhere_and_anew(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.install_product()
    for container in cluster.containers():
        version = cluster.exec(["slurm-ext", "-V"], user="alice", container=container).stdout
        assert version.startswith("slurm-ext "), container


@pytest.mark.timeout(120)
def test_installing_never_locks_the_root_folder(cluster: Cluster) -> None:
    """Unpacking an archive that has `./` in it closes / to everybody for a moment."""
    watch = "until [ -e /tmp/over ]; do [ -x / ] || echo locked; done"
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(cluster.exec, ["bash", "-c", watch], user="alice")
        cluster.wait(
            lambda: cluster.exec(["pgrep", "-u", "alice"], check=False).rc == 0, 10, "bash"
        )
        try:
            cluster.install_product()
        finally:
            cluster.exec(["touch", "/tmp/over"])
    assert watching.result().stdout == ""
    cluster.exec(["rm", "/tmp/over"])


# --- jobs --------------------------------------------------------------------------------------


def test_job_sees_its_gpus_and_is_accounted(cluster: Cluster) -> None:
    job_id = cluster.sbatch(RANKS, "-n2", "--gpus-per-task=1", user="alice")
    job = cluster.wait_state(job_id, "COMPLETED", "FAILED", limit_s=30)
    assert job["JobState"] == "COMPLETED"
    assert sorted(output(cluster, job_id).split("\n")) == ["", "rank=0 gpu=0", "rank=1 gpu=1"]

    def batch_row() -> list[str]:
        rows = cluster.accounting(job_id, "JobID,User,Account,State,AllocTRES")
        return next((row for row in rows if row[0] == str(job_id)), [])

    cluster.wait(lambda: batch_row()[3:4] == ["COMPLETED"], 20, f"accounting row of job {job_id}")
    row = batch_row()
    assert row[1:3] == ["alice", "vision"]
    assert "gres/gpu=2" in row[4].split(",")
    assert "gres/gpu:v100=2" in row[4].split(",")


def test_job_over_two_containers(cluster: Cluster) -> None:
    """Four nodes of two containers: steps cross the private network."""
    job_id = cluster.sbatch(RANKS, "-N4", "--ntasks-per-node=1", "--gres=gpu:4", user="bob")
    assert cluster.wait_state(job_id, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    lines = set(output(cluster, job_id, "bob").split("\n")) - {""}
    assert lines == {f"rank={rank} gpu=0,1,2,3" for rank in range(4)}


def test_high_partition_preempts_by_requeue(cluster: Cluster) -> None:
    low = cluster.sbatch(SLEEP, "-p", "preempt", "-N4", "--gres=gpu:4", user="alice")
    cluster.wait_state(low, "RUNNING", limit_s=30)
    high = cluster.sbatch(SLEEP, "-p", "high", "-N4", "--gres=gpu:4", user="bob")
    cluster.wait_state(high, "RUNNING", limit_s=60)
    job = cluster.job(low)
    assert job["JobState"] == "PENDING"
    assert job["Restarts"] == "1"


def test_spool_is_shared_and_sticky(cluster: Cluster) -> None:
    cluster.put("/var/spool/slurm-ext/plan", "from ctl", owner=DAEMON_USER)
    read = cluster.exec(["cat", "/var/spool/slurm-ext/plan"], user="alice", container="c1")
    assert read.stdout == "from ctl"
    gone = cluster.exec(
        ["rm", "-f", "/var/spool/slurm-ext/plan"], user="alice", container="c1", check=False
    )
    assert gone.rc != 0
    cluster.exec(["rm", "/var/spool/slurm-ext/plan"], user=DAEMON_USER)


# --- rights ------------------------------------------------------------------------------------


@pytest.fixture
def pending(cluster: Cluster) -> int:
    """A job of alice that waits for its start time, in a shape that Slurm can change."""
    return cluster.sbatch(
        RANKS, "--begin=now+1hour", "-n4", "--gpus-per-task=1", "--comment=mine", user="alice"
    )


@pytest.mark.parametrize(
    ("change", "field", "after"),
    [
        ("SiteFactor=5000", None, ""),
        ("NumTasks=2", "NumTasks", "2"),
        ("TimeLimit=7", "TimeLimit", "00:07:00"),
        ("ReqNodeList=n2", "ReqNodeList", "n2"),
    ],
)
def test_daemon_user_is_operator(
    cluster: Cluster, pending: int, change: str, field: str | None, after: str
) -> None:
    cluster.exec(["scontrol", "update", f"JobId={pending}", change], user=DAEMON_USER)
    if field is not None:
        assert cluster.job(pending)[field] == after


def test_daemon_user_moves_start_and_order(cluster: Cluster, pending: int) -> None:
    """A lease lifted and an order written: what the daemon does all day, seen in the result."""
    blocker = cluster.sbatch(SLEEP, "-N4", "--exclusive", user="bob")
    cluster.wait_state(blocker, "RUNNING", limit_s=30)
    cluster.exec(
        ["scontrol", "update", f"JobId={pending}", "StartTime=now", "SiteFactor=5000"],
        user=DAEMON_USER,
    )

    def site_factor() -> str:
        return cluster.exec(["sprio", "-h", "-j", str(pending), "-o", "%S"]).stdout.strip()

    cluster.wait(lambda: site_factor() == "5000", 20, "site factor of 5000")
    cluster.exec(["scancel", str(blocker)])
    assert cluster.wait_state(pending, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


@pytest.mark.parametrize("change", ["SiteFactor=5000", "AdminComment=forged"])
def test_ordinary_user_may_not(cluster: Cluster, pending: int, change: str) -> None:
    with pytest.raises(CommandError) as refused:
        cluster.exec(["scontrol", "update", f"JobId={pending}", change], user="alice")
    assert "denied" in refused.value.stderr.lower()


def test_user_may_not_touch_the_job_of_another(cluster: Cluster, pending: int) -> None:
    done = cluster.exec(
        ["scontrol", "update", f"JobId={pending}", "NumTasks=2"], user="bob", check=False
    )
    assert done.rc != 0
    assert cluster.job(pending)["NumTasks"] == "4"


def test_daemon_user_may_not_write_admin_comment(cluster: Cluster, pending: int) -> None:
    """Only Lua inside slurmctld writes it: the daemon does not need Administrator."""
    done = cluster.exec(
        ["scontrol", "update", f"JobId={pending}", "AdminComment=x"], user=DAEMON_USER, check=False
    )
    assert done.rc != 0
    assert cluster.job(pending).get("AdminComment", "") != "x"


# --- exec --------------------------------------------------------------------------------------


def test_exec_passes_stdin_and_keeps_streams_apart(cluster: Cluster) -> None:
    big = "line\n" * 100_000
    done = cluster.exec(["sh", "-c", "wc -l; echo trouble >&2; exit 3"], stdin=big, check=False)
    assert (done.rc, done.stdout.strip(), done.stderr.strip()) == (3, "100000", "trouble")


def test_exec_runs_as_the_user_in_its_groups(cluster: Cluster) -> None:
    assert cluster.exec(["id", "-un"], user="carol").stdout.strip() == "carol"
    assert cluster.exec(["id", "-gn"], user="carol").stdout.strip() == "research"


def test_exec_ends_a_command_at_its_limit(cluster: Cluster) -> None:
    begin = time.monotonic()
    with pytest.raises(CommandError, match="killed after 1 s"):
        cluster.exec(["sleep", "60"], timeout=1)
    assert time.monotonic() - begin < 8
    assert cluster.exec(["pgrep", "-fx", "sleep 60"], check=False).rc == 1


def test_wait_says_what_was_missing(cluster: Cluster) -> None:
    with pytest.raises(ClusterTimeoutError, match="no second moon within"):
        cluster.wait(lambda: False, 0.2, "second moon")


# --- faults ------------------------------------------------------------------------------------


def reachable(cluster: Cluster, container: str) -> bool:
    """Whether a slurmd of the container accepts connections from the controller."""
    probe = f"</dev/tcp/{container}/{FIRST_SLURMD_PORT}"
    return cluster.exec(["timeout", "2", "bash", "-c", probe], check=False).rc == 0


def down(cluster: Cluster) -> set[str]:
    return {node for node, state in cluster.node_states().items() if state.startswith("down")}


def run_on_all(cluster: Cluster) -> None:
    """A job over every node ends well: munge, network and slurmd work again."""
    job_id = cluster.sbatch(RANKS, f"-N{cluster.spec.nodes}", "--ntasks-per-node=1", "--gres=gpu:1")
    assert cluster.wait_state(job_id, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"


@pytest.mark.timeout(120)
def test_killed_container_comes_back(make_cluster: MakeCluster) -> None:
    own = make_cluster(nodes=2, nodes_per_container=1, slurm_conf={"SlurmdTimeout": "6"})
    own.kill_node("c2")
    own.wait(lambda: down(own) == {"n2"}, 60, "n2 down")
    own.start_node("c2")
    own.wait(lambda: not down(own), 30, "n2 back")
    run_on_all(own)


@pytest.mark.timeout(120)
def test_cut_off_container_comes_back_under_its_address(make_cluster: MakeCluster) -> None:
    own = make_cluster(nodes=2, nodes_per_container=1)
    own.cut_off("c2")
    # It goes on by itself, without the others.
    assert not reachable(own, "c2")
    assert own.exec(["pgrep", "-x", "slurmd"], container="c2").rc == 0
    assert reachable(own, "c1")
    own.reconnect("c2")
    own.wait(lambda: reachable(own, "c2"), 10, "connection to c2")
    run_on_all(own)


@pytest.mark.timeout(120)
def test_paused_container_is_silent_and_goes_on(make_cluster: MakeCluster) -> None:
    own = make_cluster(nodes=2, nodes_per_container=1)
    job_id = own.sbatch("#!/bin/bash\nfor i in {1..20}; do echo $i; sleep 0.1; done\n", "-wn2")
    own.wait_state(job_id, "RUNNING", limit_s=30)
    own.wait(lambda: output(own, job_id), 10, "output of the job")
    own.pause_node("c2")
    frozen = output(own, job_id)
    # The kernel still accepts connections; no line comes in five times its period.
    assert reachable(own, "c2")
    with pytest.raises(ClusterTimeoutError):
        own.wait(lambda: output(own, job_id) != frozen, 0.5, "progress of a frozen job")
    own.unpause_node("c2")
    assert own.wait_state(job_id, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    assert output(own, job_id).split() == [str(number) for number in range(1, 21)]


@pytest.mark.full
@pytest.mark.timeout(360)
def test_slurm_notices_frozen_and_cut_off_nodes(make_cluster: MakeCluster) -> None:
    """Slurm's own pace: a minute until they are down, one or two more until they are back."""
    # A frozen node still completes TCP handshakes, so the message timeout finds it. Pings go out in
    # rounds that last until then, twice: with a SlurmdTimeout below some 25 s the healthy node,
    # heard only once per round, would be called down as well.
    quick = {"SlurmdTimeout": "30", "MessageTimeout": "5"}
    own = make_cluster(nodes=3, nodes_per_container=1, slurm_conf=quick)
    own.pause_node("c2")
    own.cut_off("c3")
    own.wait(lambda: down(own) == {"n2", "n3"}, 120, "n2 and n3 down")
    assert "n1 not responding" not in own.get("/var/log/slurm/slurmctld.log").decode()
    own.unpause_node("c2")
    own.reconnect("c3")
    own.wait(lambda: not down(own), 150, "n2 and n3 back")
    run_on_all(own)


@pytest.mark.parametrize("kill", [False, True])
def test_controller_restart_keeps_jobs(cluster: Cluster, kill: bool) -> None:
    waiting = cluster.sbatch(SLEEP, "--begin=now+1hour", user="alice")
    running = cluster.sbatch(SLEEP, "-n1", user="alice")
    cluster.wait_state(running, "RUNNING", limit_s=30)
    # slurmctld writes its state a few seconds late; killed before that it forgets jobs.
    cluster.wait(lambda: saved_state_holds(cluster, waiting, running), 30, "saved job state")
    cluster.restart_slurmctld(kill=kill)
    assert cluster.wait_state(running, "RUNNING", limit_s=30)["RunTime"]
    assert cluster.job(waiting)["JobState"] == "PENDING"


# --- side by side, and gone --------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_two_clusters_do_not_disturb_each_other(
    cluster: Cluster, make_cluster: MakeCluster
) -> None:
    own = make_cluster(
        nodes=2, nodes_per_container=2, limits=True, slurm_conf={"SlurmdTimeout": "17"}
    )
    here = cluster.sbatch(SLEEP, "-N1", user="alice")
    there = own.sbatch(RANKS, "-N2", "--ntasks-per-node=1", "--gres=gpu:2", user="alice")
    assert own.wait_state(there, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    cluster.wait_state(here, "RUNNING", limit_s=30)
    assert [row[0] for row in own.squeue()] == []
    assert "17 sec" in own.exec(["scontrol", "show", "config"]).stdout
    # A key that one cluster's munge made is no credential in the other.
    foreign = own.exec(["munge", "-n"]).stdout
    assert cluster.exec(["unmunge"], stdin=foreign, check=False).rc != 0
    # Limits are enforced where asked: the QOS allows two nodes and four GPUs per job.
    large = own.sbatch(SLEEP, "--qos=small", "-N2", "--gres=gpu:4", user="alice")
    own.wait(lambda: own.job(large)["Reason"] == "QOSMaxGRESPerJob", 20, "refusal by the QOS")
    own.stop()
    assert cluster.job(here)["JobState"] == "RUNNING"


def test_stop_leaves_nothing(make_cluster: MakeCluster) -> None:
    own = make_cluster(nodes=1)
    assert len(leftovers(own.name)) == 2 + 3 + 1
    own.stop()
    assert leftovers(own.name) == []
    own.stop()
    with pytest.raises(ClusterError, match="no cluster is called"):
        Cluster.attach(own.name)


def test_failed_start_leaves_nothing_and_says_why() -> None:
    before = set(registry.running())
    with pytest.raises(ClusterError, match="ctl ended"):
        Cluster.start(ClusterSpec(nodes=1, slurm_conf={"SelectType": "select/nonsense"}))
    assert set(registry.running()) <= before


OWNER = """
import sys, time
from ci.cluster import Cluster, ClusterSpec
with Cluster.start(ClusterSpec(nodes=1, name_prefix="slurm-ext-test-owner")) as cluster:
    print(cluster.name, flush=True)
    time.sleep(120)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_after_the_owner_is_ended(signum: signal.Signals) -> None:
    """Ctrl-C and TERM clean up; after SIGKILL the next start, or `down --stale`, does."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        preexec_fn=hears_interrupts,
    ) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().strip()
        assert name in registry.running()
        owner.send_signal(signum)
        owner.wait(timeout=30)
    if signum == signal.SIGKILL:
        assert name in registry.running()
        assert name in registry.sweep()
    assert leftovers(name) == []

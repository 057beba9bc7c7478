"""What the daemon does with a job that comes back: no needless wait, and a new plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from ci.cluster import Cluster
from tests.cluster import ft_hold
from tests.cluster.daemon import Daemon
from tests.cluster.ft import CRED_EXPIRE_S

NODES = ("n1", "n3", "n4")
# A resizable job that comes back once; each rank tells how many there are.
RESIZABLE = """#!/bin/bash
#SBATCH --ft-model=vit-large --ft-samples=20000 --ft-batch=256 --ft-gpus=auto
#SBATCH --open-mode=append --ntasks=4 --gpus-per-task=1 --time=5
srun bash -c 'echo rank ${SLURM_RESTART_COUNT:-0} $SLURM_PROCID $SLURM_NTASKS $SLURM_JOB_NODELIST'
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
sleep 200
"""


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    """The shared cluster, whose cred_expire is Slurm's default, with the product in it."""
    cluster.install_product()
    return cluster


@pytest.fixture
def daemon(installed: Cluster) -> Iterator[Daemon]:
    """A daemon at its default pace."""
    found = Daemon(installed)
    found.prepare(cycle_s=5)
    found.start()
    found.wait_cycles(1)
    yield found
    found.stop("KILL")


@pytest.mark.timeout(300)
def test_eligible_121s_a_requeued_job_starts_soon_on_the_same_nodes(
    installed: Cluster, ranks: Cluster, daemon: Daemon
) -> None:
    """eligible-121s: at least 10 times sooner than Slurm's default, and no later than with a short
    life of credentials."""
    default_s = ft_hold.announced(installed, "n2")
    assert abs(default_s - ft_hold.DEFAULT_HOLD_S) < 5, default_s
    ours = ft_hold.measure(installed, *NODES, ours=True)
    # Slurm revokes the credential of a job that ended: the same node takes the new one.
    assert [(hold.before, hold.after) for hold in ours] == [(node, node) for node in NODES]
    short = [hold.wait_s for hold in ft_hold.measure(ranks, *NODES, ours=False)]
    assert min(short) > CRED_EXPIRE_S
    worst_s = max(hold.wait_s for hold in ours)
    print(f"default {default_s:.1f} s, short {short}, ours {[hold.wait_s for hold in ours]}")
    assert worst_s * 10 <= default_s
    assert worst_s <= statistics.median(short)


@pytest.mark.timeout(120)
def test_a_hasty_daemon_loses_no_job_to_a_revoked_credential(
    installed: Cluster, daemon: Daemon
) -> None:
    """A start in the second in which the last attempt ended would fail the job for good."""
    daemon.stop()
    daemon.prepare(cycle_s=0.2)
    daemon.start()
    daemon.wait_cycles(1)
    nodes = [node for node in installed.spec.node_names() for _ in range(4)]
    holds = ft_hold.measure(installed, *nodes, ours=True)
    assert [hold.before for hold in holds] == [hold.after for hold in holds] == nodes


@pytest.mark.full
@pytest.mark.timeout(300)
def test_slurms_own_delay_is_what_it_announces(installed: Cluster) -> None:
    (hold,) = ft_hold.measure(installed, "n1", ours=False, limit_s=200)
    assert abs(hold.wait_s - ft_hold.DEFAULT_HOLD_S) < 10


@pytest.mark.timeout(180)
def test_an_attempt_does_not_inherit_a_plan(installed: Cluster, daemon: Daemon) -> None:
    """The job begins alone on the cluster; when it comes back, one node has two free GPUs."""
    job = installed.sbatch(RESIZABLE)
    installed.wait_state(job, "RUNNING", limit_s=60)
    first = installed.job(job)
    blockers = [
        installed.sbatch(
            "#!/bin/bash\nsleep 300\n",
            "-w",
            f"n{i}",
            f"--gres=gpu:{2 if i == 4 else 4}",
            "--time=30",
            "--exclusive" if i != 4 else "-n1",
            user="bob",
        )
        for i in (1, 2, 3, 4)
    ]
    installed.exec(["scontrol", "requeue", str(job)], user="alice")
    installed.wait(
        lambda: all(installed.job(b)["JobState"] == "RUNNING" for b in blockers), 60, "blockers"
    )
    installed.wait_state(job, "COMPLETED", "FAILED", limit_s=90)
    text = installed.get(f"/home/alice/slurm-{job}.out").decode()
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("rank ")]
    sizes = {attempt: {row[2] for row in rows if row[0] == attempt} for attempt in ("0", "1")}
    places = {attempt: {row[3] for row in rows if row[0] == attempt} for attempt in ("0", "1")}
    assert sizes["1"] == {"2"}, (text, first)
    assert sizes["0"] != sizes["1"]
    assert places["1"] == {"n4"}
    assert installed.job(job)["Restarts"] == "1"
    installed.exec(["scancel", *map(str, blockers)])

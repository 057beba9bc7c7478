"""All parts together: directive, daemon, ft-run, session and the reference trainer of the product.

A resizable job trains on as many ranks as the daemon found right, is told to leave, and comes back
with another GPU count, because meanwhile most of the cluster is taken: granted beats planned, the
global batch stays, and the loss goes on falling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.attempt import Attempt, parse_attempts
from slurm_ext.domain.progress import parse_progress
from slurm_ext.domain.request import attempts_path, progress_path
from tests.cluster import ft
from tests.cluster.daemon import SPOOL, Daemon

STEPS = 60
BATCH = 256
SCRIPT = f"""#!/bin/bash
#SBATCH --ft-model=vit-large --ft-samples=20000 --ft-batch={BATCH} --ft-gpus=1,2,4
#SBATCH --open-mode=append --ntasks=4 --gpus-per-task=1 --time=10
export USE_LIBUV=0 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
srun ft-run -- python3 -m slurm_ft.train --steps {STEPS} --global-batch {BATCH} \\
    --dim 16 --depth 1 --heads 2 --samples 2048 --emulate-step-s 0.3 --log-every 1 \\
    --loss-log {ft.HOME}/whole.jsonl
"""


@pytest.fixture
def daemon(ranks: Cluster) -> Iterator[Daemon]:
    """A daemon on the cluster with real ranks."""
    found = Daemon(ranks)
    found.prepare(cycle_s=1)
    found.start()
    found.wait_cycles(1)
    yield found
    found.stop("KILL")


@pytest.mark.timeout(300)
def test_a_job_comes_back_with_another_gpu_count(
    ranks: Cluster, desk: ft.Desk, daemon: Daemon
) -> None:
    ranks.exec(["rm", "-f", f"{ft.HOME}/whole.jsonl"])
    number = ranks.sbatch(SCRIPT)
    desk.made.append(number)
    job = ft.Job(ranks, number, f"{ft.HOME}/whole.jsonl")
    job.wait_step(4, limit_s=120)
    place = job.facts()["NodeList"]
    assert place in ranks.spec.node_names(), "four GPUs or fewer, so one node"
    # Two GPUs stay free, and those where the job is now will be gone.
    free = next(node for node in ranks.spec.node_names() if node != place)
    for node in ranks.spec.node_names():
        gpus = 2 if node == free else 4
        options = [f"-w{node}", f"--gres=gpu:{gpus}", "-phigh", "--time=20"]
        script = "#!/bin/bash\nsleep 600\n"
        desk.made.append(ranks.sbatch(script, *options, user="bob"))
    ranks.exec(["scancel", "--signal=USR2", str(number)], user="alice")
    job.wait(lambda: job.last_step(1) > 0, 120, "second attempt")
    uid, _ = ranks.ids("alice")
    spool = PurePath(SPOOL)
    told = str(progress_path(spool, uid, str(number)))
    report = parse_progress(ranks.get(told).decode(), told)
    assert (report.attempt, report.restored_step) == (1, job.attempts()[0].saved_step)
    job.assert_completed(120)

    first, second = job.attempts()
    # Both copies of the attempts: the job's own, and the one that the daemon reads.
    copy = str(attempts_path(spool, uid, str(number)))
    assert parse_attempts(ranks.get(copy).decode(), copy).attempts == (first, second)
    assert first.gpus == first.ranks == 4, job.output()
    assert second.gpus == second.ranks == 2, job.output()
    assert second.nodes == (free,)
    assert_resumed(job, first, second)


def assert_resumed(job: ft.Job, first: Attempt, second: Attempt) -> None:
    """No step is missing, at most one was done twice, and the loss at the end is lower."""
    log = job.log()
    assert sorted({row["step"] for row in log}) == list(range(1, STEPS + 1))
    assert second.restored_step == first.saved_step
    assert 0 <= job.last_step(0) - (first.saved_step or 0) <= 1
    begin = [row["loss"] for row in log[:5]]
    end = [row["loss"] for row in log[-5:]]
    assert sum(end) < sum(begin), json.dumps(log)

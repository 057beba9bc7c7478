"""What a researcher sees and may veto on a real cluster, as an ordinary user beside the daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ci.cluster import Cluster
from tests.cluster.daemon import CONFIG, SPOOL, Daemon

SCRIPT = """#!/bin/bash
#SBATCH --ft-model=vit-large --ft-samples=50000 --ft-batch=256 --ft-gpus=auto
#SBATCH --ntasks=4 --gpus-per-task=1 --time=5
srun sleep 2
"""
PATH = "/home/alice/forecast.sbatch"


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Cluster:
    """The shared cluster with the product in it."""
    cluster.install_product()
    return cluster


@pytest.fixture
def daemon(installed: Cluster) -> Iterator[Daemon]:
    """An acting daemon with a fresh state, ended after the test."""
    found = Daemon(installed)
    found.prepare()
    found.start()
    yield found
    found.stop("KILL")


def ask(cluster: Cluster, *words: str, user: str = "alice") -> Any:
    """``slurm-ext WORDS`` as an ordinary user."""
    argv = ["slurm-ext", *words]
    return cluster.exec(argv, user=user, env={"SLURM_EXT_CONFIG": CONFIG}, check=False)


def plan_of(cluster: Cluster, job: int) -> dict[str, Any]:
    """The plan document as alice gets it; empty while there is none."""
    done = ask(cluster, "explain", str(job), "--json")
    return json.loads(done.stdout) if done.rc == 0 else {}


def fill(cluster: Cluster) -> int:
    """Occupy all sixteen GPUs with a job that is not planned."""
    job = cluster.sbatch("#!/bin/bash\nsleep 600\n", "-N4", "--gres=gpu:4", "--time=20")
    cluster.wait_state(job, "RUNNING", limit_s=30)
    return job


def test_forecast_explanation_and_veto(installed: Cluster, daemon: Daemon) -> None:
    cluster = installed
    blocker = fill(cluster)
    daemon.wait_cycles(2)
    cluster.put(PATH, SCRIPT, owner="alice")

    # Before submitting: accepted, not now, and these counts.
    done = ask(cluster, "explain", "--script", PATH, "--json")
    assert done.rc == 0, done.stderr
    forecast = json.loads(done.stdout)
    assert (forecast["accepted"], forecast["acts"]) == (True, True), forecast
    assert forecast["plan"]["decision"]["verdict"] == "wait"
    assert len(forecast["plan"]["candidates"]) > 1
    text = ask(cluster, "explain", "--script", PATH).stdout
    assert "would be accepted" in text
    assert "Waits   for at least 1 GPU" in text
    assert "would carry this out" in text
    # No job came to be.
    queue = cluster.exec(["squeue", "-h", "-o", "%i"]).stdout.split()
    assert queue == [str(blocker)]

    # Submitted: the plan is what was foretold.
    vetoed = cluster.sbatch(SCRIPT)
    cluster.wait(lambda: plan_of(cluster, vetoed), 20, "the plan of the job")
    plan = plan_of(cluster, vetoed)
    foretold = forecast["plan"]
    for key in ("refused", "permit", "requested_gpus", "user", "uid", "account", "qos"):
        assert plan[key] == foretold[key], key
    for key in ("verdict", "configuration", "rank", "waits_for", "reason"):
        assert plan["decision"][key] == foretold["decision"][key], key
    assert [c["configuration"] for c in plan["candidates"]] == [
        c["configuration"] for c in foretold["candidates"]
    ]

    other = cluster.sbatch(SCRIPT)
    cluster.wait(lambda: plan_of(cluster, other), 20, "the plan of the second job")
    rows = ask(cluster, "queue", "-h", "-o", "%i %t %v", "-u", "alice").stdout.splitlines()
    assert sorted(rows) == [f"{vetoed} PD wait", f"{other} PD wait"]
    assert ask(cluster, "queue", "-h", "-u", "bob").stdout == ""
    documents = json.loads(ask(cluster, "queue", "--json", "-j", str(other)).stdout)
    assert [d["base_id"] for d in documents] == [other]

    # Somebody else is refused, and is not believed when writing the request by hand.
    done = ask(cluster, "pin", str(vetoed), user="bob")
    assert done.rc == 1
    assert "belongs to alice; only its owner or root can pin it" in done.stderr
    forged = json.dumps({"job_id": other, "pinned": True, "at_s": 0.0, "gpus": 1, "version": 1})
    script = 'mkdir -p "$1/$(id -u)" && printf %s "$3" >"$1/$(id -u)/request-$2.json"'
    cluster.exec(["sh", "-ec", script, "sh", SPOOL, str(other), forged], user="bob")

    # The owner's veto is seen, and kept.
    done = ask(cluster, "pin", str(vetoed))
    assert (done.rc, done.stdout) == (
        0,
        f"job {vetoed}: keeps the submitted GPU count, from the next cycle on\n",
    )
    cluster.wait(
        lambda: "its owner pinned its GPU count" in ask(cluster, "explain", str(vetoed)).stdout,
        20,
        "the pin in the explanation",
    )
    daemon.wait_cycles(2)
    assert len(plan_of(cluster, other)["candidates"]) > 1, "a stranger's request was obeyed"

    cluster.exec(["scancel", str(blocker)])
    for job in (vetoed, other):
        cluster.wait_state(job, "COMPLETED", "FAILED", "TIMEOUT", limit_s=60)
    granted = {job: cluster.job(job)["AllocTRES"].split(",") for job in (vetoed, other)}
    assert "gres/gpu=4" in granted[vetoed]
    # On an empty cluster a job that nobody pinned is given another count: the veto did it.
    assert "gres/gpu=4" not in granted[other]

    # What has ended is told as past, and is no longer in the queue.
    cluster.wait(
        lambda: "has ended: " in ask(cluster, "explain", str(vetoed)).stdout,
        20,
        "the end in the explanation",
    )
    assert ask(cluster, "queue", "-h", "-u", "alice").stdout == ""
    assert ask(cluster, "pin", str(vetoed)).rc == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--ft-gpus=auto", "--ft-gpus=3"), "the requested 4 GPUs are not in the list"),
        (("--time=5", "--time=5 -p nowhere"), "invalid partition specified: nowhere"),
        (("--ntasks=4", "--ntasks=400"), "Requested node configuration is not available"),
    ],
)
def test_a_script_that_would_be_refused(
    installed: Cluster, daemon: Daemon, change: tuple[str, str], words: str
) -> None:
    """By our grammar, by sbatch, and by slurmctld: nothing is submitted, and each says why."""
    daemon.wait_cycles(1)
    installed.put(PATH, SCRIPT.replace(*change), owner="alice")
    done = ask(installed, "explain", "--script", PATH)
    assert done.rc == 1
    assert "would be refused" in done.stdout
    assert words in done.stdout
    assert installed.exec(["squeue", "-h"]).stdout == ""


def gpus_of(cluster: Cluster, job: int) -> int:
    """GPUs that a running job holds."""
    (found,) = re.findall(r"gres/gpu=(\d+)", cluster.job(job)["AllocTRES"])
    return int(found)


@pytest.mark.timeout(180)
def test_a_job_that_slurm_will_never_start_takes_no_gpus_from_others(
    installed: Cluster, daemon: Daemon
) -> None:
    """It was planned four GPUs, and a job that could have had eight got four, the rest idle."""
    cluster = installed
    live = SCRIPT.replace("sleep 2", "sleep 120")
    alone = cluster.sbatch(live)
    cluster.wait_state(alone, "RUNNING", limit_s=60)
    most = gpus_of(cluster, alone)
    cluster.exec(["scancel", str(alone)])

    long = SCRIPT.replace("--time=5", "--time=60")
    fixed = long.replace("--ft-gpus=auto", "--ft-gpus=requested")
    limit = ["scontrol", "update", "partitionname=main", "maxtime=30:00"]
    blocker = fill(cluster)
    cluster.exec(limit)
    try:
        # Of a fixed size and not: no size makes the time shorter that its owner asked for.
        barred = [cluster.sbatch(script) for script in (fixed, long)]
        for job in barred:
            cluster.wait(
                lambda job=job: cluster.job(job)["Reason"] == "PartitionTimeLimit",
                30,
                "Slurm's reason",
            )
            cluster.wait(
                lambda job=job: (
                    "Slurm will not start it as it is" in ask(cluster, "explain", str(job)).stdout
                ),
                20,
                "that it is left out",
            )
            assert plan_of(cluster, job)["decision"]["verdict"] == "leave"
            assert "ask for less --time" in ask(cluster, "explain", str(job)).stdout
        for script in (fixed, long):
            cluster.put(PATH, script, owner="alice")
            forecast = ask(cluster, "explain", "--script", PATH)
            assert forecast.rc == 1
            headline = forecast.stdout.splitlines()[0]
            assert "would be accepted, and never started" in headline
            assert "01:00:00 is above the 00:30:00 of partition main" in forecast.stdout
            assert "Start " not in forecast.stdout
        # The neighbour gets what it gets alone.
        neighbour = cluster.sbatch(live)
        daemon.wait_cycles(2)
        cluster.exec(["scancel", str(blocker)])
        cluster.wait_state(neighbour, "RUNNING", limit_s=60)
        assert gpus_of(cluster, neighbour) == most == 8
        # The limit is lifted: Slurm gives another reason, and they are planned like any other.
        rest = cluster.sbatch("#!/bin/bash\nsleep 600\n", "-N2", "--gres=gpu:4", "--time=20")
        cluster.wait_state(rest, "RUNNING", limit_s=30)
        cluster.exec([*limit[:-1], "maxtime=UNLIMITED"])
        for job in barred:
            cluster.wait(
                lambda job=job: plan_of(cluster, job).get("decision", {}).get("verdict") != "leave",
                60,
                "that it is planned again",
            )
        cluster.exec(["scancel", str(neighbour), str(rest)])
        for job in barred:
            cluster.wait_state(job, "RUNNING", "COMPLETED", limit_s=60)
    finally:
        cluster.exec([*limit[:-1], "maxtime=UNLIMITED"], check=False)
        cluster.exec(["scancel", "-u", "alice"], check=False)

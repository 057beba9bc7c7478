"""Directives on a real Slurm: taken, refused, handed to the daemon, and rewritten counts in steps.

``scontrol update`` runs as the daemon's own user, an Operator, while the job's earliest start is in
the future: exactly what the daemon does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from ci.cluster import Cluster
from slurm_ext.domain.directive import Directive, GpuRequestKind, extract_from_admin_comment
from slurm_ext.domain.job import ShapeKind
from slurm_ext.domain.options import OPTIONS

LEASE_S = 300
OPERATOR = "slurm-ext"
# Says what the batch script sees, then what each rank of a plain step sees.
REPORT = """#!/bin/bash
echo "batch nodes=$SLURM_NNODES on_node=$SLURM_GPUS_ON_NODE cpt=$SLURM_CPUS_PER_TASK"
srun bash -c 'echo "rank $SLURM_PROCID of $SLURM_NTASKS node $SLURM_NODEID" \\
    "gpus $CUDA_VISIBLE_DEVICES"'
"""
RANK = re.compile(r"^rank (\d+) of (\d+) node (\d+) gpus ([\d,]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Rank:
    """What one rank said."""

    rank: int
    ranks: int
    node: int
    gpus: tuple[int, ...]


def _directive(cluster: Cluster, job_id: int) -> Directive:
    """As the daemon reads it: squeue's AdminComment column, by an Operator."""
    answer = cluster.exec(
        ["squeue", "-h", "-t", "all", "-j", str(job_id), "-O", "admin_comment:1200"], user=OPERATOR
    )
    found = extract_from_admin_comment(answer.stdout.strip())
    assert found is not None, answer.stdout
    return found


def _held_back(seconds: int = LEASE_S) -> str:
    return f"--begin=now+{seconds}"


def _ranks(cluster: Cluster, job_id: int) -> list[Rank]:
    done = cluster.wait_state(job_id, "COMPLETED", "FAILED", "CANCELLED", limit_s=60)
    said = cluster.get(f"/home/alice/{job_id}.out").decode()
    assert done["JobState"] == "COMPLETED", said
    return sorted(
        (
            Rank(int(rank), int(ranks), int(node), tuple(map(int, gpus.split(","))))
            for rank, ranks, node, gpus in RANK.findall(said)
        ),
        key=lambda rank: rank.rank,
    )


@dataclass(frozen=True)
class Resize:
    """One row: how the job asked, what is written, and what every rank must see then."""

    asked: Sequence[str]
    written: Sequence[str]
    kind: ShapeKind
    ranks: int
    nodes: int
    gpus_each: int


RESIZES = {
    "8 to 1, one rank per GPU": Resize(
        ["-n8", "--gpus-per-task=1", "-c2"],
        ["NumTasks=1", "NumNodes=1", "NumCPUs=2"],
        ShapeKind.RANK_PER_GPU,
        ranks=1,
        nodes=1,
        gpus_each=1,
    ),
    "1 to 8, one rank per GPU": Resize(
        ["-n1", "--gpus-per-task=1", "-c2"],
        ["NumTasks=8", "NumNodes=2", "NumCPUs=16"],
        ShapeKind.RANK_PER_GPU,
        ranks=8,
        nodes=2,
        gpus_each=1,
    ),
    "1 to 2 nodes, one launcher per node": Resize(
        ["-N1", "--ntasks-per-node=1", "--gres=gpu:4"],
        ["NumTasks=2", "NumNodes=2", "TresPerNode=gres/gpu:4"],
        ShapeKind.LAUNCHER_PER_NODE,
        ranks=2,
        nodes=2,
        gpus_each=4,
    ),
    "8 to 1, one launcher per node": Resize(
        ["-N2", "-n2", "--gpus-per-node=4", "-c4"],
        ["NumTasks=1", "NumNodes=1", "TresPerNode=gres/gpu:1", "NumCPUs=4"],
        ShapeKind.LAUNCHER_PER_NODE,
        ranks=1,
        nodes=1,
        gpus_each=1,
    ),
    "4 to 2, --gpus": Resize(
        ["--gpus=4"],
        ["TresPerNode=gres/gpu:2"],
        ShapeKind.LAUNCHER_PER_NODE,
        ranks=1,
        nodes=1,
        gpus_each=2,
    ),
    "4 to 2, ranks on one node": Resize(
        ["-n4", "--gres=gpu:4", "-c2", "--mem=800M"],
        ["NumTasks=2", "NumNodes=1", "TresPerNode=gres/gpu:2", "NumCPUs=4", "MinMemoryNode=400"],
        ShapeKind.SINGLE_NODE,
        ranks=2,
        nodes=1,
        gpus_each=2,
    ),
    "1 to 2 nodes, four ranks on each": Resize(
        ["-N1", "--ntasks-per-node=4", "--gres=gpu:4"],
        ["NumTasks=8", "NumNodes=2", "TresPerNode=gres/gpu:4"],
        ShapeKind.TASKS_PER_NODE,
        ranks=8,
        nodes=2,
        gpus_each=4,
    ),
}


@pytest.mark.parametrize("name", RESIZES)
def test_a_plain_step_sees_the_rewritten_count(cluster: Cluster, name: str) -> None:
    row = RESIZES[name]
    job_id = cluster.sbatch(REPORT, "--output=%j.out", "--ft-gpus=auto", _held_back(), *row.asked)
    assert _directive(cluster, job_id).shape is row.kind
    cluster.exec(["scontrol", "update", f"JobId={job_id}", *row.written], user=OPERATOR)
    cluster.exec(["scontrol", "update", f"JobId={job_id}", "StartTime=now"], user=OPERATOR)
    ranks = _ranks(cluster, job_id)
    assert [rank.rank for rank in ranks] == list(range(row.ranks))
    assert {rank.ranks for rank in ranks} == {row.ranks}
    assert len({rank.node for rank in ranks}) == row.nodes
    assert {len(rank.gpus) for rank in ranks} == {row.gpus_each}
    if row.kind is ShapeKind.RANK_PER_GPU:  # no two ranks on one GPU
        assert len({(rank.node, rank.gpus) for rank in ranks}) == row.ranks


ASKED = ["--ft-model=vit-large@r1", "--ft-samples=50000", "--ft-epochs=3", "--ft-gpus=1,2,4-8"]


def test_every_way_in_brings_the_directive_to_the_daemon(cluster: Cluster) -> None:
    script = "#!/bin/bash\n#SBATCH " + " ".join(ASKED) + "\ntrue\n"
    shape = ["-n4", "--gpus-per-task=1"]
    by_line = cluster.sbatch(script, *shape)
    by_option = cluster.sbatch("#!/bin/bash\ntrue\n", *shape, *ASKED)
    comment = "site; ft: model=vit-large@r1 samples=50000 epochs=3 gpus=1,2,4-8"
    by_comment = cluster.sbatch("#!/bin/bash\ntrue\n", *shape, f"--comment={comment}")
    found = _directive(cluster, by_line)
    assert found == _directive(cluster, by_option) == _directive(cluster, by_comment)
    assert (found.model, found.samples, found.epochs) == ("vit-large", 50000, 3.0)
    assert found.gpus.ranges == ((1, 2), (4, 8))
    assert found.shape is ShapeKind.RANK_PER_GPU
    assert cluster.job(by_comment)["Comment"].startswith("site;")


def test_the_command_line_wins_over_lines_and_twins_fill_only_gaps(cluster: Cluster) -> None:
    script = "#!/bin/bash\n#SBATCH --ft-model=line --ft-samples=1\ntrue\n"
    env = {"SLURM_FT_SAMPLES": "2", "SLURM_FT_BATCH": "256", "SLURM_FT_MODEL": "twin"}
    job_id = cluster.sbatch(script, "--gres=gpu:1", "--ft-model=command", env=env)
    found = _directive(cluster, job_id)
    assert (found.model, found.samples, found.batch_min) == ("command", 1, 256)


def test_a_job_sees_its_values_also_without_the_users_environment(cluster: Cluster) -> None:
    script = "#!/bin/bash\nprintenv | grep ^FT_\nsrun /usr/bin/printenv FT_MODEL\n"
    for export in ("--export=ALL", "--export=NONE"):
        job_id = cluster.sbatch(
            script, "--output=%j.out", "--gres=gpu:1", "--ft-model=vit", "--ft-max-pause=90", export
        )
        done = cluster.wait_state(job_id, "COMPLETED", "FAILED")
        said = cluster.get(f"/home/alice/{job_id}.out").decode()
        assert done["JobState"] == "COMPLETED", said
        assert "FT_MODEL=vit\n" in said
        assert "FT_MAX_PAUSE=01:30:00\n" in said
        assert said.endswith("vit\n")
        line = re.search(r"^FT_DIRECTIVE=(.*)$", said, re.MULTILINE)
        assert line is not None
        found = extract_from_admin_comment("ft:" + line[1])
        assert found is not None
        assert found.max_pause_s == 5400


def test_salloc_and_srun_are_ordered_and_not_resized(cluster: Cluster) -> None:
    show = 'squeue --noheader -j $SLURM_JOB_ID -O admin_comment:1200; echo "model=$FT_MODEL"'
    for command in ("salloc", "srun"):
        argv = [command, "-n1", "--gpus-per-task=1", "--ft-model=vit", "--ft-gpus=auto"]
        done = cluster.exec([*argv, "bash", "-c", show], user="alice")
        found = extract_from_admin_comment(done.stdout)
        assert found is not None, done
        assert found.gpus.kind is GpuRequestKind.AUTO
        assert found.shape is ShapeKind.FIXED
        assert found.req is not None
        assert found.req.why_fixed == "no-script"
        assert "model=vit" in done.stdout
        assert "ordered but not resized" in done.stderr


REFUSALS: dict[str, tuple[Sequence[str], Mapping[str, str], str]] = {
    "value": (["--ft-epochs=three"], {}, "--ft-epochs=three: not a decimal number; write a number"),
    "pair": (["--ft-epochs=3", "--ft-steps=4"], {}, "--ft-steps=4: --ft-epochs=3 is also given"),
    "twin": ([], {"SLURM_FT_SAMPLES": "lots"}, "environment variable SLURM_FT_SAMPLES: "),
}


@pytest.mark.parametrize("command", ["sbatch", "salloc", "srun"])
@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_option_stops_the_submission(cluster: Cluster, command: str, name: str) -> None:
    options, env, words = REFUSALS[name]
    job = ["--wrap=true"] if command == "sbatch" else ["true"]
    done = cluster.exec([command, *options, *job], user="alice", env=env, check=False)
    assert done.rc != 0
    assert words in done.stderr
    assert not _jobs(cluster)


def _jobs(cluster: Cluster) -> list[list[str]]:
    return cluster.squeue("%i", "--states=PENDING,RUNNING")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--comment=ft: epochs=three", "--gres=gpu:1"], "--comment: --ft-epochs=three: "),
        (["-n4", "--gpus=4", "--ft-gpus=auto"], "-n 4 --gpus-per-task=1"),
        (["-n3", "--gpus-per-task=1", "--ft-gpus=1,2"], "requested 3 GPUs are not in the list"),
        (["--ft-gpus=auto"], "the job asks for no GPU"),
        (["-n2", "--gpus-per-task=2", "--ft-gpus=auto"], "--gpus-per-task=2 cannot be resized"),
    ],
)
def test_slurmctld_refuses_what_only_it_can_see(
    cluster: Cluster, options: list[str], words: str
) -> None:
    done = cluster.exec(["sbatch", *options, "--wrap=true"], user="alice", check=False)
    assert done.rc != 0
    assert words in done.stderr
    assert not _jobs(cluster)


def test_help_shows_every_option_with_its_value(cluster: Cluster) -> None:
    said = cluster.exec(["sbatch", "--help"], user="alice").stdout
    for option in OPTIONS:
        assert f"{option.flag}={option.metavar}" in said


def test_the_grace_puts_only_resizable_jobs_off(cluster: Cluster) -> None:
    script = "#!/bin/bash\ntrue\n"
    shape = ["-n1", "--gpus-per-task=1", "--ft-model=vit"]
    resizable = cluster.sbatch(script, *shape, "--ft-gpus=auto")
    told = cluster.job(resizable)
    assert (told["JobState"], told["Reason"]) == ("PENDING", "BeginTime")
    fixed = cluster.sbatch(script, *shape)
    assert cluster.job(fixed)["EligibleTime"] == cluster.job(fixed)["SubmitTime"]
    before = time.time()
    own = cluster.sbatch(script, *shape, "--ft-gpus=auto", _held_back(3600))
    begin_s = _directive(cluster, own).begin_s
    assert begin_s is not None
    assert 3590 <= begin_s - before <= 3660
    # It expires by itself: nobody has to lift it.
    cluster.wait_state(resizable, "COMPLETED", limit_s=40)


def test_a_user_can_change_neither_the_directive_nor_forge_one(cluster: Cluster) -> None:
    job_id = cluster.sbatch("#!/bin/bash\ntrue\n", "--gres=gpu:1", "--ft-samples=5", _held_back())
    change = 'AdminComment=ft:{"v":1,"samples":9}'
    done = cluster.exec(
        ["scontrol", "update", f"JobId={job_id}", change], user="alice", check=False
    )
    assert done.rc != 0
    assert _directive(cluster, job_id).samples == 5


def _await_idle(cluster: Cluster) -> None:
    """Nothing drained a node: all become idle again."""
    cluster.wait(lambda: set(cluster.node_states().values()) == {"idle"}, 20, "idle nodes")


def test_the_plugin_without_lua_lets_jobs_run(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster(nodes=1, lua=False)
    job_id = cluster.sbatch(
        "#!/bin/bash\nsrun printenv FT_MODEL\n",
        "--output=%j.out",
        "--gres=gpu:1",
        "--ft-model=vit",
        "--ft-gpus=auto",
    )
    assert cluster.wait_state(job_id, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    assert cluster.get(f"/home/alice/{job_id}.out").decode() == "vit\n"


def test_passive_accepts_every_script_and_a_missing_plugin_does_not(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster(nodes=1)
    conf = "/etc/slurm/plugstack.conf.d/slurm-ext.conf"
    script = "#!/bin/bash\n#SBATCH --ft-model=vit --ft-epochs=three --ft-steps=4\nsrun true\n"
    active = cluster.get(conf).decode()
    containers = cluster.containers()
    for container in containers:
        cluster.put(conf, active.rstrip("\n") + " passive\n", container=container)
    job_id = cluster.sbatch(script, "--gres=gpu:1", env={"SLURM_FT_SAMPLES": "lots"})
    done = cluster.wait_state(job_id, "COMPLETED", "FAILED")
    assert done["JobState"] == "COMPLETED"
    assert "ft:{" not in done.get("AdminComment", "")
    _await_idle(cluster)

    # A compute node whose plugin file is gone still runs jobs with directives.
    for container in containers:
        cluster.put(conf, active, container=container)
    (node,) = [name for name in containers if name != "ctl"]
    plugin = cluster.exec(
        ["sh", "-c", "ls /usr/lib/*/slurm-wlm/slurm_ext.so"], container=node
    ).stdout.strip()
    cluster.exec(["mv", plugin, f"{plugin}.away"], container=node)
    job_id = cluster.sbatch("#!/bin/bash\nsrun true\n", "--gres=gpu:1", "--ft-model=vit")
    assert cluster.wait_state(job_id, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    _await_idle(cluster)

    # Without the line the options are unknown to sbatch: what passive mode is for.
    cluster.exec(["rm", conf])
    refused = cluster.exec(["sbatch"], user="alice", stdin=script, check=False)
    assert refused.rc != 0
    assert "--ft-model" in refused.stderr

"""Rank, size, GPUs and ids, from recorded environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ft.launch.errors import UsageError
from slurm_ft.launch.identity import Identity, job_name, same_job
from slurm_ft.launch.launchers import Judgement, judge, keep, recall, started_by

# From 24.11, `sbatch -N2 -n4 --gpus-per-task=1`: what the batch script sees, and task 3 of srun.
BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_CLUSTER_NAME": "ft",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "3",
    "SLURM_TRES_PER_TASK": "gres/gpu=1",
    "SLURM_JOB_NODELIST": "n[2,4]",
    "SLURM_SUBMIT_DIR": "/home/alice",
}
STEP = {
    **BATCH,
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[2,4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}


def identity(env: dict[str, str], *command: str, launcher: str = "auto") -> Identity:
    return Identity(env, command or ("python", "train.py"), launcher)


@pytest.mark.parametrize(
    ("env", "command", "words"),
    [
        (BATCH, "python", "this job has 4 tasks"),
        ({**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}, "python", "has 2 nodes"),
        ({**BATCH, "SLURM_JOB_NUM_NODES": "2"}, "torchrun", "has 4 tasks"),
        # One torchrun on one node is all that such a job needs.
        ({**BATCH, "SLURM_JOB_NUM_NODES": "1"}, "torchrun", ""),
        ({**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, "python", ""),
        (BATCH, "/usr/bin/mpirun", ""),
        ({**BATCH, "RANK": "0", "WORLD_SIZE": "1"}, "python", ""),
        ({**BATCH, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "python", ""),
        (STEP, "python", ""),
        ({}, "python", ""),
    ],
)
def test_one_rank_of_a_job_of_many_tasks_is_told_to_use_srun(
    env: dict[str, str], command: str, words: str
):
    told = identity(env, command).alone((command,), env)
    assert words in told
    assert bool(told) is bool(words)


def test_a_task_of_a_step():
    found = identity(STEP)
    assert (found.rank, found.size, found.local_rank) == (3, 4, 0)
    assert (found.job_id, found.base_id, found.cluster) == ("12", 12, "ft")
    assert found.head() == "n2"
    assert found.gpus == 4
    assert not found.leads
    assert not found.launcher


def test_the_batch_script_itself_is_one_rank_whatever_ntasks_says():
    found = identity(BATCH)
    assert (found.rank, found.size, found.in_step) == (0, 1, False)
    assert found.head() == "127.0.0.1"


def test_outside_slurm():
    found = identity({})
    assert (found.job_id, found.rank, found.size, found.gpus) == ("", 0, 1, 0)


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "2"}, (7, 9, 2)),
        ({"WORLD_SIZE": "9"}, (3, 4, 0)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (5, 6, 1),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
        ({"RANK": "many", "WORLD_SIZE": ""}, (3, 4, 0)),
    ],
)
def test_who_knows_the_rank_best(more: dict[str, str], place: tuple[int, int, int]):
    found = identity({**STEP, **more})
    assert (found.rank, found.size, found.local_rank) == place


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "12"}, "12"),
        (
            {
                "SLURM_JOB_ID": "1235",
                "SLURM_ARRAY_JOB_ID": "1234",
                "SLURM_ARRAY_TASK_ID": "2",
            },
            "1234_2",
        ),
        # The last task of an array has the array's own id.
        (
            {
                "SLURM_JOB_ID": "1234",
                "SLURM_ARRAY_JOB_ID": "1234",
                "SLURM_ARRAY_TASK_ID": "3",
            },
            "1234_3",
        ),
        ({"SLURM_JOB_ID": "junk"}, ""),
    ],
)
def test_sig_array_names(env: dict[str, str], name: str):
    assert job_name(env) == name


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"SLURM_GPUS_PER_TASK": "2"}, 8),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:v100=1"}, 4),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:2"}, 8),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, 6),
        # --gpus=5 over two nodes: 3 here, 2 there.
        ({"SLURM_GPUS": "5", "SLURM_TRES_PER_TASK": ""}, 5),
        # What was submitted, before the job was given another size.
        ({"SLURM_GPUS": "", "SLURM_TRES_PER_TASK": ""}, 6),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_TRES_PER_TASK": ""}, 0),
    ],
)
def test_gpus_of_the_step(env: dict[str, str], gpus: int):
    assert identity({**STEP, "SLURM_GPUS_ON_NODE": "3", **env}).gpus == gpus


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", "--nnodes=2", "train.py"], True),
        (["/opt/env/bin/torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["python3.13", "-u", "/opt/env/bin/torchrun", "train.py"], True),
        (["accelerate", "launch", "train.py"], True),
        (["python", "train.py", "torchrun"], False),
        (["python", "-m", "train", "-m", "torch.distributed.run"], False),
        (["bash", "torchrun"], False),
        (["deepspeed", "train.py"], True),
        (["python", "-m", "slurm_ft.train"], False),
        (["python"], False),
        ([], False),
    ],
)
def test_launchers_by_their_command_line(command: list[str], launcher: bool):
    assert bool(started_by(command)) == launcher
    assert identity(STEP, *command).launcher == (launcher and bool(command))


def per_node(gpus: int, **more: str) -> dict[str, str]:
    """A task of a step with one task on each of two nodes, whose GPUs were asked for by node."""
    step = {name: value for name, value in STEP.items() if name != "SLURM_TRES_PER_TASK"}
    return {**step, "SLURM_STEP_NUM_TASKS": "2", "SLURM_GPUS_ON_NODE": str(gpus), **more}


TRAINER = ("python", "-u", "-m", "slurm_ft.train", "--steps=3")


def test_launchers_by_their_shape():
    assert identity(per_node(4), "bash", "run.sh").launcher
    assert identity(per_node(4), "python", "train.py").launcher
    assert not identity(per_node(4), "bash", "run.sh", launcher="no").launcher
    assert not identity(per_node(1), "bash", "run.sh").launcher
    assert identity(STEP, launcher="yes").launcher


def test_our_own_trainer_is_no_launcher_wherever_it_stands():
    assert not identity(per_node(4), *TRAINER).judged.guessed
    for env in (per_node(4), per_node(4, SLURM_NTASKS_PER_NODE="1")):
        assert not identity(env, *TRAINER).launcher
    assert identity(per_node(4), "python", "-m", "slurm_ftx").launcher
    assert identity(per_node(4), *TRAINER, launcher="yes").launcher


@pytest.mark.parametrize(
    "asked", [{"SLURM_GPUS_PER_TASK": "2"}, {"SLURM_TRES_PER_TASK": "gres/gpu=2"}]
)
def test_tasks_with_gpus_of_their_own_are_ranks_on_one_node_and_on_two(asked: dict[str, str]):
    """``--ntasks=2 --gpus-per-task=2``: placed on one node at first, then on a node each."""
    together = per_node(4, SLURM_STEP_NUM_NODES="1", **asked)
    apart = per_node(2, **asked)
    for env in (together, apart):
        judged = identity(env, "python", "train.py").judged
        assert (judged.launcher, judged.guessed) == (False, False)
    # One task per node was asked for: wherever they stand, it is one.
    assert identity({**apart, "SLURM_NTASKS_PER_NODE": "1"}, "python", "train.py").launcher


def test_only_what_the_form_of_the_step_says_is_a_guess():
    def judged(*command: str, tasks: int = 2, on_node: int = 2, per_task: int = 0) -> Judgement:
        return judge(command, tasks=tasks, nodes=2, on_node=on_node, asked=0, per_task=per_task)

    assert judged("python", "train.py").guessed
    assert judged("python", "train.py", on_node=1).guessed
    assert judged("python", "train.py", tasks=4).guessed
    assert not judged("python", "train.py", tasks=0).guessed
    assert not judged("python", "train.py", per_task=2).guessed
    assert not judged("torchrun", "train.py").guessed
    assert not judged(*TRAINER).guessed


def test_a_guess_is_kept_for_the_program_of_a_step(tmp_path: Path):
    directory, program = str(tmp_path), ("python", "-u", "train.py", "--from=0")
    assert recall(directory, "77", 1, program) is None
    keep(directory, "77", 1, program, Judgement(True, "of its form", guessed=True))
    known = recall(directory, "77", 1, ("python", "-u", "train.py", "--from=30"))
    assert known is not None
    assert known.launcher
    assert known.because.startswith("of its form")
    for job, step, command in (
        ("78", 1, program),
        ("77", 0, program),
        ("77", 1, ("python", "prepare.py")),
    ):
        assert recall(directory, job, step, command) is None
    keep(directory, "77", 1, program, Judgement(False, guessed=True))
    known = recall(directory, "77", 1, program)
    assert known is not None
    assert not known.launcher
    (path,) = tmp_path.iterdir()
    path.write_text("perhaps")
    assert recall(directory, "77", 1, program) is None
    # Nowhere to keep it: guessed again.
    keep("", "77", 1, program, Judgement(True))
    keep(str(tmp_path / "gone"), "77", 1, program, Judgement(True))
    assert recall("", "77", 1, program) is None


def test_sig_array_ids_inherited_from_the_job_that_submitted_this_one():
    """sig-array: with them, job 12 would requeue task 1_3 and share its directories."""
    inherited = {**STEP, "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}
    assert identity(inherited).job_id == "1_3"  # nothing says otherwise yet
    # The plugin told the batch script which job it is.
    found = identity({**inherited, "FT_SLURM_JOB": "12"})
    assert (found.job_id, found.base_id, found.said) == ("12", 12, "12")
    # Without the plugin: what an ft-run in the outer job left.
    found = identity({**inherited, "FT_SLURM_JOB": "2 1_3"})
    assert (found.job_id, found.base_id) == ("12", 12)
    # A job of that kind which is an array of its own.
    own = {**STEP, "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "4"}
    for said in ("2 1_3", "12 10_4", "", "nonsense"):
        assert identity({**own, "FT_SLURM_JOB": said}).job_id == "10_4"
    assert identity({**own, "FT_SLURM_JOB": "12 10_4"}).said == "12 10_4"


def test_the_ft_run_further_up_is_of_this_job_or_not():
    assert same_job({**STEP, "FT_JOB_ID": "12"})
    assert not same_job({**STEP, "FT_JOB_ID": "1_3"})
    assert not same_job(STEP)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("x", "4"), ("", "4"), ("-1", "2")])
def test_a_rank_that_does_not_exist_is_an_error_and_not_rank_0(rank: str, size: str):
    with pytest.raises(UsageError, match=f"RANK={rank} is no rank of WORLD_SIZE={size}"):
        identity({**STEP, "RANK": rank, "WORLD_SIZE": size})

"""ft-run as a process: the environment that the program gets, and its exit code."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_ext.domain.attempt import Cause
from tests.wrappers.launched import (
    FT_RUN,
    ROOT,
    SHOW_ENVIRONMENT,
    Slurm,
    clean_environment,
    environment_of,
    ledger,
)


def test_the_program_gets_its_place_from_the_step(slurm: Slurm):
    env = environment_of(
        slurm,
        SLURM_STEP_NUM_TASKS="8",
        SLURM_STEP_NUM_NODES="2",
        SLURM_PROCID="5",
        SLURM_LOCALID="1",
        SLURM_GPUS_PER_TASK="1",
        SLURM_RESTART_COUNT="3",
    )
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("5", "8", "1")
    assert env["MASTER_ADDR"] == "n07"
    assert env["FT_GPUS"] == "8"
    assert (env["FT_JOB_ID"], env["FT_ATTEMPT"]) == ("77", "3")
    assert env["FT_CHECKPOINT_DIR"] == f"{slurm.root}/ft-checkpoints/77"
    assert Path(env["FT_STATE_DIR"]).stat().st_mode & 0o777 == 0o700
    assert float(env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > float(env["FT_COLLECTIVE_TIMEOUT_S"])


def test_a_program_that_takes_no_chain_up_is_told(slurm: Slurm, tmp_path: Path):
    chain = tmp_path / "tasks.yaml"
    chain.write_text("- {name: a}\n")
    code, _, err = slurm.run(f"--chain={chain}", "--", "true")
    assert code == 0
    assert f"without looking at the tasks of {chain}" in err
    announce = "mkdir -p $FT_STATE_DIR/chain.d && touch $FT_STATE_DIR/chain.d/given"
    code, _, err = slurm.run(f"--chain={chain}", "--", "sh", "-c", announce)
    assert (code, "without looking" in err) == (0, False)
    code, _, err = slurm.run("--", "true")
    assert (code, "without looking" in err) == (0, False)


def test_what_the_user_has_set_stays(slurm: Slurm):
    env = environment_of(
        slurm,
        MASTER_PORT="4444",
        MASTER_ADDR="elsewhere",
        FT_CHECKPOINT_DIR="/data/mine",
        RANK="2",
        WORLD_SIZE="4",
    )
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("elsewhere", "4444")
    assert (env["RANK"], env["WORLD_SIZE"], env["FT_CHECKPOINT_DIR"]) == ("2", "4", "/data/mine")


def test_a_job_submitted_from_inside_a_job_takes_nothing_of_it(slurm: Slurm):
    outer = environment_of(slurm, "--collective-timeout=90")
    inner = {k: v for k, v in outer.items() if not k.startswith("SLURM_") and k != "PATH"}
    env = environment_of(
        slurm, **inner, SLURM_JOB_ID="78", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2"
    )
    assert (env["RANK"], env["WORLD_SIZE"]) == ("1", "2")
    assert env["FT_STATE_DIR"].endswith("lab-78")
    assert env["FT_CHECKPOINT_DIR"].endswith("ft-checkpoints/78")
    # What was said on a command line is the user's word, and goes where the environment goes.
    assert env["FT_COLLECTIVE_TIMEOUT_S"] == "90"


def test_the_port_changes_with_the_attempt(slurm: Slurm):
    ports = {
        environment_of(slurm, SLURM_RESTART_COUNT=str(attempt))["MASTER_PORT"]
        for attempt in range(3)
    }
    assert len(ports) == 3


def test_a_launcher_numbers_its_ranks_itself(slurm: Slurm):
    env = environment_of(
        slurm,
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="4",
        SLURM_PROCID="1",
    )
    assert "RANK" not in env
    assert "WORLD_SIZE" not in env
    assert env["FT_GPUS"] == "8"
    assert env["MASTER_ADDR"] == "n07"
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 30


def placed(slurm: Slurm, nodes: int, attempt: int, *options: str, **more: str) -> tuple[bool, str]:
    """Two tasks on 4 GPUs, placed on one node or on two: whether they got ranks, and the words."""
    code, out, err = slurm.run(
        *options,
        *SHOW_ENVIRONMENT,
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NUM_NODES=str(nodes),
        SLURM_GPUS_ON_NODE=str(4 // nodes),
        SLURM_RESTART_COUNT=str(attempt),
        **more,
    )
    assert code == 0, err
    return "RANK" in json.loads(out)[0], err


def test_a_job_has_ranks_or_a_launcher_wherever_its_attempts_are_placed(slurm: Slurm):
    asked = {"SLURM_GPUS_PER_TASK": "2"}
    assert placed(slurm, 1, 0, **asked) == (True, "")
    assert placed(slurm, 2, 1, **asked) == (True, "")


@pytest.mark.parametrize("first", [1, 2])
def test_what_the_first_attempt_guessed_of_a_job_holds(slurm: Slurm, first: int):
    began = placed(slurm, first, 0)[0]
    assert began is (first == 1)
    for nodes in (1, 2):
        ranks, err = placed(slurm, nodes, 1)
        assert ranks is began
        assert ("when this job began" in err) is not began
    # What the user says goes before it.
    assert placed(slurm, first, 1, "--launcher=no")[0]
    assert not placed(slurm, first, 1, "--launcher=yes")[0]


def test_that_a_command_was_taken_for_a_launcher_is_said_once(slurm: Slurm):
    err = placed(slurm, 2, 0)[1]
    assert "taken for a launcher, because one task stands on each node, with 2 GPUs" in err
    assert "--launcher=no" in err
    assert placed(slurm, 2, 0, SLURM_PROCID="1") == (False, "")
    assert placed(slurm, 2, 0, "--launcher=yes") == (False, "")
    _, err = placed(slurm, 2, 0, SLURM_NTASKS_PER_NODE="1")
    assert "--ntasks-per-node=1 was asked for" in err


def test_mpirun_as_the_command_numbers_its_ranks_itself(slurm: Slurm):
    """RANK=0 and WORLD_SIZE=1 would reach each of them and make it train alone."""
    mpirun = slurm.root / "bin" / "mpirun"
    mpirun.write_text('#!/bin/sh\nexec "$@"\n')
    mpirun.chmod(0o755)
    code, out, err = slurm.run("--", "mpirun", *SHOW_ENVIRONMENT[1:])
    assert (code, err) == (0, "")
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & json.loads(out)[0].keys()


def test_the_plan_becomes_variables_and_arguments(slurm: Slurm):
    plans = slurm.root / "spool" / "plans"
    plans.mkdir(parents=True)
    document: dict[str, Any] = {
        "version": 1,
        "base_id": 77,
        "attempt": 0,
        "decision": {
            "configuration": {
                "gpus": 8,
                "local_batch": 16,
                "accumulation": 2,
                "precision": "bf16",
                "grad_checkpointing": True,
                "frozen": "none",
                "stages": 1,
                "micro_batches": 1,
            }
        },
    }
    (plans / "77.json").write_text(json.dumps(document))
    code, out, err = slurm.run(
        "--ft-arg=--batch={local_batch}",
        "--ft-arg=--accumulate={accumulation}",
        *SHOW_ENVIRONMENT,
        "given",
        SLURM_STEP_NUM_TASKS="4",
        SLURM_GPUS_PER_TASK="1",
    )
    assert code == 0
    env, argv = json.loads(out)
    # Granted beats planned: half the GPUs, twice the accumulation, the same global batch.
    assert argv == ["given", "--batch=16", "--accumulate=4"]
    assert (env["FT_GPUS"], env["FT_GLOBAL_BATCH"], env["FT_PRECISION"]) == ("4", "256", "bf16")
    assert env["FT_PLAN_DIGEST"] != "plain"
    assert "the plan is for 8 GPUs, Slurm granted 4" in err


def test_without_a_plan_an_argument_that_needs_one_is_left_out(slurm: Slurm):
    code, out, _ = slurm.run(
        "--ft-arg=--batch={local_batch}", "--ft-arg=--lr={local_batch=32}", *SHOW_ENVIRONMENT
    )
    assert code == 0
    assert json.loads(out)[1] == ["--lr=32"]


def test_outside_slurm_it_is_one_rank(tmp_path: Path):
    env = {**clean_environment(), "PYTHONPATH": f"{ROOT / 'wrappers'}:{ROOT}"}
    done = subprocess.run(
        [*FT_RUN, *SHOW_ENVIRONMENT], env=env, cwd=tmp_path, capture_output=True, timeout=30
    )
    assert done.returncode == 0
    assert done.stderr == b""
    found = json.loads(done.stdout)[0]
    assert (found["RANK"], found["WORLD_SIZE"]) == ("0", "1")
    assert "FT_STATE_DIR" not in found
    assert list(tmp_path.iterdir()) == []


def test_standard_input_reaches_the_program(slurm: Slurm):
    done = subprocess.run(
        [*FT_RUN, "--", "/bin/cat"],
        env=slurm.variables,
        input=b"one\ntwo\n",
        capture_output=True,
        timeout=30,
    )
    assert done.stdout == b"one\ntwo\n"


# -- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 3, 85, 126])
def test_the_program_s_exit_code_is_passed_through(slurm: Slurm, code: int):
    """85 is a session's code for "requeue": without a session that says so it is just a code."""
    found, _, err = slurm.run("--", "/bin/sh", "-c", f"exit {code}")
    assert found == code
    assert slurm.calls("requeue") == []
    assert ("is not requeued" in err) == (code != 0)
    assert ledger(slurm)[0].cause is (Cause.USER_ERROR if code else Cause.COMPLETED)


def test_a_death_by_signal_is_told_as_a_shell_does(slurm: Slurm):
    code, _, _ = slurm.run("--", "/bin/sh", "-c", "kill -SEGV $$")
    assert code == 128 + signal.SIGSEGV


def test_a_command_that_cannot_run(slurm: Slurm, tmp_path: Path):
    assert slurm.run("--", "no-such-program")[0] == 127
    (tmp_path / "plain").write_text("text")
    code, _, err = slurm.run("--", str(tmp_path / "plain"))
    assert code == 126
    assert str(tmp_path / "plain") in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--no-such"], "--no-such: no such option"),
        (["--grace=soon", "--", "true"], "--grace=soon"),
        (["--signals=KILL", "--", "true"], "--signals=KILL"),
        (["--ft-arg={gpu}", "--", "true"], "the names are gpus, nodes"),
        (["--max-requeues=bored=3", "--", "true"], "'bored' is no cause"),
        (["--collective-timeout=1e6", "--", "true"], "--collective-timeout=1e+06"),
        (["--chain=/nonexistent.yaml", "--", "true"], "--chain=/nonexistent.yaml: no such file"),
        (["--on-preempt-each", "--", "true"], "add --on-preempt=COMMAND"),
        ([], "no command"),
    ],
)
def test_a_slip_of_the_hand_is_an_error_before_anything_starts(
    slurm: Slurm, options: list[str], words: str
):
    code, _, err = slurm.run(*options)
    assert code == 2
    assert words in err
    assert slurm.calls() == []

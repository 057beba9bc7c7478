"""ft-run as a process: environment, exit codes, signals, requeue, the ledger."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm_ext.domain.attempt import Attempt, Attempts, Cause, parse_attempts
from slurm_ft import exits
from tests.wrappers.launched import (
    FT_RUN,
    ROOT,
    Slurm,
    alive,
    await_true,
    clean_environment,
    finish,
    program,
    ready,
)

SHOW_ENVIRONMENT = (
    "--",
    sys.executable,
    "-c",
    "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], sys.stdout)",
)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def ledger(slurm: Slurm, job_id: str = "77") -> tuple[Attempt, ...]:
    path = slurm.home / ".slurm-ext" / "state" / f"lab-{job_id}" / f"attempts-{job_id}.json"
    return parse_attempts(path.read_text(), str(path)).attempts


def environment_of(slurm: Slurm, *options: str, **variables: str) -> dict[str, str]:
    code, out, err = slurm.run(*options, *SHOW_ENVIRONMENT, **variables)
    assert code == 0, err
    found: dict[str, str] = json.loads(out)[0]
    return found


# -- what the program gets ----------------------------------------------------------------------


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


# -- leaving and coming back --------------------------------------------------------------------


def leave(
    slurm: Slurm,
    *options: str,
    number: int = signal.SIGUSR2,
    behave: tuple[str, ...] = (),
    **variables: str,
) -> tuple[int, str, str]:
    """Start the program, signal its ft-run, and wait for the end."""
    mark = slurm.root / "ready"
    mark.unlink(missing_ok=True)
    process = slurm.start(*options, *program(f"--ready={mark}", *behave), **variables)
    ready(mark)
    process.send_signal(number)
    return finish(process)


def began_long_ago(slurm: Slurm) -> None:
    """An attempt that goes on since longer than one that had no time to save anything."""
    slurm.state.mkdir(parents=True, exist_ok=True)
    begun = Attempts("77", (Attempt(0, time.time() - 1000.0, 1),))
    (slurm.state / "attempts-77.json").write_text(begun.to_json())


def soon(seconds: float) -> str:
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


def test_near_the_time_limit_the_job_is_requeued_once(slurm: Slurm):
    slurm.record(end=soon(90))
    code, out, err = leave(slurm)
    assert code == exits.REQUEUE
    assert f"heard {signal.SIGUSR2:d}" in out
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "job 77 comes back" in err
    last = ledger(slurm)[-1]
    assert (last.cause, last.requeued, last.saved_step) == (Cause.TIME_LIMIT, True, 10)


def test_sig_term_only(slurm: Slurm):
    """sig-term-only: the time limit was reached, TERM is all that comes."""
    slurm.record(state="COMPLETING", reason="TimeLimit", end=soon(0))
    code, out, _ = leave(slurm, number=signal.SIGTERM)
    assert code == exits.REQUEUE
    assert "heard 15" in out
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert ledger(slurm)[-1].cause is Cause.TIME_LIMIT


def test_sig_array_only_the_task_is_requeued(tmp_path: Path):
    """sig-array: the raw id of a task, or the array's, would requeue the whole array."""
    slurm = Slurm(tmp_path, raw=1235, SLURM_ARRAY_JOB_ID="1234", SLURM_ARRAY_TASK_ID="2")
    slurm.record(end=soon(60))
    assert leave(slurm)[0] == exits.REQUEUE
    assert slurm.calls("requeue") == ["scontrol requeue 1234_2"]
    assert ledger(slurm, "1234_2")[-1].requeued


def test_slurm_requeues_what_it_preempts(slurm: Slurm):
    slurm.record(preempt=f"PreemptTime={soon(0)} ")
    code, _, err = leave(slurm, number=signal.SIGTERM)
    assert code == exits.REQUEUE
    assert slurm.calls("requeue") == []
    assert "Slurm preempted the job and requeues it" in err
    assert ledger(slurm)[-1].cause is Cause.PREEMPTED


def test_preempt_cancel_cluster(slurm: Slurm):
    """preempt-cancel-cluster: where preemption cancels, the job would never come back."""
    (slurm.root / "mode").write_text("CANCEL")
    slurm.record(preempt=f"PreemptTime={soon(0)} ", state="COMPLETING")
    assert leave(slurm, number=signal.SIGTERM)[0] == exits.REQUEUE
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_a_cancelled_job_stays_cancelled(slurm: Slurm):
    slurm.record(state="COMPLETING", end=soon(0))
    code, _, err = leave(slurm, number=signal.SIGTERM)
    assert code == exits.REQUEUE
    assert slurm.calls("requeue") == []
    assert "the job was cancelled" in err


def test_a_job_that_may_not_be_requeued_says_how(slurm: Slurm):
    slurm.record(end=soon(60), requeue="0")
    _, _, err = leave(slurm)
    assert slurm.calls("requeue") == []
    assert "submit it with --requeue" in err


def test_requeue_never(slurm: Slurm):
    slurm.record(end=soon(60))
    _, _, err = leave(slurm, "--no-requeue")
    assert slurm.calls("requeue") == []
    assert "--requeue=never" in err


def test_the_controller_comes_back(slurm: Slurm):
    slurm.record(end=soon(90))
    (slurm.root / "away").write_text("3")
    assert leave(slurm)[0] == exits.REQUEUE
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_a_refused_requeue_is_told_and_kept(slurm: Slurm):
    slurm.record(end=soon(90))
    (slurm.root / "refuse").write_text("Requested operation is presently disabled for job 77")
    code, _, err = leave(slurm)
    assert code == exits.REQUEUE
    assert "Slurm refused to requeue it" in err
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert not ledger(slurm)[-1].requeued


def test_a_lost_peer_brings_the_job_back_five_times(slurm: Slurm):
    for attempt in range(6):
        slurm.record(restarts=str(attempt))
        code, _, err = slurm.run(
            *program("--after=0", "--leaving=lost peer", f"--saved={attempt + 1}"),
            SLURM_RESTART_COUNT=str(attempt),
        )
        assert code == exits.ABANDONED
    assert len(slurm.calls("requeue")) == 5
    assert "requeued 5 of 5 times for this already" in err


def test_requeue_storm_counters_are_separate(slurm: Slurm):
    """requeue-storm: what lost peers used up does not count against the time limit."""
    earlier = [
        Attempt(n, 1000.0 * n, 1, ended_s=1000.0 * n + 900, cause=Cause.LOST_PEER, requeued=True)
        for n in range(5)
    ]
    slurm.state.mkdir(parents=True)
    path = slurm.state / "attempts-77.json"
    path.write_text(Attempts("77", tuple(earlier)).to_json())
    slurm.record(restarts="5", end=soon(60))
    assert leave(slurm, SLURM_RESTART_COUNT="5")[0] == exits.REQUEUE
    assert len(slurm.calls("requeue")) == 1


def test_attempts_without_progress_end(slurm: Slurm):
    for attempt in range(3):
        slurm.record(restarts=str(attempt))
        _, _, err = slurm.run(
            *program("--after=0", "--leaving=lost peer", "--restored=7", "--saved=7"),
            SLURM_RESTART_COUNT=str(attempt),
        )
    assert len(slurm.calls("requeue")) == 2
    assert "3 attempts in a row saved nothing new" in err


def test_an_attempt_that_nobody_closed_is_closed_from_the_accounting(slurm: Slurm):
    slurm.state.mkdir(parents=True)
    path = slurm.state / "attempts-77.json"
    path.write_text(Attempts("77", (Attempt(0, 1000.0, 4),)).to_json())
    (slurm.root / "sacct").write_text("0|NODE_FAIL|2026-11-29T21:56:54\n1|RUNNING|Unknown\n")
    mark = slurm.root / "ready"
    process = slurm.start(*program(f"--ready={mark}"), SLURM_RESTART_COUNT="1")
    ready(mark)
    await_true(lambda: ledger(slurm)[0].cause, "cause of the first attempt")
    process.terminate()
    finish(process)
    assert ledger(slurm)[0].cause is Cause.NODE_FAIL
    assert slurm.calls("sacct") == ["sacct -D -X -P -n -j 77 -o Restarts,State,End"]


def test_no_state_directory_and_no_spool_keep_nothing_from_running(slurm: Slurm):
    blocked = slurm.root / "file"
    blocked.write_text("")
    slurm.record(end=soon(60))
    code, _, err = slurm.run("--", "/bin/sh", "-c", "exit 0", FT_STATE_DIR=f"{blocked}/state")
    assert code == 0
    assert "attempts of this job are not counted" in err


def test_the_daemon_finds_the_attempts_in_the_spool(slurm: Slurm):
    (slurm.root / "spool" / "plans").mkdir(parents=True)
    assert slurm.run("--", "/bin/true")[0] == 0
    copy = slurm.root / "spool" / str(os.getuid()) / "attempts-77.json"
    assert parse_attempts(copy.read_text(), "copy").attempts == ledger(slurm)


def test_log_overwrite_is_warned_about(slurm: Slurm):
    """log-overwrite: a requeue empties the output, where nobody asked for appending."""
    _, _, err = slurm.run("--", "/bin/true", SLURM_OPEN_MODE="")
    assert "--open-mode=append" in err
    _, _, err = slurm.run("--", "/bin/true")
    assert "--open-mode" not in err
    # No batch script, so no output file of Slurm's: srun at a terminal.
    _, _, err = slurm.run("--", "/bin/true", SLURM_OPEN_MODE="", ENVIRONMENT="")
    assert "--open-mode" not in err


def test_sig_usr1_nccl_is_warned_about(slurm: Slurm):
    """sig-usr1-nccl: NCCL may swallow USR1."""
    _, _, err = slurm.run("--signals=USR1", "--", "/bin/true")
    assert "USR1" in err
    assert slurm.run("--", "/bin/true")[2] == ""


# -- programs that do not cooperate -------------------------------------------------------------


def test_a_deaf_program_is_killed_in_time_and_the_job_comes_back(slurm: Slurm):
    slurm.record(end=soon(60))
    code, _, _ = leave(slurm, "--grace=1", behave=("--deaf", "--after=60"))
    assert code == 128 + signal.SIGKILL
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert ledger(slurm)[-1].cause is Cause.TIME_LIMIT


def test_a_program_without_a_session_is_not_requeued_blindly(slurm: Slurm):
    slurm.record(end=soon(60))
    began_long_ago(slurm)
    code, _, err = leave(slurm, behave=("--bare",))
    assert code == 128 + signal.SIGUSR2
    assert slurm.calls("requeue") == []
    assert "nothing says that the program saved anything" in err
    slurm.record(end=soon(60))
    assert leave(slurm, "--requeue=always", behave=("--bare",))[0] == 128 + signal.SIGUSR2
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_a_program_that_slurm_brings_back_to_its_start_is_told(slurm: Slurm):
    """Preempted without a session: it came back, and nobody had said that all work was lost."""
    began_long_ago(slurm)
    slurm.record(preempt=f"PreemptTime={soon(0)} ")
    _, _, err = leave(slurm, behave=("--bare",))
    assert slurm.calls("requeue") == []
    assert "requeues it; nothing says that the program saved anything" in err
    assert "nothing says that the program saved anything" in ledger(slurm)[-1].reason


def test_a_failed_save_is_a_reason_in_the_ledger(slurm: Slurm):
    slurm.record(preempt=f"PreemptTime={soon(0)} ")
    words = "step 10 is not saved: rank 0: OSError: full"
    _, _, err = leave(slurm, behave=(f"--save-error={words}",))
    assert ledger(slurm)[-1].reason.endswith(f"requeues it; last save failed: {words}")
    assert f"last save failed: {words}; job 77 comes back" in err


REFUSED_PROGRAM = """
import slurm_ft
with slurm_ft.session(save=lambda directory, step: None) as ft:
    raise AssertionError("it trains")
"""


def test_a_checkpoint_directory_that_cannot_be_is_an_error_of_the_user_s(slurm: Slurm):
    """The job trained on, with a line for each failed save, and lost everything."""
    (slurm.root / "file").write_text("")
    place = slurm.root / "file" / "ck"
    argv = (f"--checkpoint-dir={place}", "--", sys.executable, "-c", REFUSED_PROGRAM)
    code, _, err = slurm.run(*argv)
    assert code == exits.REFUSED
    assert slurm.calls("requeue") == []
    assert "Traceback" not in err
    (last,) = ledger(slurm)
    assert last.cause is Cause.USER_ERROR
    assert last.reason.startswith(f"the program ended with 1: {place}: ")


def test_without_srun_a_job_of_two_tasks_is_told(slurm: Slurm):
    one = {name: "" for name in slurm.variables if name.startswith("SLURM_STEP_")}
    code, _, err = slurm.run("--", "true", SLURM_NTASKS="2", SLURM_JOB_NUM_NODES="2", **one)
    assert code == 0
    assert "this job has 2 tasks, and ft-run was not started by srun" in err


def test_the_hook_saves_for_a_program_that_knows_nothing(slurm: Slurm):
    slurm.record(end=soon(60))
    note = slurm.root / "note"
    hook = f'echo "$FT_SIGNAL $FT_CHILD_PID $FT_JOB_ID" > {note}'
    code, _, _ = leave(slurm, f"--on-preempt={hook}", behave=("--bare",))
    pid = (slurm.root / "ready").read_text().strip()
    assert note.read_text() == f"USR2 {pid} 77\n"
    # It did not die of USR2, which it does not know: it was stopped after the hook.
    assert code == 128 + signal.SIGKILL
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_a_failing_hook_is_no_save(slurm: Slurm):
    slurm.record(end=soon(60))
    began_long_ago(slurm)
    _, _, err = leave(slurm, "--on-preempt=exit 4", behave=("--bare",))
    assert slurm.calls("requeue") == []
    assert "ended with 4" in err


def test_a_session_does_without_the_hook(slurm: Slurm):
    slurm.record(end=soon(60))
    note = slurm.root / "note"
    assert leave(slurm, f"--on-preempt=touch {note}")[0] == exits.REQUEUE
    assert not note.exists()


def test_other_ranks_wait_for_the_hook_of_rank_0(slurm: Slurm):
    slurm.record(end=soon(60))
    marks = [slurm.root / f"ready{rank}" for rank in (0, 1)]
    go = slurm.root / "go"
    ranks = [
        slurm.start(
            f"--on-preempt=while [ ! -e {go} ]; do sleep 0.05; done",
            *program("--bare", f"--ready={mark}"),
            SLURM_STEP_NUM_TASKS="2",
            SLURM_PROCID=str(rank),
        )
        for rank, mark in enumerate(marks)
    ]
    pids = [ready(mark) for mark in marks]
    for process in reversed(ranks):
        process.send_signal(signal.SIGUSR2)
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(1.0)
    assert all(alive(pid) for pid in pids)
    go.touch()
    assert [finish(process)[0] for process in ranks] == [137, 137]
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_on_resume_runs_before_the_program_when_the_job_has_come_back(slurm: Slurm):
    hook = "--on-resume=echo resumed $FT_ATTEMPT"
    assert slurm.run(hook, "--", "/bin/echo", "run")[1] == "run\n"
    assert slurm.run(hook, "--", "/bin/echo", "run", SLURM_RESTART_COUNT="2")[1] == (
        "resumed 2\nrun\n"
    )
    code, out, _ = slurm.run("--on-resume=exit 9", "--", "/bin/echo", SLURM_RESTART_COUNT="2")
    assert (code, out) == (9, "")


def test_sig_bash_a_program_below_a_shell_saves_all_the_same(slurm: Slurm):
    """sig-bash: the shell dies of the signal; what runs below it is waited for."""
    slurm.record(end=soon(60))
    mark = slurm.root / "ready"
    words = " ".join(program(f"--ready={mark}")[1:])
    process = slurm.start("--", "/bin/sh", "-c", f"{words}; echo done")
    ready(mark)
    process.send_signal(signal.SIGUSR2)
    code, out, _ = finish(process)
    assert "heard 12" in out
    assert code == 128 + signal.SIGUSR2
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert ledger(slurm)[-1].saved_step == 10


def test_the_program_does_not_outlive_its_ft_run(slurm: Slurm):
    mark = slurm.root / "ready"
    process = slurm.start(*program(f"--ready={mark}"))
    pid = ready(mark)
    process.kill()
    finish(process)
    await_true(lambda: not alive(pid), "end of the program")


def test_a_rank_that_failed_by_itself_is_an_error_of_the_program(slurm: Slurm):
    """Rank 1 ends with an exception; rank 0 sees no more than that a peer is gone."""
    mark = slurm.root / "ready"
    zero = slurm.start(
        *program(f"--ready={mark}", "--after=2", "--leaving=lost peer"), SLURM_STEP_NUM_TASKS="2"
    )
    ready(mark)
    code, _, _ = slurm.run(
        *program("--after=0", "--exit=1"), SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1"
    )
    assert code == 1
    code, _, err = finish(zero)
    assert code == exits.ABANDONED
    assert "the program of rank 1 ended with 1" in err
    assert slurm.calls("requeue") == []


def test_other_ranks_leave_when_rank_0_has_decided(slurm: Slurm):
    """sig-step-race: with srun --kill-on-bad-exit the first code would end rank 0 as well."""
    slurm.record(end=soon(60))
    (slurm.root / "away").write_text("2")
    marks = [slurm.root / f"ready{rank}" for rank in (0, 1)]
    ranks = [
        slurm.start(*program(f"--ready={mark}"), SLURM_STEP_NUM_TASKS="2", SLURM_PROCID=str(rank))
        for rank, mark in enumerate(marks)
    ]
    for mark in marks:
        ready(mark)
    for process in ranks:
        process.send_signal(signal.SIGUSR2)
    ranks[1].wait(30)
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert [finish(process)[0] for process in ranks] == [exits.REQUEUE, exits.REQUEUE]


def test_lightning_is_left_to_requeue_by_itself(slurm: Slurm):
    script = slurm.root / "train.py"
    script.write_text(
        "import os, signal\nif 0:\n    import lightning\nos.kill(os.getppid(), 12)\n"
        "signal.pause()\n"
    )
    slurm.record(end=soon(60))
    _, _, err = slurm.run("--requeue=auto", "--", sys.executable, str(script))
    assert slurm.calls("requeue") == []
    assert "Lightning requeues by itself" in err


# -- who has a signal already -------------------------------------------------------------------


def slurmstepd(slurm: Slurm, *pids: int) -> None:
    """Signal processes as the daemon of a step does, under its name."""
    path = slurm.root / "slurmstepd"
    shutil.copy("/bin/sh", path)
    words = " ".join(str(pid) for pid in pids)
    # It stays a while: ft-run looks at who has sent the signal.
    subprocess.run([path, "-c", f"kill -USR2 {words}; sleep 1"], check=True, timeout=30)


def test_what_slurm_gave_to_the_whole_step_is_not_passed_on_again(slurm: Slurm):
    """A second signal would mean "at once, without saving"."""
    slurm.record(end=soon(60))
    mark = slurm.root / "ready"
    process = slurm.start(*program(f"--ready={mark}", "--save=0.5"))
    slurmstepd(slurm, process.pid, ready(mark))
    code, out, _ = finish(process)
    assert (code, out) == (exits.REQUEUE, f"heard {signal.SIGUSR2:d}\n")
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def test_under_proctrack_pgid_it_is_passed_on(slurm: Slurm):
    """There Slurm reaches the process group of ft-run only."""
    conf = slurm.root / "slurm.conf"
    conf.write_text("ProctrackType=proctrack/pgid\n")
    slurm.record(end=soon(60))
    mark = slurm.root / "ready"
    process = slurm.start(*program(f"--ready={mark}"), SLURM_CONF=str(conf))
    ready(mark)
    slurmstepd(slurm, process.pid)
    code, out, _ = finish(process)
    assert (code, out) == (exits.REQUEUE, f"heard {signal.SIGUSR2:d}\n")


def test_a_signal_from_elsewhere_is_passed_on_once(slurm: Slurm):
    slurm.record(end=soon(60))
    _, out, _ = leave(slurm, behave=("--save=0.5",))
    assert out == f"heard {signal.SIGUSR2:d}\n"


def test_other_signals_are_passed_on_and_mean_nothing(slurm: Slurm):
    mark = slurm.root / "ready"
    code = (
        "import os, pathlib, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})\n"
        f"pathlib.Path({str(mark)!r}).write_text(f'{{os.getpid()}}\\n')\n"
        "sys.exit(signal.sigwait({signal.SIGHUP}))\n"
    )
    process = slurm.start("--", sys.executable, "-c", code)
    ready(mark)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == signal.SIGHUP
    assert slurm.calls() == []

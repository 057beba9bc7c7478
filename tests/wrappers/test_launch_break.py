"""ft-run in hostile surroundings: what is inherited, stopped, full, or somebody else's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_ext.domain.attempt import Attempt, Attempts, Cause, parse_attempts
from slurm_ft import exits
from tests.wrappers.launched import (
    FT_RUN,
    ROOT,
    SHOW_ENVIRONMENT,
    Slurm,
    await_true,
    environment_of,
    finish,
    leave,
    ledger,
    program,
    ready,
)

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs files of another user")
SOMEBODY = 54321


# -- submitted from inside a task of an array ---------------------------------------------------


def test_sig_array_inherited_ids_never_requeue_the_other_job(tmp_path: Path):
    """sig-array: sbatch inside task 1_3 hands SLURM_ARRAY_* of it to job 77, which is no array."""
    inherited = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}
    slurm = Slurm(tmp_path, **inherited)
    slurm.record(array="")
    code, _, err = leave(slurm)
    assert code == exits.REQUEUE
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "SLURM_ARRAY_TASK_ID name 1_3, but this is job 77" in err
    assert "env -u SLURM_ARRAY_JOB_ID" in err


def test_sig_array_a_task_that_nothing_confirms_is_not_requeued(tmp_path: Path):
    """sig-array: a record that is not this job's says nothing; better lost than another job hit."""
    slurm = Slurm(tmp_path, SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="3")
    slurm.record(raw="78")
    _, _, err = leave(slurm)
    assert slurm.calls("requeue") == []
    assert "it is not certain that this is 1_3" in err
    assert "is not requeued" in err


def test_what_the_plugin_says_of_the_job_beats_inherited_array_ids(slurm: Slurm):
    env = environment_of(slurm, SLURM_ARRAY_JOB_ID="1", SLURM_ARRAY_TASK_ID="3", FT_SLURM_JOB="77")
    assert env["FT_JOB_ID"] == "77"
    assert env["FT_CHECKPOINT_DIR"].endswith("/77")
    env = environment_of(
        slurm, SLURM_ARRAY_JOB_ID="76", SLURM_ARRAY_TASK_ID="3", FT_SLURM_JOB="77 76_3"
    )
    assert (env["FT_JOB_ID"], env["FT_SLURM_JOB"]) == ("76_3", "77 76_3")


def test_the_restart_count_of_the_outer_job_is_not_the_inner_one_s(slurm: Slurm):
    """Without the plugin sbatch hands SLURM_RESTART_COUNT on; nothing of job 78 came back yet."""
    outer = environment_of(slurm, SLURM_RESTART_COUNT="2")
    assert outer["FT_ATTEMPT"] == "2"
    inner = {k: v for k, v in outer.items() if not k.startswith("SLURM_") and k != "PATH"}
    inner |= {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "2"}
    slurm.raw = 78
    env = environment_of(slurm, **inner)
    assert env["FT_ATTEMPT"] == "0"
    assert "-78-0-" in env["FT_STATUS_FILE"]
    # It is its own once it differs, and once the ledger knows of an attempt before.
    assert environment_of(slurm, **{**inner, "SLURM_RESTART_COUNT": "1"})["FT_ATTEMPT"] == "1"
    assert environment_of(slurm, **inner)["FT_ATTEMPT"] == "2"


def test_the_restart_count_of_a_step_below_a_step_is_its_own(slurm: Slurm):
    """The plugin's word, or an ft-run of the same job further up, leaves no doubt."""
    outer = environment_of(slurm, SLURM_RESTART_COUNT="2")
    inner = {k: v for k, v in outer.items() if not k.startswith("SLURM_") and k != "PATH"}
    assert environment_of(slurm, **inner, SLURM_RESTART_COUNT="2")["FT_ATTEMPT"] == "2"
    said = {**inner, "FT_SLURM_JOB": "78", "SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "2"}
    assert environment_of(slurm, **said)["FT_ATTEMPT"] == "2"


def test_directories_of_the_outer_job_are_not_the_inner_ones(slurm: Slurm):
    """Also where they were given on the command line: the inner job would load that checkpoint."""
    outer = environment_of(
        slurm, f"--checkpoint-dir={slurm.root}/mine", f"--state-dir={slurm.root}/state"
    )
    assert outer["FT_CHECKPOINT_DIR"] == f"{slurm.root}/mine"
    inner = {k: v for k, v in outer.items() if not k.startswith("SLURM_") and k != "PATH"}
    env = environment_of(slurm, **inner, SLURM_JOB_ID="78")
    assert env["FT_CHECKPOINT_DIR"].endswith("ft-checkpoints/78")
    assert env["FT_STATE_DIR"].endswith("lab-78")
    # An ft-run below an ft-run of the same job goes on with what was said there.
    env = environment_of(slurm, **inner)
    assert env["FT_CHECKPOINT_DIR"] == f"{slurm.root}/mine"
    assert env["FT_STATE_DIR"] == f"{slurm.root}/state"


# -- stopped ------------------------------------------------------------------------------------

_WAIT = """
import signal
from slurm_ft.launch.waiting import wait_signal
waited = {signal.SIGCONT, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, {*waited, signal.SIGALRM})
signal.sigtimedwait({signal.SIGUSR2}, 0)
print("ready", flush=True)
for _ in range(3):
    info = wait_signal(waited, 0.3)
    print(None if info is None else info.si_signo, flush=True)
"""


def test_suspended_beyond_a_limit_is_no_signal():
    """scontrol suspend: sigtimedwait returned what lay on the stack, and ft-run died of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WAIT],
        env={"PYTHONPATH": f"{ROOT / 'wrappers'}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    await_true(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stop")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.6)  # beyond the limit of the wait
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=10)
    heard = out.split()
    assert process.returncode == 0
    assert len(heard) == 3
    assert set(heard) <= {"None", str(int(signal.SIGCONT))}


# -- wrong values, on every rank ----------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_wrong_limit_stops_every_rank_and_not_rank_0_alone(slurm: Slurm, rank: str):
    """Where rank 0 alone refuses, the others wait for it until their time-outs."""
    code, _, err = slurm.run(
        "--max-requeues=foo=3", "--", "true", SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS="2"
    )
    assert code == 2
    assert "--max-requeues=foo=3: 'foo' is no cause" in err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FT_GRACE_S", "abc", "FT_GRACE_S=abc: not a time"),
        ("FT_SIGNALS", "USR9", "FT_SIGNALS=USR9: 'USR9'"),
        ("FT_REQUEUE", "maybe", "FT_REQUEUE=maybe: not one of"),
        ("FT_MAX_REQUEUES", "time-limit", "FT_MAX_REQUEUES=time-limit:"),
        ("FT_CHECKPOINT_INTERVAL", "9-3", "FT_CHECKPOINT_INTERVAL=9-3: the bounds"),
        ("FT_COLLECTIVE_TIMEOUT_S", "100000", "FT_COLLECTIVE_TIMEOUT_S=100000: a lost rank"),
    ],
)
def test_a_wrong_variable_is_named_and_not_its_option(
    slurm: Slurm, name: str, value: str, words: str
):
    code, _, err = slurm.run("--", "true", **{name: value})
    assert code == 2
    assert words in err


@pytest.mark.parametrize(("rank", "size"), [("7", "4"), ("x", "4"), ("-1", "4")])
def test_a_rank_that_does_not_exist_is_refused(slurm: Slurm, rank: str, size: str):
    """Taken for rank 0, it would decide about the requeue beside the real one."""
    code, _, err = slurm.run("--", "true", RANK=rank, WORLD_SIZE=size)
    assert code == 2
    assert f"RANK={rank} is no rank of WORLD_SIZE={size}" in err


# -- somebody else's ----------------------------------------------------------------------------


@as_root
def test_a_plan_that_another_user_has_put_into_the_spool_is_not_used(slurm: Slurm):
    plan = slurm.root / "spool" / "plans" / "77.json"
    plan.parent.mkdir(parents=True)
    configuration = {"gpus": 1, "nodes": 1, "local_batch": 1, "accumulation": 64}
    document = {
        "version": 1,
        "base_id": 77,
        "attempt": 0,
        "decision": {"configuration": configuration},
    }
    plan.write_text(json.dumps(document))
    ours = environment_of(slurm, SLURM_GPUS_PER_TASK="1")
    assert ours["FT_ACCUMULATION"] == "64"
    os.chown(plan, SOMEBODY, -1)
    _, out, err = slurm.run(*SHOW_ENVIRONMENT, SLURM_GPUS_PER_TASK="1")
    assert "FT_ACCUMULATION" not in json.loads(out)[0]
    assert f"is not used: {plan} could not be read: it belongs to user {SOMEBODY}" in err


@as_root
@pytest.mark.parametrize("link", [False, True])
def test_a_part_of_the_spool_that_another_user_has_made_is_not_used(slurm: Slurm, link: bool):
    own = slurm.root / "spool" / str(os.getuid())
    own.parent.mkdir()
    if link:
        (slurm.root / "elsewhere").mkdir()
        own.symlink_to(slurm.root / "elsewhere")
    else:
        own.mkdir(mode=0o777)
        os.chown(own, SOMEBODY, -1)
    code, out, err = slurm.run(*SHOW_ENVIRONMENT)
    assert code == 0
    assert "FT_PROGRESS_FILE" not in json.loads(out)[0]
    assert f"{own}: it is no directory of user {os.getuid()}: progress is not reported" in err


# -- what an attempt leaves for the next --------------------------------------------------------


def _attempt_before(slurm: Slurm, cause: Cause) -> None:
    """Step 0 ended well in attempt 0; the attempt as a whole ended by ``cause``."""
    slurm.state.mkdir(parents=True)
    (slurm.state / "done-77-0-0").write_text("")
    before = Attempts("77", (Attempt(0, 1.0, 1, ended_s=2.0, cause=cause, requeued=True),))
    (slurm.state / "attempts-77.json").write_text(before.to_json())


def test_a_job_that_ended_well_and_was_requeued_all_the_same_does_nothing(slurm: Slurm):
    _attempt_before(slurm, Cause.COMPLETED)
    code, out, err = slurm.run("--", "/bin/echo", "ran", SLURM_RESTART_COUNT="1")
    assert (code, out) == (0, "")
    assert "nothing is done again" in err


def test_a_step_before_the_one_that_was_preempted_is_done_again(slurm: Slurm):
    """Such as one that puts data onto nodes: the next attempt runs on others."""
    _attempt_before(slurm, Cause.PREEMPTED)
    code, out, _ = slurm.run("--", "/bin/echo", "ran", SLURM_RESTART_COUNT="1")
    assert (code, out) == (0, "ran\n")


def test_a_step_that_fails_beside_another_one_is_kept(slurm: Slurm):
    """Steps of one job had one record, and each wrote over what the other had written."""
    (slurm.root / "spool" / "plans").mkdir(parents=True)
    mark = slurm.root / "ready"
    first = slurm.start(*program(f"--ready={mark}"), SLURM_STEP_ID="0")
    ready(mark)
    code, _, err = slurm.run("--", "/bin/sh", "-c", "exit 3", SLURM_STEP_ID="1")
    assert code == 3, err
    (whole,) = ledger(slurm)
    assert (whole.step, whole.ended_s) == (0, None), "its end is not that of the attempt"
    assert [(step.step, step.exit_code) for step in whole.steps] == [(1, 3)]
    first.send_signal(signal.SIGUSR2)
    assert finish(first)[0] == exits.REQUEUE
    (whole,) = ledger(slurm)
    (other,) = whole.steps
    assert (whole.step, whole.requeued) == (0, True)
    assert (other.step, other.exit_code, other.cause) == (1, 3, Cause.USER_ERROR)
    copy = slurm.root / "spool" / str(os.getuid()) / "attempts-77.json"
    assert parse_attempts(copy.read_text(), "copy").attempts == (whole,)


def test_relative_directories_hold_wherever_the_program_goes(slurm: Slurm):
    """A session that wrote its status elsewhere was none for ft-run, and its job lost."""
    process = subprocess.run(
        [*FT_RUN, "--state-dir=st", "--checkpoint-dir=ck", *SHOW_ENVIRONMENT],
        cwd=slurm.root,
        env=slurm.variables,
        capture_output=True,
        text=True,
        check=True,
    )
    env = json.loads(process.stdout)[0]
    assert env["FT_STATE_DIR"] == f"{slurm.root}/st"
    assert env["FT_STATUS_FILE"].startswith(f"{slurm.root}/st/status-77-")
    assert env["FT_CHECKPOINT_DIR"] == f"{slurm.root}/ck"

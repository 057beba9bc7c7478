"""ft-run as a process: signals, saving, the requeue and the ledger of attempts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from slurm_ext.domain.attempt import Attempt, Attempts, Cause, parse_attempts
from slurm_ft import exits
from tests.wrappers.launched import (
    Slurm,
    await_true,
    finish,
    leave,
    ledger,
    program,
    ready,
    soon,
)


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

"""ft-run as a process: programs that do not cooperate, hooks, whoever has a signal already."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import pytest

from slurm_ext.domain.attempt import Cause
from slurm_ft import exits
from tests.wrappers.launched import (
    Slurm,
    alive,
    await_true,
    began_long_ago,
    finish,
    leave,
    ledger,
    program,
    ready,
    soon,
)


def test_a_deaf_program_is_killed_in_time_and_the_job_comes_back(slurm: Slurm):
    slurm.record(end=soon(60))
    code, _, _ = leave(slurm, "--grace=1", behave=("--deaf", "--after=60"))
    assert code == 128 + signal.SIGKILL
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert ledger(slurm)[-1].cause is Cause.TIME_LIMIT
    assert "its grace was nearly over, and was killed" in ledger(slurm)[-1].reason


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
    assert "ended with 4: nothing was saved on request" in err


def test_the_hook_and_what_it_starts_survive_the_signals_of_the_step(slurm: Slurm):
    """A preemption without grace sends TERM to every process, and ended the save in its middle."""
    slurm.record(end=soon(60))
    done, below = slurm.root / "done", slurm.root / "below"
    kill = "kill -TERM $$; kill -USR2 $$"
    hook = f"sh -c '{kill}; touch {below}'; {kill}; touch {done}"
    leave(slurm, f"--on-preempt={hook}", behave=("--bare",))
    assert below.exists()
    assert done.exists()
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


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

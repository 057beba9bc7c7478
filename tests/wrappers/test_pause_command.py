"""``slurm-ext pause`` and ``resume`` against a real ft-run with a program that needs no torch."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_ext.cli.pause import FIRST_ANSWER_S
from slurm_ext.domain.attempt import parse_attempts
from slurm_ext.domain.progress import Progress, parse_progress
from slurm_ext.domain.spans import moment
from slurm_ft import exits
from slurm_ft.launch import processes
from tests.wrappers.launched import Slurm, await_true, finish

_PROGRAM = """
import sys, time
from pathlib import Path
import slurm_ft

steps = Path(sys.argv[1])

def save(directory, step):
    (directory / "step").write_text(str(step))

with slurm_ft.session(save=save, restore=lambda directory, step: None, total_steps=100000) as ft:
    step = ft.restore()
    while step < 100000:
        time.sleep(0.01)
        step += 1
        ft.step(step)
        steps.write_text(str(step))
"""
_SCANCEL = """#!/bin/sh
echo "scancel $*" >> "$FAKE/calls"
"""
_SQUEUE = """#!/bin/sh
echo "squeue $*" >> "$FAKE/calls"
case "$*" in
    *%U*) cat "$FAKE/owner" ;;
    *"-t all"*) cat "$FAKE/standing" ;;
    *) cat "$FAKE/queue" ;;
esac
"""


class Job:
    """A paused or running job, and the commands of its user."""

    def __init__(self, root: Path, *options: str) -> None:
        self.slurm = Slurm(root)
        bin_dir = root / "bin"
        for name, text in (("scancel", _SCANCEL), ("squeue", _SQUEUE)):
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
        scontrol = bin_dir / "scontrol"
        scontrol.write_text(
            scontrol.read_text().replace("    requeue*)", "    update*) ;;\n    requeue*)")
        )
        (root / "owner").write_text(f"{os.getuid()}\n")
        (root / "queue").write_text("RUNNING\n")
        self.stands("RUNNING None 77")
        self.steps = root / "steps"
        self.process = self.slurm.start(
            *("--collective-timeout=30", *options, "--"),
            *(sys.executable, "-c", _PROGRAM, str(self.steps)),
        )
        await_true(lambda: self.step() > 3 and self.served(), "program and its store")

    def stands(self, words: str) -> None:
        """What Slurm says of the job: state, reason, id."""
        (self.slurm.root / "standing").write_text(f"{words}\n" if words else "")

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)
        await_true(lambda: not self.served(), "end of the helper")

    def served(self) -> bool:
        return any(self.slurm.state.glob("pause-*-0.*key"))

    def step(self) -> int:
        try:
            return int(self.steps.read_text() or 0)
        except FileNotFoundError:
            return 0

    def command(self, *argv: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "slurm_ext.cli.main", *argv],
            env={**self.slurm.variables, "SLURM_JOB_ID": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def stands_still(self) -> bool:
        before = self.step()
        time.sleep(0.3)
        return self.step() == before


@pytest.fixture
def job(tmp_path: Path):
    job = Job(tmp_path)
    yield job
    job.process.kill()
    job.process.communicate()


def test_pause_and_resume(job: Job) -> None:
    code, out, err = job.command("pause", "77", "--for=10m", "--release=nothing")
    assert code == 0, err
    assert "all ranks are paused" in out
    assert job.stands_still()
    assert job.slurm.calls("scancel --signal=CONT 77")
    # A second one is refused, and says why.
    code, _, err = job.command("pause", "77")
    assert code == 1
    assert "refused" in err
    assert "under way; slurm-ext resume 77 ends it, and slurm-ext pause --status 77 tells" in err
    code, out, err = job.command("resume", "77")
    assert (code, err) == (0, "")
    assert "all ranks go on" in out
    await_true(lambda: not job.stands_still(), "step")
    code, out, _ = job.command("pause", "77", "--status")
    assert code == 0
    # Private files only; requests are gone.
    for path in job.slurm.state.glob("pause-*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(job.slurm.state.glob("pause-ask-*"))


def test_the_daemon_is_told_of_a_pause(tmp_path: Path) -> None:
    """At once, and not when the next report is due; and that it is over."""
    (tmp_path / "spool").mkdir()
    job = Job(tmp_path)
    path = tmp_path / "spool" / str(os.getuid()) / "progress-77.json"

    def told() -> Progress:
        return parse_progress(path.read_text(), str(path))

    try:
        code, _, err = job.command("pause", "77", "--for=10m", "--release=nothing")
        assert code == 0, err
        await_true(lambda: told().hold is not None, "word of the pause")
        hold = told().hold
        assert hold is not None
        assert (hold.by, hold.rung) == (getpass.getuser(), "nothing")
        assert hold.until_s - hold.since_s == pytest.approx(600.0)
        assert told().step == job.step() + 1
        code, _, err = job.command("resume", "77")
        assert code == 0, err
        await_true(lambda: told().hold is None, "word of the resume")
        assert told().paused_s > 0.0
    finally:
        job.process.kill()
        job.process.communicate()


def test_a_pause_ends_by_itself(job: Job) -> None:
    code, _, err = job.command("pause", "77", "--for=1s", "--release=nothing")
    assert code == 0, err
    await_true(lambda: not job.stands_still(), "step")


def test_the_last_rung_requeues_with_a_later_start(job: Job) -> None:
    (job.slurm.root / "queue").write_text("PENDING\n")
    code, out, err = job.command("pause", "77", "--for=2h", "--release=job")
    assert code == 0, err
    assert "requeued" in out
    code, _, err = finish(job.process)
    assert code == exits.REQUEUE, err
    assert job.slurm.calls("requeue 77") == ["scontrol requeue 77"]
    assert job.slurm.calls("StartTime=now+7200")
    # Slurm's begin time is the later one of the two.
    begin_s = int(time.time()) + 7260
    job.stands(f"PENDING BeginTime {begin_s} 77")
    code, out, _ = job.command("pause", "77", "--status")
    assert code == 0
    assert f"for 7200 s: saved at step {job.step() + 1} and requeued; it starts at" in out
    assert f"it starts at {moment(begin_s, time.time())} at the earliest" in out
    code, out, _ = job.command("resume", "77")
    assert code == 0
    assert "may start" in out
    assert job.slurm.calls("update JobId=77 StartTime=now")[-1].endswith("StartTime=now")


def test_a_job_that_would_not_come_back_keeps_its_gpus(tmp_path: Path) -> None:
    """Saved and gone would be an end, not a pause; the other rungs are open to it."""
    job = Job(tmp_path, "--requeue=never")
    try:
        code, _, err = job.command("pause", "77", "--release=job")
        assert code == 1
        assert "refused: the job would not come back: --requeue=never" in err
        assert not job.stands_still()
        code, _, err = job.command("pause", "77", "--release=nothing", "--for=1s")
        assert code == 0, err
    finally:
        job.process.kill()
        job.process.communicate()


def test_slurm_that_would_not_requeue_the_job_is_asked(tmp_path: Path) -> None:
    job = Job(tmp_path)
    scontrol = tmp_path / "bin" / "scontrol"
    try:
        scontrol.write_text("#!/bin/sh\necho 'slurm_load_jobs error' >&2\nexit 1\n")
        code, _, err = job.command("pause", "77", "--release=job")
        assert code == 1
        assert "nothing tells whether the job would come back" in err
        assert not job.stands_still()
    finally:
        job.process.kill()
        job.process.communicate()


def test_a_signal_while_paused_saves_and_requeues(job: Job) -> None:
    code, _, err = job.command("pause", "77", "--release=nothing")
    assert code == 0, err
    job.process.send_signal(signal.SIGUSR2)
    code, _, err = finish(job.process)
    assert code == exits.REQUEUE, err


def everybody(job: Job) -> list[int]:
    """ft-run, its program and its helper: what Slurm gives a signal to."""
    return [job.process.pid, *processes.descendants(job.process.pid)]


@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_a_signal_to_the_whole_step_while_paused_loses_nothing(job: Job, name: str) -> None:
    """Slurm gives it to the helper as well, whose store the ranks need to leave the pause."""
    code, _, err = job.command("pause", "77", "--for=10m", "--release=memory")
    assert code == 0, err
    last = job.step()
    pids = everybody(job)
    assert len(pids) >= 3
    for pid in pids:
        os.kill(pid, signal.Signals[f"SIG{name}"])
    code, _, err = finish(job.process)
    assert code == exits.REQUEUE, err
    ledger = job.slurm.state / "attempts-77.json"
    (attempt,) = parse_attempts(ledger.read_text(), str(ledger)).attempts
    assert attempt.saved_step is not None
    assert attempt.saved_step >= last
    assert job.step() <= attempt.saved_step <= job.step() + 1


def test_what_ends_other_processes_does_not_end_the_helper(job: Job) -> None:
    (helper,) = (pid for pid in everybody(job) if b"pause.serve" in words_of(pid))
    for name in ("TERM", "USR1", "USR2", "INT", "HUP", "QUIT", "ALRM", "XCPU", "PIPE", "RTMIN"):
        os.kill(helper, signal.Signals[f"SIG{name}"])
    code, _, err = job.command("pause", "77", "--for=10m", "--release=nothing")
    assert code == 0, err
    os.kill(helper, signal.SIGTERM)
    code, out, err = job.command("resume", "77")
    assert (code, err) == (0, "")
    assert "all ranks go on" in out


@pytest.mark.parametrize("killed", [False, True])
def test_nobody_waits_for_a_job_that_has_ended_meanwhile(job: Job, killed: bool) -> None:
    """Its helper still says so, unless Slurm kills it with the step: then Slurm is asked."""
    (helper,) = (pid for pid in everybody(job) if b"pause.serve" in words_of(pid))
    # The rank listens, and then no safe point comes, as in a program that is past its last one.
    for argv in (["pause", "77", "--release=nothing"], ["resume", "77"]):
        assert job.command(*argv)[0] == 0
    program = max(set(everybody(job)) - {helper, job.process.pid})
    os.kill(program, signal.SIGSTOP)
    asking = subprocess.Popen(
        [sys.executable, "-m", "slurm_ext.cli.main", "pause", "77", "--timeout=60s"],
        env={**job.slurm.variables, "SLURM_JOB_ID": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        await_true(
            lambda: any(
                '"asking"' in path.read_text() for path in job.slurm.state.glob("pause-answer-*")
            ),
            "first answer",
        )
        job.stands("COMPLETED None 77")
        if killed:
            os.kill(helper, signal.SIGKILL)
        job.process.kill()
        _, err = asking.communicate(timeout=20)
    finally:
        asking.kill()
        processes.send(program, signal.SIGKILL)
    assert asking.returncode == 1
    words = (
        "job 77: not paused: the job has ended (COMPLETED)"
        if killed
        else "job 77: refused: the program ended before its ranks came to a safe point"
    )
    assert words in err


def words_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_thread_of_the_program_does_not_keep_a_rank_that_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal was sent, so no grace ends it: the job would hold its GPUs to its time limit."""
    lingering = (
        "import threading, time\nimport slurm_ft.pause.binding as binding\nbinding._EXIT_S = 2.0\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "_PROGRAM", lingering + _PROGRAM)
    job = Job(tmp_path)
    try:
        code, _, err = job.command("pause", "77", "--for=10m", "--release=nothing")
        assert code == 0, err
        (helper,) = (pid for pid in everybody(job) if b"pause.serve" in words_of(pid))
        os.kill(helper, signal.SIGKILL)
        code, _, err = finish(job.process)
        assert code == exits.UNDECIDED, err
        assert "still here" in err
    finally:
        job.process.kill()
        job.process.communicate()


def test_the_helper_ends_with_its_ft_run(job: Job) -> None:
    """Nothing is left behind that holds a port or the job's output."""
    job.process.kill()
    started = time.monotonic()
    job.process.communicate(timeout=20)
    assert time.monotonic() - started < 10
    await_true(lambda: not job.served(), "end of the helper")


def somebody_elses(tmp_path: Path, level: str) -> subprocess.CompletedProcess[str]:
    """A pause of a job of user 4711, by somebody with this AdminLevel."""
    slurm = Slurm(tmp_path)
    for name, text in (
        ("squeue", "echo 4711"),
        ("id", '[ "$1" = -u ] && echo 1234 || echo bob'),
        ("sacctmgr", f"echo 'bob|{level}'"),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    config = tmp_path / "config.yaml"
    config.write_text(f"spool: {tmp_path / 'no-spool'}\n")
    return subprocess.run(
        [sys.executable, "-m", "slurm_ext.cli.main", "pause", "77", f"--config={config}"],
        env=slurm.variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_job_of_somebody_else_is_refused(tmp_path: Path) -> None:
    done = somebody_elses(tmp_path, "None")
    assert done.returncode == 1
    assert "only that user and operators of Slurm" in done.stderr


def test_an_operator_without_a_daemon_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "no-spool").mkdir()
    done = somebody_elses(tmp_path, "Operator")
    assert done.returncode == 1
    assert "passes requests of operators on, and is not there" in done.stderr


def test_a_pause_beyond_the_time_limit_is_told(job: Job) -> None:
    (job.slurm.root / "queue").write_text("1:30\n")
    code, _, err = job.command("pause", "77", "--for=2m", "--release=nothing")
    assert code == 0, err
    assert "comes to its time limit in 00:01:30" in err


def test_resume_without_a_controller(job: Job) -> None:
    code, _, err = job.command("pause", "77", "--for=2m", "--release=nothing")
    assert code == 0, err
    for name in ("squeue", "scancel"):
        (job.slurm.root / "bin" / name).write_text("#!/bin/sh\necho 'no contact' >&2\nexit 1\n")
    code, out, err = job.command("resume", "77")
    assert code == 0, err
    assert "all ranks go on" in out
    assert "no contact" in err


@pytest.mark.parametrize(
    ("reason", "hint"),
    [("BeginTime", "scontrol update JobId=77 StartTime=now"), ("JobHeldUser", "scontrol release")],
)
def test_resume_leaves_a_start_alone_that_no_pause_put_off(
    job: Job, reason: str, hint: str
) -> None:
    """The user's own --begin and --hold, also of a job that ran before."""
    job.end()
    job.stands(f"PENDING {reason} 77")
    code, out, err = job.command("resume", "77")
    assert (code, out) == (1, "")
    assert "no pause has put its start off; nothing is changed" in err
    assert hint in err
    assert not job.slurm.calls("update")


def test_resume_of_a_paused_job_that_is_held_says_so(job: Job) -> None:
    (job.slurm.root / "queue").write_text("PENDING\n")
    code, _, err = job.command("pause", "77", "--for=2h", "--release=job")
    assert code == 0, err
    finish(job.process)
    job.stands("PENDING JobHeldUser 77")
    code, out, _ = job.command("resume", "77")
    assert code == 0
    assert "scontrol release 77" in out
    assert job.slurm.calls("update JobId=77 StartTime=now")


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        ("PENDING Resources 77", "is pending (Resources)"),
        ("COMPLETED None 77", "has ended (COMPLETED)"),
        ("SUSPENDED None 77", "is suspended by Slurm"),
        ("COMPLETING None 77", "is COMPLETING"),
        ("", "is not in the queue, and Slurm's accounting has no such job; squeue --me"),
    ],
)
def test_nobody_waits_for_a_job_that_does_not_run(job: Job, standing: str, words: str) -> None:
    job.stands(standing)
    for argv in (["pause", "77"], ["pause", "77", "--status"], ["resume", "77"]):
        began_s = time.monotonic()
        code, out, err = job.command(*argv)
        assert time.monotonic() - began_s < FIRST_ANSWER_S / 2, argv
        assert words in out + err, argv
        assert code == (0 if "--status" in argv and standing.startswith("PENDING") else 1)
    assert not job.slurm.calls("scancel")
    assert not list(job.slurm.state.glob("pause-ask-*"))


def test_a_job_that_has_ended_is_told_with_its_end(job: Job) -> None:
    job.stands("")
    row = f"77|{getpass.getuser()}|main|normal|FAILED|3:0|1700000000|1700000050|cpu=1\n"
    (job.slurm.root / "sacct").write_text(row)
    for verb, only in (("pause", "running"), ("resume", "paused")):
        code, _, err = job.command(verb, "77")
        assert code == 1
        assert "job 77: has ended: FAILED with exit code 3 at " in err
        assert f"only a {only} job can be {verb}d; slurm-ext explain 77 tells more" in err


def test_resume_of_a_job_that_is_not_paused_names_what_to_do(job: Job) -> None:
    code, _, err = job.command("resume", "77")
    assert code == 1
    assert "job 77: is not paused: no pause is under way; slurm-ext pause 77 pauses it" in err


def test_status_tells_the_pause_that_holds(job: Job) -> None:
    """A refused request takes neither its place nor its number."""
    code, out, _ = job.command("pause", "77", "--status")
    assert (code, out) == (0, "job 77: no pause in this attempt\n")
    code, _, err = job.command("pause", "77", "--for=10m", "--release=nothing")
    assert code == 0, err
    code, _, err = job.command("pause", "77")
    assert "refused" in err
    code, out, err = job.command("pause", "77", "--status")
    assert (code, err) == (0, "")
    assert "pause 1: all ranks are paused after step " in out
    assert f"by {getpass.getuser()}, release=nothing" in out
    assert "they go on at" in out
    code, _, err = job.command("resume", "77")
    assert code == 0, err
    code, out, _ = job.command("pause", "77", "--status")
    assert f"pause 1 by {getpass.getuser()}: resumed: asked by" in out
    code, _, err = job.command("pause", "77", "--for=1s", "--release=nothing")
    assert code == 0, err
    await_true(lambda: not job.stands_still(), "step")
    code, out, _ = job.command("pause", "77", "--status")
    assert f"pause 2 by {getpass.getuser()}: resumed: the pause is over" in out
    # Those of two pauses whose commands ended before them; the others were read, and are gone.
    assert len(list(job.slurm.state.glob("pause-answer-*"))) == 2


def test_an_array_task_by_its_raw_id_is_named(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\necho '{os.getuid()} 70_4'\n")
    squeue.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "slurm_ext.cli.main", "pause", "78"],
        env=slurm.variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "job 78: is 70_4 to Slurm" in done.stderr


def test_a_whole_array_is_not_paused(job: Job) -> None:
    job.stands("PENDING None 77_[1-2]")
    for verb in ("pause", "resume"):
        code, _, err = job.command(verb, "77")
        assert code == 1
        assert "job 77: is an array; name one task of the array, as in 77_1" in err


@pytest.mark.parametrize(
    "bad",
    [
        ("pause", "x"),
        ("pause", "7", "--for=soon"),
        ("pause", "7", "--for=0s"),
        ("pause", "7", "--status", "--for=3m"),
    ],
)
def test_unusable_arguments(bad: tuple[str, ...], tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    slurm.state.mkdir(parents=True)
    (slurm.state.parent / "lab-7").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "slurm_ext.cli.main", *bad],
        env=slurm.variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert bad[-1].split("=")[-1].removesuffix("3m") in done.stderr

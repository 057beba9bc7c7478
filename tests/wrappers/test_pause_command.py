"""``slurm-ext pause`` and ``resume`` against a real ft-run with a program that needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_ft import exits
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
        self.steps = root / "steps"
        self.process = self.slurm.start(
            *("--collective-timeout=30", *options, "--"),
            *(sys.executable, "-c", _PROGRAM, str(self.steps)),
        )
        await_true(lambda: self.step() > 3 and self.served(), "program and its store")

    def served(self) -> bool:
        return (self.slurm.state / "pause-0.key").exists()

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
    assert "under way" in err
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
    code, out, _ = job.command("resume", "77")
    assert code == 0
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


@pytest.mark.parametrize(
    "bad", [("pause", "x"), ("pause", "7", "--for=soon"), ("pause", "7", "--for=0s")]
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
    assert bad[-1].split("=")[-1] in done.stderr

"""The example programs with their real libraries: stopped by a signal, they end where an
undisturbed run ends.

``SLURM_EXT_TEST_FRAMEWORKS_PYTHON`` names another Python than the running one, for instance that
of a virtual environment with lightning and transformers; tests whose library it lacks are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from slurm_ft import exits
from tests.wrappers.mpi_launcher import ROOT, mpi_environment
from tests.wrappers.ranks import free_port

EXAMPLES = ROOT / "site" / "examples"
PYTHON_VARIABLE = "SLURM_EXT_TEST_FRAMEWORKS_PYTHON"
PYTHON = os.environ.get(PYTHON_VARIABLE, sys.executable)
LIMIT_S = 100.0
_STEP = re.compile(r"^step (\d+)", re.MULTILINE)
_END = re.compile(r"^trained (\d+) steps, weight ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """What became of the processes of one attempt, and what they printed."""

    codes: list[int]
    output: str

    @property
    def steps(self) -> list[int]:
        """The steps that rank 0 made, in order."""
        return [int(text) for text in _STEP.findall(self.output)]

    @property
    def end(self) -> tuple[int, float]:
        """Number of steps and a fingerprint of the weights."""
        match = _END.search(self.output)
        assert match, self.output[-3000:]
        return int(match[1]), float(match[2])


class Job:
    """A program that is started again and again with the same checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = 0

    def run(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[dict[str, str]],
        *,
        stop_at: int | None = None,
        stopped: int = 0,
        whom: Callable[[Path], int] | None = None,
    ) -> Ran:
        """Start all commands; once ``stop_at`` steps are made, send USR2 to the one ``stopped``,
        or to the process that ``whom`` finds for this job's directory."""
        log = self.directory / f"attempt-{self.attempt}.log"
        base = {
            **mpi_environment(),
            "PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}",
            "FT_CHECKPOINT_DIR": str(self.directory / "checkpoints"),
            "FT_ATTEMPT": str(self.attempt),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        self.attempt += 1
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with open(log, "wb") as output:
                for command, extra in zip(commands, environments, strict=True):
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            env={**base, **extra},
                            cwd=self.directory,
                            start_new_session=True,
                        )
                    )
            end = time.monotonic() + LIMIT_S
            if stop_at is not None:
                while max(map(int, _STEP.findall(log.read_text())), default=0) < stop_at:
                    assert time.monotonic() < end, log.read_text()[-3000:]
                    assert all(p.poll() is None for p in processes), log.read_text()[-3000:]
                    time.sleep(0.02)
                os.kill(whom(self.directory) if whom else processes[stopped].pid, signal.SIGUSR2)
            codes = [p.wait(max(0.1, end - time.monotonic())) for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return Ran(codes, log.read_text())


@cache
def library(name: str) -> str:
    """Its version under the Python of these tests, or "" where it is not there."""
    probe = f"import importlib.metadata as m, {name}; print(m.version({name!r}))"
    done = subprocess.run(
        [PYTHON, "-c", probe], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else ""


def needs(name: str) -> None:
    """Skip where the library is missing, and say what would help."""
    if not library(name):
        pytest.skip(f"{PYTHON} has no {name}; {PYTHON_VARIABLE} may name a Python that has")


def under_ft_run(*words: str) -> list[str]:
    """A command behind ft-run."""
    return [PYTHON, "-m", "slurm_ft.launch.main", "--", *words]


def two_ranks(**more: str) -> list[dict[str, str]]:
    """The environment of two ranks on one node."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **{name: text.format(rank=rank) for name, text in more.items()},
        }
        for rank in range(2)
    ]


def program(name: str, *options: str) -> list[str]:
    """An example program as a command."""
    return [PYTHON, str(EXAMPLES / name), *options]


def check_comes_back(first: Ran, second: Ran, whole: Ran, *, code: int = exits.REQUEUE) -> None:
    """Both attempts together are the undisturbed run: no step lost, none made twice."""
    assert set(whole.codes) == {0}, whole.output[-3000:]
    assert set(first.codes) == {code}, first.output[-3000:]
    assert set(second.codes) == {0}, second.output[-3000:]
    assert first.steps
    assert len(first.steps) < len(whole.steps)
    assert first.steps + second.steps == whole.steps
    assert second.end[0] == whole.end[0]
    assert second.end[1] == pytest.approx(whole.end[1], rel=1e-6)


def test_plain_pytorch_comes_back(tmp_path):
    command = under_ft_run(*program("train_plain.py", "--epochs=10", "--accumulate=2"))
    whole = Job(make(tmp_path / "whole")).run([command] * 2, two_ranks())
    job = Job(make(tmp_path / "job"))
    first = job.run([command] * 2, two_ranks(), stop_at=5, stopped=1)
    check_comes_back(first, job.run([command] * 2, two_ranks()), whole)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_torchrun_comes_back(tmp_path):
    """One ft-run in front of the launcher, which is what gets the signal."""
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun.append("--rdzv-endpoint=127.0.0.1:{port}")

    def command() -> list[str]:
        words = [word.format(port=free_port()) for word in torchrun]
        return under_ft_run(*words, str(EXAMPLES / "train_plain.py"), "--epochs=10")

    whole = Job(make(tmp_path / "whole")).run([command()], [{}])
    job = Job(make(tmp_path / "job"))
    first = job.run([command()], [{}], stop_at=5)
    assert first.codes != [0]  # torchrun has one code for whatever its ranks end with
    check_comes_back(first, job.run([command()], [{}]), whole, code=first.codes[0])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_lightning_comes_back(tmp_path, record_property):
    needs("lightning")
    record_property("lightning", library("lightning"))
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NAME": "test",
    }
    command = under_ft_run(*program("train_lightning.py", "--epochs=4"))
    whole = Job(make(tmp_path / "whole")).run([command] * 2, two_ranks(**slurm))
    job = Job(make(tmp_path / "job"))
    first = job.run([command] * 2, two_ranks(**slurm), stop_at=5, stopped=1)
    check_comes_back(first, job.run([command] * 2, two_ranks(**slurm)), whole)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_hugging_face_trainer_comes_back(tmp_path, record_property):
    for name in ("transformers", "accelerate"):
        needs(name)
        record_property(name, library(name))
    command = under_ft_run(
        *program("train_hf.py", "--num_train_epochs=6", "--per_device_train_batch_size=8")
    )
    whole = Job(make(tmp_path / "whole")).run([command] * 2, two_ranks())
    job = Job(make(tmp_path / "job"))
    first = job.run([command] * 2, two_ranks(), stop_at=5, stopped=1)
    check_comes_back(first, job.run([command] * 2, two_ranks()), whole)


def ft_run_of_rank_1(directory: Path) -> int:
    """What Slurm would signal: mpirun passes this signal on to nobody and dies of it."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            ours = (entry / "cwd").resolve() == directory.resolve()
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is not ours to look at
            continue
        rank = {b"PMI_RANK=1", b"OMPI_COMM_WORLD_RANK=1"} & set(environment)
        if ours and rank and b"slurm_ft.launch.main" in words and b"-n" not in words:
            return int(entry.name)
    raise AssertionError("no ft-run of rank 1")


def test_mpi_comes_back(tmp_path, mpi):
    def command() -> list[str]:
        words = ["-m", "slurm_ft.launch.main", "--", mpi.python]
        program_words = [str(EXAMPLES / "train_mpi.py"), "--epochs=40", "--local-batch=8"]
        return [mpi.mpirun, "-n", "2", mpi.python, *words, *program_words]

    whole = Job(make(tmp_path / "whole")).run([command()], [{}])
    job = Job(make(tmp_path / "job"))
    first = job.run([command()], [{}], stop_at=5, whom=ft_run_of_rank_1)
    assert first.codes != [0]  # mpirun has its own code for ranks that did not end with 0
    check_comes_back(first, job.run([command()], [{}]), whole, code=first.codes[0])


def test_a_program_that_cannot_be_changed_comes_back_by_the_commands_of_its_script(tmp_path):
    """Runs the commands that hooks.sbatch itself holds."""
    script = (EXAMPLES / "hooks.sbatch").read_text()
    save = re.search(r"save='([^']+)'", script)
    resume = re.search(r"--on-resume '([^']+)'", script)
    assert save
    assert resume
    command = [PYTHON, "-m", "slurm_ft.launch.main"]
    command += ["--on-preempt", save[1], "--on-resume", resume[1], "--"]
    command += program("unchangeable.py", "--steps=120", "--save=s.json", "--resume=s.json")
    saved = {"SAVED": "s.json"}
    whole = Job(make(tmp_path / "whole")).run([command], [saved])
    job = Job(make(tmp_path / "job"))
    first = job.run([command], [saved], stop_at=5)
    second = job.run([command], [{**saved, "SLURM_RESTART_COUNT": "1"}])
    assert first.codes != [0]
    # What the program did between its save and its end is made again, and nothing else.
    kept = first.steps[: second.steps[0] - 1]
    assert kept + second.steps == whole.steps
    assert len(kept) >= 5
    assert second.end == whole.end


def test_a_resumed_program_without_its_saved_state_is_not_started(tmp_path):
    script = (EXAMPLES / "hooks.sbatch").read_text()
    resume = re.search(r"--on-resume '([^']+)'", script)
    assert resume
    command = [PYTHON, "-m", "slurm_ft.launch.main", "--on-resume", resume[1], "--"]
    command += program("unchangeable.py", "--steps=1")
    ran = Job(make(tmp_path / "job")).run(
        [command], [{"SAVED": "s.json", "SLURM_RESTART_COUNT": "1"}]
    )
    assert ran.codes != [0]
    assert not ran.steps


def make(path: Path) -> Path:
    """A new empty directory."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path

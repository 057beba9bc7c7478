"""Starts one trial of ``slurm-ext table profile`` and times its steps from outside.

Two ways to start the ranks: a step of the present Slurm allocation, or plain processes on this
machine. Two ways to time them: the file that the reference trainer writes, exact to the step, or
the progress reports of a user's own command. A command that has said enough is ended; one that
takes a batch other than the trial's is not believed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from slurm_ext.domain.errors import ConfigError, SlurmCommandError
from slurm_ext.domain.progress import MAX_BYTES, Progress, parse_progress
from slurm_ext.estimate.trials import Outcome, Timing, Trial
from slurm_ft import variables

# How often files and processes are looked at, and how long an ended program may take to go.
_POLL_S = 0.1
_LEAVE_S = 20.0
# For so long a session's rate is over everything since its first step.
_WHOLE_RUN_S = 50.0
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_PLACE = re.compile(r"\{([a-z_]+)\}")
# The end of a log that is searched and shown.
_TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Work:
    """What each trial runs. ``command`` is the user's own with ``{local_batch}`` and so on, empty
    for the reference trainer with ``options``."""

    command: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    warmup: int = 5
    steps: int = 20
    limit_s: float = 600.0


@dataclass(slots=True)
class Seen:
    """What the ranks said about where they ran."""

    environment: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """What a launcher starts for one trial."""

    trial: Trial
    argv: tuple[str, ...]
    environ: dict[str, str]
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)


class Launcher(Protocol):
    """A way to start the ranks of a trial."""

    def start(self, job: Job) -> None:
        """Start them, their output going to the job's log; fills ``processes``."""
        ...


class LocalLauncher:
    """One process per rank on this machine."""

    def start(self, job: Job) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with open(job.log, "ab") as log:
            for rank in range(job.trial.gpus):
                ranks = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(job.trial.gpus),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                job.processes.append(_popen(job.argv, {**job.environ, **ranks}, log))


class StepLauncher:
    """One Slurm step in the allocation at hand, its ranks under ft-run."""

    def __init__(self, gpus_per_task: bool = True) -> None:
        self._gpus_per_task = gpus_per_task

    def argv(self, trial: Trial) -> list[str]:
        """The srun and ft-run before the command."""
        nodes = len(trial.placement)
        words = ["srun", "--exact", "--unbuffered", f"--nodes={nodes}", f"--ntasks={trial.gpus}"]
        # Whole nodes first, as the row will say; Slurm itself would spread six as three and three.
        words += [f"--ntasks-per-node={max(trial.placement)}", "--distribution=block,pack"]
        if self._gpus_per_task:
            words.append("--gpus-per-task=1")
        # A trial is no job: whatever ends it, the allocation stays where it is.
        return [*words, sys.executable, "-m", "slurm_ft.launch.main", "--no-requeue", "--"]

    def start(self, job: Job) -> None:
        with open(job.log, "ab") as log:
            job.processes.append(_popen([*self.argv(job.trial), *job.argv], job.environ, log))


def run_trial(
    trial: Trial, work: Work, launcher: Launcher, seen: Seen, environ: Mapping[str, str]
) -> Outcome:
    """Run one trial to its end or its limit."""
    with tempfile.TemporaryDirectory(prefix="slurm-ext-profile-", dir=_shared(environ)) as name:
        directory = Path(name)
        reports = Reports(directory, work, seen)
        job = Job(
            trial,
            tuple(_command(trial, work, reports)),
            {**environ, **_variables(trial, directory)},
            directory / "log",
        )
        began, clock = time.time(), time.monotonic()
        try:
            launcher.start(job)
            failure = _watch(job, reports, clock + work.limit_s)
        finally:
            _end(job)
        seconds = time.monotonic() - clock
        reports.read()
        said = _tail(job.log)
    timings = reports.timings()
    out_of_memory = bool(failure) and bool(_OUT_OF_MEMORY.search(said))
    wrong = reports.wrong_batch(trial)
    if wrong or (failure and not out_of_memory):
        lines = [line for line in said.splitlines() if line.strip()]
        failure = wrong or ": ".join([failure, *lines[-1:]])
        return Outcome(trial, (), seconds, failure=failure)
    first_s = reports.first_step_at_s
    return Outcome(
        trial,
        () if out_of_memory else timings,
        seconds,
        None if first_s is None or out_of_memory else max(0.0, first_s - began),
        out_of_memory,
    )


def expand(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Words of a command with ``{name}`` replaced. Raises ConfigError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(
                f"--command: {match[0]}",
                "there is no such value",
                "the values are " + ", ".join(f"{{{name}}}" for name in sorted(values)),
            )
        return str(values[match[1]])

    return [_PLACE.sub(value, word) for word in command]


class Reports:
    """What a running trial has told so far."""

    def __init__(self, directory: Path, work: Work, seen: Seen) -> None:
        self.timing_file = directory / "timings"
        self.progress_file = directory / "progress"
        self._work, self._seen = work, seen
        self._lines: list[dict[str, Any]] = []
        self._progress: list[Progress] = []
        self.first_step_at_s: float | None = None

    def read(self) -> None:
        """Take in what is new."""
        if not self._work.command:
            self._read_timings()
            return
        try:
            with open(self.progress_file, encoding="utf-8") as file:
                one = parse_progress(file.read(MAX_BYTES + 1), str(self.progress_file))
        except FileNotFoundError:  # no report yet
            return
        if not self._progress or one.step > self._progress[-1].step:
            self._progress.append(one)
        if one.first_step_s is not None:
            self.first_step_at_s = one.first_step_s

    def enough(self) -> bool:
        """Whether a command that goes on by itself has said all that is wanted."""
        if not self._work.command or not self._progress:
            return False
        return self._progress[-1].step >= self._work.warmup + self._work.steps

    def timings(self) -> tuple[Timing, ...]:
        """The steps after the warm-up."""
        if not self._work.command:
            return tuple(
                Timing(line["wall_s"], line["compute_s"], line.get("memory_bytes"))
                for line in self._lines
                if line["step"] > self._work.warmup
            )
        usable = [report for report in self._progress if report.step >= max(1, self._work.warmup)]
        found: list[Timing] = []
        for before, after in pairwise(usable):
            steps = after.step - before.step
            computed = max(after.rank_compute_s, default=None)
            found += [Timing(_between_s(before, after) / steps, computed)] * steps
        return tuple(found)

    def wrong_batch(self, trial: Trial) -> str:
        """Why the samples that were counted are not those of the trial."""
        if len(self._progress) < 2:
            return ""
        before, after = self._progress[0], self._progress[-1]
        steps = after.step - before.step
        batch = (after.samples - before.samples) / steps
        # A report is made beside the training and may count the samples of one step too many.
        if abs(batch - trial.global_batch) * steps <= max(batch, trial.global_batch) * 1.01:
            return ""
        return (
            f"a step took about {batch:.0f} samples and not {trial.global_batch}:"
            " give the command its {local_batch} and {accumulation}"
        )

    def _read_timings(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            lines = self.timing_file.read_text("utf-8").split("\n")[:-1]  # the last is unfinished
            documents = [json.loads(line) for line in lines]
            if documents:
                self._seen.environment = documents[0]["environment"]
                self._seen.device = documents[0]["device"]
            self._lines = documents[1:]
            if self._lines:
                self.first_step_at_s = self._lines[0]["at_s"]


def _between_s(before: Progress, after: Progress) -> float:
    """Seconds of training between two reports.

    A report's time lies anywhere in a step; its rate is exact. As long as the rate is over the
    whole run, samples and rate give the time of the steps alone.
    """
    times: list[float] = []
    for report in (before, after):
        began_s = report.first_step_s
        if began_s is None or report.at_s - began_s > _WHOLE_RUN_S or report.samples_per_s <= 0.0:
            return after.at_s - before.at_s
        times.append(report.samples / report.samples_per_s)
    return times[1] - times[0]


def _command(trial: Trial, work: Work, reports: Reports) -> list[str]:
    steps = work.warmup + work.steps
    if work.command:
        values = {
            "gpus": trial.gpus,
            "nodes": len(trial.placement),
            "local_batch": trial.local_batch,
            "accumulation": trial.accumulation,
            "global_batch": trial.global_batch,
            "precision": trial.precision,
            "frozen": trial.frozen,
            "grad_checkpointing": "yes" if trial.grad_checkpointing else "no",
            "stages": trial.stages,
            "micro_batches": trial.micro_batches,
            "steps": steps,
        }
        return expand(work.command, values)
    recompute = "--grad-checkpointing" if trial.grad_checkpointing else "--no-grad-checkpointing"
    return [
        *(sys.executable, "-m", "slurm_ft.train", *work.options),
        *(f"--local-batch={trial.local_batch}", f"--accumulation={trial.accumulation}"),
        *(f"--stages={trial.stages}", f"--micro-batches={trial.micro_batches}"),
        *(f"--precision={trial.precision}", f"--frozen={trial.frozen}", recompute),
        *(f"--steps={steps}", f"--global-batch={trial.global_batch}", "--checkpoint=none"),
        *(f"--timings={reports.timing_file}", f"--log-every={steps + 1}", "--eval-samples=1"),
        *("--quality=", "--output="),
    ]


def _variables(trial: Trial, directory: Path) -> dict[str, str]:
    return {
        variables.GPUS: str(trial.gpus),
        variables.NODES: str(len(trial.placement)),
        variables.LOCAL_BATCH: str(trial.local_batch),
        variables.ACCUMULATION: str(trial.accumulation),
        variables.GLOBAL_BATCH: str(trial.global_batch),
        variables.STAGES: str(trial.stages),
        variables.MICRO_BATCHES: str(trial.micro_batches),
        variables.PRECISION: trial.precision,
        variables.GRAD_CHECKPOINTING: "yes" if trial.grad_checkpointing else "no",
        variables.FROZEN: trial.frozen,
        variables.PROGRESS: str(directory / "progress"),
        variables.PROGRESS_INTERVAL_S: str(_POLL_S * 2),
        variables.CHECKPOINT_DIR: str(directory / "checkpoints"),
        # Longer than any trial: a save among so few steps would be measured as training.
        variables.CHECKPOINT_INTERVAL: "1000000",
        variables.STATE_DIR: str(directory / "state"),
        # No plan and no report to the daemon: the job that it knows is the allocation.
        variables.SPOOL: str(directory / "none"),
    }


def _watch(job: Job, reports: Reports, until: float) -> str:
    """Wait for the end, or for enough. Returns what went wrong, "" = nothing."""
    while True:
        codes = [process.poll() for process in job.processes]
        bad = next((code for code in codes if code), None)
        reports.read()
        if bad is not None:
            return f"exit code {bad}"
        if all(code == 0 for code in codes) or reports.enough():
            return ""
        if time.monotonic() > until:
            return "not done within its limit"
        time.sleep(_POLL_S)


def _end(job: Job) -> None:
    """Every process of the trial: asked first, and then not."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _LEAVE_S
        for process in job.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
        for process in job.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))


def _popen(argv: Sequence[str], environ: Mapping[str, str], log: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as exc:
        raise SlurmCommandError(argv, 127, exc.strerror or str(exc)) from exc


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _shared(environ: Mapping[str, str]) -> str | None:
    """Where the ranks of all nodes can write: the directory of submission, in a job."""
    return environ.get("SLURM_SUBMIT_DIR") if "SLURM_JOB_ID" in environ else None


def split_command(text: str) -> tuple[str, ...]:
    """The words of ``--command`` as a shell would read them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as exc:
        raise ConfigError(f"--command={text!r}", str(exc), "close the quotes") from exc

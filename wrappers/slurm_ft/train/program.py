"""The training loop under a session: restore, steps with safe points, result.

This is also the example of how a program uses the session: everything that makes a job come back
is in the ``with`` block below.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

import slurm_ft
from slurm_ext.domain.errors import ConfigError
from slurm_ft.comm import Comm
from slurm_ft.train.engine import substitute
from slurm_ft.train.layout import Layout, resolve_layout
from slurm_ft.train.options import Options
from slurm_ft.train.output import fault
from slurm_ft.train.ranks import Ranks, fix_workspace, joined, prepare_device
from slurm_ft.train.results import ResultError, part_name, write_manifest, write_part
from slurm_ft.train.shared import on_all_ranks
from slurm_ft.train.task import SHAPE, Task
from slurm_ft.train.trainer import Trainer


def train(options: Options, environ: Mapping[str, str]) -> dict[str, float]:
    """Run a task to its end; returns its metrics. Leaves by SystemExit where the job is paused
    or preempted."""
    fix_workspace()
    if options.threads:
        torch.set_num_threads(options.threads)
    with joined(environ, options.device) as ranks:
        task = options.task
        layout = resolve_layout(
            environ, options.wish, world=ranks.world, global_batch=task.global_batch
        )
        prepare_device(layout, ranks.device)
        say = sayer(ranks)
        say(
            f"{task.name}: {task.model}, {ranks.world} ranks on {ranks.device.type}: "
            f"{layout.local_batch} samples x {layout.gpus} x {layout.accumulation}, "
            f"{layout.stages} stages, {layout.precision}, frozen {task.frozen}"
        )
        if words := substitute(layout, ranks.device):
            say(words)
        trainer = Trainer(task, layout, ranks)
        with slurm_ft.session(
            state={"task": trainer.state},
            total_steps=task.steps,
            total_samples=task.steps * task.global_batch,
            checkpoint=options.checkpoint,
        ) as ft:
            done = ft.restore()
            check_position(done, ft.position, layout, task)
            check_output(task, layout, ft.comm)
            if done:
                say(f"goes on after step {done}")
            with Records(options, ranks, ft.attempt) as records:
                while done < task.steps:
                    began = time.perf_counter()
                    made = trainer.step(done + 1, options.emulate_step_s)
                    done += 1
                    wanted = options.loss_log is not None or done % options.log_every == 0
                    loss = trainer.mean_loss(made) if wanted else None
                    records.step(done, loss, time.perf_counter() - began, made.compute_s)
                    if loss is not None and done % options.log_every == 0:
                        say(f"step {done} loss {loss:.6f}")
                    ft.step(
                        done,
                        samples=layout.global_batch,
                        position=position_of(done, layout, task),
                        compute_s=made.compute_s,
                    )
            if options.checkpoint != "none" and ft.last_saved_step != done:
                ft.save(done)
            metrics = trainer.evaluate()
            weights = trainer.state.state_dict()["model"]
            write_result(task, layout, ft.comm, done, metrics, weights, say)
        return metrics


# What a checkpoint's weights and place in the data belong to. Steps, rates and targets may change
# between two attempts; with another of these a run would be neither the old task nor the new one.
_IDENTITY = (*SHAPE, "samples", "seed", "backbone_seed", "frozen_layers")


def position_of(step: int, layout: Layout, task: Task) -> dict[str, Any]:
    """What a checkpoint notes beside weights: the place in the data, and which data of what."""
    return {
        "samples": step * layout.global_batch,
        "task": {name: getattr(task, name) for name in _IDENTITY},
    }


def check_position(
    done: int, position: Mapping[str, Any] | None, layout: Layout, task: Task
) -> None:
    """Raise ConfigError where a checkpoint is not of this task.

    Samples are counted by steps: another global batch would leave some out, or repeat them.
    """
    then: Any = (position or {}).get("task")
    if not done or not isinstance(then, Mapping):
        then = {}
    for name in _IDENTITY:
        if name in then and then[name] != (now := getattr(task, name)):
            key = "frozen" if name == "frozen_layers" else name  # as one writes it
            raise ConfigError(
                f"{key}={now}",
                f"the checkpoint of step {done} of {task.name} was made with {then[name]}",
                f"write {then[name]}, rename the task, or remove its checkpoints",
            )
    samples = (position or {}).get("samples")
    if done and samples != done * layout.global_batch:
        raise ConfigError(
            f"global_batch={layout.global_batch}",
            f"the checkpoint has {samples} samples after {done} steps",
            "go on with the global batch that it was made with",
        )


def check_output(task: Task, layout: Layout, comm: Comm) -> None:
    """Raise ResultError on all ranks where one of them could not write its part. Collective."""
    first_replica = layout.place_of(comm.rank)[0] == 0
    told = comm.gather(fault(task.output) if first_replica else "")
    faults = [f"rank {rank}: {why}" for rank, why in enumerate(told or ()) if why]
    if why := comm.broadcast(faults[0] if faults else ""):
        raise on_all_ranks(ResultError(f"the result of {task.name} could not be written: {why}"))


def write_result(
    task: Task,
    layout: Layout,
    comm: Comm,
    step: int,
    metrics: Mapping[str, float],
    weights: Mapping[str, Tensor],
    say: Callable[[str], None],
) -> None:
    """Write the result and say whether it keeps its target. Collective."""
    said = " ".join(f"{name}={value:.6f}" for name, value in metrics.items())
    if task.quality is None:
        say(f"result after step {step}: {said}")
    else:
        kept = task.quality.kept(metrics[task.quality.metric])
        say(f"result after step {step}: {said}; {task.quality} {'kept' if kept else 'MISSED'}")
    if not task.output:
        return
    directory = Path(task.output)
    replica, stage = layout.place_of(comm.rank)
    digest = problem = ""
    try:
        if replica == 0:
            digest = write_part(directory, stage, layout.stages, weights)
    except OSError as exc:
        problem = f"rank {comm.rank}: {exc}"
    # Whoever cannot write tells all: they would wait for each other otherwise.
    told = comm.gather([digest, problem])
    if told is not None:
        problem = "; ".join(words for _, words in told if words)
        named = {part_name(i, layout.stages): told[i][0] for i in range(layout.stages)}
        try:
            if not problem:
                write_manifest(directory, task, layout, step=step, metrics=metrics, digests=named)
        except OSError as exc:
            problem = f"rank 0: {exc}"
    if problem := comm.broadcast(problem):
        raise on_all_ranks(ResultError(f"the result of {task.name} is not written: {problem}"))
    say(f"result in {directory}")


def sayer(ranks: Ranks) -> Any:
    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, flush=True)

    return say


class Records:
    """The files of ``--loss-log`` and ``--timings``, written by rank 0 line by line.

    Appended to: a step that an attempt makes again is there again, and the last line counts.
    """

    def __init__(self, options: Options, ranks: Ranks, attempt: int, task: str = "") -> None:
        writer = ranks.rank == 0
        self._task = {"task": task} if task else {}
        self._loss = _opened(options.loss_log) if writer else None
        self._timings = _opened(options.timings) if writer else None
        self._attempt, self._device = attempt, ranks.device
        if self._timings is not None:
            _write(self._timings, _described(ranks.device))

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._loss, self._timings):
            if file is not None:
                file.close()

    def step(self, step: int, loss: float | None, wall_s: float, compute_s: float) -> None:
        """Note one step. The loss is written exactly, as hexadecimal digits."""
        if self._loss is not None and loss is not None:
            line: dict[str, Any] = {"step": step, "loss": loss, "hex": loss.hex()}
            _write(self._loss, {**line, "attempt": self._attempt, **self._task})
        if self._timings is not None:
            line = {"step": step, "at_s": time.time(), "wall_s": wall_s, "compute_s": compute_s}
            line |= {"attempt": self._attempt, **self._task}
            if self._device.type == "cuda":
                line["memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
            _write(self._timings, line)


def _described(device: torch.device) -> dict[str, Any]:
    """What the throughput table calls environment and GPU type."""
    if device.type != "cuda":
        return {"environment": f"torch-{torch.__version__}", "device": "cpu"}
    environment = f"torch-{torch.__version__}-cuda-{torch.version.cuda}"
    return {"environment": environment, "device": torch.cuda.get_device_name(device)}


def _opened(path: Path | None) -> TextIO | None:
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "a", encoding="ascii")


def _write(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()

"""How a task of a chain ends: its last checkpoint, its result, and the record that it is done.

All of it runs in the thread beside, on a communicator and a store of that thread's own; the
training thread must not use either while a job is under way. Nothing is moved here, and nothing is
decided about the task that follows.

The record comes last, since it vouches for the rest. A result that cannot be written is told and
is no error: every rank hears of it, the tasks behind do not need it, and the checkpoint that is
there lets the next start write it without a step. A record that cannot be written is one: the next
start would take the task for unfinished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.comm import Comm
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.beside import LIMIT_S
from slurm_ft.switch.chain import ChainState, Done
from slurm_ft.switch.leaving import Leaving
from slurm_ft.switch.overlap import SwitchError
from slurm_ft.train.layout import Layout
from slurm_ft.train.program import write_result
from slurm_ft.train.results import ResultError
from slurm_ft.train.task import Task
from slurm_ft.train.trainer import metrics_of


@dataclass(frozen=True, slots=True)
class Trained:
    """A task whose steps are made. ``counts`` are this rank's part of its evaluation."""

    task: Task
    layout: Layout
    step: int
    counts: tuple[float, ...]


def exchange(group: bool, directory: Path, blocks: Path | None) -> tuple[Comm, CheckpointStore]:
    """Communicator and store of the thread beside. Collective, in the training thread.

    ``group`` tells whether there are other ranks; ``blocks`` is the store of shared blocks. Called
    once, before anything runs beside: groups are numbered in the order in which they are made, so
    the thread must make none while the training thread may.
    """
    side: Comm = SoloComm()
    own = None
    if group:
        from slurm_ft.session.comms.torch_group import TorchComm, new_gloo_group

        side, own = TorchComm(LIMIT_S), new_gloo_group(None)
    return side, CheckpointStore(directory, side, group=own, blocks=blocks)


class Finisher:
    """Every method is collective and called in the thread beside.

    ``unwritten`` is told, on each rank, of a task whose result could not be written.
    """

    def __init__(
        self,
        side: Comm,
        store: CheckpointStore,
        chain: ChainState,
        attempt: int,
        say: Callable[[str], None],
        unwritten: Callable[[Task, str], None],
    ) -> None:
        self._side, self._store, self._chain = side, store, chain
        self._attempt, self._say, self._unwritten = attempt, say, unwritten

    def save(
        self, trained: Trained, leaving: Leaving, meta: Meta, random: Mapping[str, Any]
    ) -> None:
        """The last checkpoint, of a task that is on its way out or still on the device."""
        self._store.move(self._chain.checkpoints_of(trained.task))
        self._store.save(trained.step, {"task": leaving}, meta, random=random)

    def result(self, trained: Trained, weights: Mapping[str, Tensor]) -> None:
        """Result and record. The last checkpoint is durable already."""
        task, side = trained.task, self._side
        told = side.gather(list(trained.counts))
        sums = None if told is None else [sum(column) for column in zip(*told, strict=True)]
        metrics = metrics_of(task, side.broadcast(sums))
        try:
            write_result(task, trained.layout, side, trained.step, metrics, weights, self._say)
        except ResultError as exc:
            self._unwritten(task, str(exc))
            return
        problem = ""
        if side.rank == 0:
            try:
                self._chain.record(
                    Done(task.name, trained.step, metrics, self._attempt, time.time())
                )
            except OSError as exc:
                problem = str(exc)
        if problem := side.broadcast(problem):
            raise SwitchError(f"that {task.name} is done cannot be recorded: {problem}")

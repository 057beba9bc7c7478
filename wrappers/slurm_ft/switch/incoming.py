"""A task's first state, made ready in host memory while another task trains.

This is the seam for parameters that come from elsewhere: whoever fills an `Incoming` (a fresh
model, a checkpoint, some day another job's task) decides what is trained next; the switch only
moves its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.switch.plan import Block
from slurm_ft.switch.storages import Held, collect
from slurm_ft.train.layout import Layout
from slurm_ft.train.models import build_model
from slurm_ft.train.program import check_position
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.state import TaskState
from slurm_ft.train.task import Task
from slurm_ft.train.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Incoming:
    """Bytes by block key, content hashes and marks of frozen blocks, and where the task stands.

    ``random`` are the random states that go with the step; empty where the task begins, since its
    seed tells them then.
    """

    task: Task
    content: dict[str, Tensor]
    digests: dict[str, str]
    marks: dict[str, int] = field(default_factory=dict)
    step: int = 0
    position: Mapping[str, Any] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)

    def keep_only(self, keys: set[str]) -> None:
        """It has arrived: only a frozen block's clean copy is of use any longer."""
        self.content = {key: value for key, value in self.content.items() if key in keys}

    def clean_copy(self, key: str, mark: int | None) -> Tensor | None:
        """The content that a frozen block came with, if that is what it holds (``mark``) now."""
        same = mark is not None and self.marks.get(key) == mark
        return self.content.get(key) if same else None

    def seed(self) -> None:
        """Set this process's random states to the task's."""
        torch.manual_seed(self.task.seed)
        if self.random:
            random_states.apply(self.random, f"task {self.task.name}")


def make_ready(
    task: Task,
    *,
    layout: Layout,
    ranks: Ranks,
    store: CheckpointStore,
    directory: Path,
    frozen: set[str],
) -> Incoming:
    """Build or load this rank's part. Collective over the store's communicator.

    ``frozen`` are the keys of blocks that the present task does not train: only those can be
    there already, so only those are hashed.
    """
    model = build_model(task, layout.place_of(ranks.rank)[1], layout.stages)
    state = TaskState(task, model)
    store.move(directory)
    loaded = store.load({"task": state}, random=False)
    step, position, states = 0, dict[str, Any](), dict[str, Any]()
    if loaded is not None:
        step, position = loaded.step, dict(loaded.position)
        check_position(step, position, layout, task)
        if ranks.rank < loaded.world_size:
            states, _ = random_states.read(loaded.path, random_states.file_name(ranks.rank))
    # Moments that begin at zero are not brought but cleared in place.
    held = collect(list(model.layers.values()), None if loaded is None else state.optimizer)
    content = {entry.key: entry.bytes for entry in held}
    if ranks.device.type == "cuda":
        content = {key: value.pin_memory() for key, value in content.items()}
    still = [entry for entry in held if entry.key in frozen]
    digests = {entry.key: entry.digest() for entry in still}
    marks = {entry.key: entry.mark() for entry in still}
    return Incoming(task, content, digests, marks, step, position, states)


def held_by(trainer: Trainer) -> list[Held]:
    """All storages of the present task on this rank."""
    return collect(list(trainer.model.layers.values()), trainer.state.optimizer)


def frozen_in(trainer: Trainer) -> set[str]:
    """Keys of the storages that the present task does not train. Buffers are not among them:
    they want no gradient either, and a forward changes them all the same."""
    return {
        entry.key
        for entry in collect(list(trainer.model.layers.values()), None)
        if all(isinstance(user, nn.Parameter) and not user.requires_grad for user in entry.users)
    }


def marks_of(held: Sequence[Held], frozen: set[str]) -> dict[str, int]:
    """What the frozen storages hold now: that nobody trains them does not mean that nobody has
    changed them."""
    return {entry.key: entry.mark() for entry in held if entry.key in frozen}


def blocks_of(
    held: Sequence[Held], marks: Mapping[str, int], present: Incoming | None, incoming: Incoming
) -> list[Block]:
    """What a plan has to know of each storage. ``marks`` are of the frozen ones; ``present`` is
    what the present task came as."""
    blocks = []
    for entry in held:
        still = entry.key in marks
        came = present if still and _unchanged(present, entry.key, marks[entry.key]) else None
        old = None
        if still:
            old = entry.digest() if came is None else came.digests[entry.key]
        new = incoming.digests.get(entry.key)
        # A frozen block whose clean copy the host still has need not leave.
        clean = came is not None and entry.key in came.content
        keep = not still or (old != new and not clean)
        fresh = entry.key not in incoming.content
        blocks.append(Block(entry.key, entry.layer, entry.nbytes, keep, old, new, fresh))
    return blocks


def _unchanged(present: Incoming | None, key: str, mark: int) -> bool:
    if present is None or key not in present.marks:
        return False
    if present.marks[key] == mark:
        return True
    _log.warning("task %s: %s is frozen and was changed all the same", present.task.name, key)
    return False

"""Planners between our pieces and torch.distributed.checkpoint. Torch only.

Torch stores what several ranks hold under one key once, and looks at the key alone: where the
values differ, one rank's silently wins. Pipeline stages that all call their first layer
``layers.0`` lose all stages but one that way. So the ranks' values are compared when a plan is
made, and a difference is an error that names the key.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.staging import Pieces


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """What a rank's plan carries to the coordinator."""

    paths: Mapping[str, tuple[Any, ...]]
    words: Mapping[str, str]


class PiecesPlanner(SavePlanner):  # type: ignore[misc]
    """Plans from pieces; afterwards ``written`` holds what this rank had to write.

    Nothing here raises into torch: what a rank raises there is pickled with its traceback, which
    Python 3.13 refuses, and the other ranks then wait for ever. A problem is kept in ``problem``,
    the plan becomes empty, and the commit tells everybody.
    """

    def __init__(self, pieces: Pieces, words: Mapping[str, str]) -> None:
        self._pieces = pieces
        self._words = words
        self.written: frozenset[MetadataIndex] = frozenset()
        self.problem = ""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the pieces are there already."""

    def create_local_plan(self) -> SavePlan:
        """This rank's plan, as it was made when the pieces were staged."""
        plan = self._pieces.plan
        return dataclasses.replace(plan, planner_data=_Told(plan.planner_data, self._words))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Torch's own plan, once the replicas are known to be alike."""
        told = [plan.planner_data for plan in all_plans]
        bare = [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        default = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            compare_replicas([each.words for each in told])
            plans, metadata = default.create_global_plan(bare)
        except Exception as exc:
            self.problem = told_as(exc)
            return [SavePlan([]) for _ in all_plans], Metadata({})
        paths = {key: path for each in told for key, path in each.paths.items()}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What is left for this rank to write; all of it must have been staged."""
        self.written = frozenset(item.index for item in new_plan.items)
        absent = [i.index.fqn for i in new_plan.items if i.index not in self._pieces.data]
        if absent:
            self.problem = (
                f"{absent[0]}: another rank was to write this and does not: the ranks' states"
                " changed their form between two saves; the next save stages everything"
            )
            return dataclasses.replace(new_plan, items=[])
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The staged data of an item."""
        return self._pieces.data[write_item.index]


class FlatLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Loads into leaves by key: tensors in place, everything else into ``leaves``.

    Torch is given an empty state, and the leaves come in here. It takes a state for one that has
    the same keys on every rank; releases up to 2.6 compare, and each rank warns where they differ.
    Pipeline stages have keys of their own, which does no harm: a rank plans and reads what it asks
    for by itself, and keys in common are of use only to a ``Stateful``, whose methods may exchange.
    No leaf is one. So there is nothing to compare, and nothing to silence.

    As above, a problem of this rank is kept and nothing is raised into torch.
    """

    def __init__(self, leaves: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._leaves = leaves
        self.problem = ""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan for the leaves, whatever torch was given."""
        super().set_up_planner(self._leaves, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads; nothing where something is missing."""
        try:
            return super().create_local_plan()
        except Exception as exc:
            self.problem = told_as(exc)
            return LoadPlan([])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value that is no tensor. The file was checked to be this user's own."""
        self._leaves[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=False
        )


def told_as(exc: BaseException) -> str:
    """An exception in one line, for the other ranks."""
    if isinstance(exc, CheckpointException):  # torch's, and no Exception
        each = [f"rank {rank}: {told_as(why[0])}" for rank, why in sorted(exc.failures.items())]
        return "; ".join(each[:4])
    if isinstance(exc, CheckpointError):
        return str(exc)
    if isinstance(exc, OSError):
        return f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc.strerror or exc)
    return f"{type(exc).__name__}: {exc}".splitlines()[0]


def compare_replicas(words: list[Mapping[str, str]]) -> None:
    """Raise CheckpointError where ranks hold different values under one key."""
    first: dict[str, tuple[int, str]] = {}
    for rank, mine in enumerate(words):
        for key, word in mine.items():
            other, said = first.setdefault(key, (rank, word))
            if said != word:
                raise CheckpointError(
                    f"{key}: rank {other} has {said}, rank {rank} has {word}: one key stands for"
                    " one value on all ranks; give what belongs to a rank or a pipeline stage a key"
                    " of its own, such as 'stage3.layers.0'"
                )

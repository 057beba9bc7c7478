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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.staging import Pieces


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """What a rank's plan carries to the coordinator."""

    paths: Mapping[str, tuple[Any, ...]]
    words: Mapping[str, str]


class PiecesPlanner(SavePlanner):  # type: ignore[misc]
    """Plans from pieces; afterwards ``written`` holds what this rank had to write."""

    def __init__(self, pieces: Pieces, words: Mapping[str, str]) -> None:
        self._pieces = pieces
        self._words = words
        self.written: frozenset[MetadataIndex] = frozenset()

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
        compare_replicas([each.words for each in told])
        bare = [dataclasses.replace(plan, planner_data=None) for plan in all_plans]
        plans, metadata = DefaultSavePlanner(
            flatten_state_dict=False, flatten_sharded_tensors=False
        ).create_global_plan(bare)
        paths = {key: path for each in told for key, path in each.paths.items()}
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What is left for this rank to write; all of it must have been staged."""
        self.written = frozenset(item.index for item in new_plan.items)
        for item in new_plan.items:
            if item.index not in self._pieces.data:
                raise CheckpointError(
                    f"{item.index.fqn}: another rank was to write this and does not: the ranks'"
                    " states changed their form between two saves; the next save stages everything"
                )
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The staged data of an item."""
        return self._pieces.data[write_item.index]


class FlatLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """Loads into leaves by key: tensors in place, everything else into ``leaves``."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._leaves = leaves

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value that is no tensor. The file was checked to be this user's own."""
        self._leaves[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=False
        )


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

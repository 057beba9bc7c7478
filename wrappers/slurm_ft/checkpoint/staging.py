"""What one rank has to write: planned and copied while training stands still. Torch only.

Staging copies exactly the pieces that torch's planner lists for this rank, into buffers that are
kept from save to save (pinned where the source is a GPU): fresh pages cost more than the copy, and
the writer thread never touches a live tensor. A tensor that all ranks hold alike is written by one
of them; from the second save on, as long as no rank's plan changes, each rank copies only what it
writes, which makes the stall smaller by the number of ranks.
"""

from __future__ import annotations

import ctypes
import io
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from slurm_ft.checkpoint.state import flatten, torch_paths, tree_of


@dataclass(frozen=True, slots=True)
class Pieces:
    """This rank's plan and the data behind it.

    ``replicas`` has, for each key that several ranks may hold alike, a word that is the same where
    the values are.
    """

    plan: SavePlan
    data: dict[MetadataIndex, torch.Tensor | io.BytesIO]
    plain: dict[MetadataIndex, Any] = field(default_factory=dict)

    def form(self) -> tuple[Any, ...]:
        """What the plan depends on: equal forms on all ranks give equal plans."""
        return tuple(_form(item) for item in self.plan.items)


def pieces_of(state: Mapping[str, Any]) -> Pieces:
    """Plan a save. Tensors in the answer are views of the live ones."""
    flat, paths = flatten(tree_of(state))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Every rank plans as the coordinator does: which rank writes is settled afterwards.
    planner.set_up_planner(flat, None, True)
    plan = planner.create_local_plan()
    data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
    plain: dict[MetadataIndex, Any] = {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            data[item.index] = planner.resolve_data(item)
            plain[item.index] = flat[item.index.fqn]
        else:
            data[item.index] = planner.lookup_object(item.index).detach()
    told = SavePlan(plan.items, planner_data=torch_paths(paths))
    return Pieces(told, data, plain)


class Buffers:
    """Host memory that is used again by each save."""

    def __init__(self) -> None:
        self._held: dict[MetadataIndex, torch.Tensor] = {}

    def stage(
        self, pieces: Pieces, only: frozenset[MetadataIndex] | None, *, borrow: bool
    ) -> Pieces:
        """Copy the pieces, or ``only`` those named, to host memory of our own.

        With ``borrow`` what lies in host memory already is not copied. A GPU's is in any case: the
        current device and stream are the calling thread's, and the writer has others. Buffers of
        pieces that are not copied any more are given back.
        """
        data: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        devices: set[torch.device] = set()
        for index, source in pieces.data.items():
            if only is not None and index not in only:
                continue
            on_cpu = not isinstance(source, torch.Tensor) or source.device.type == "cpu"
            if not isinstance(source, torch.Tensor) or (borrow and on_cpu):
                data[index] = source
                continue
            buffer = self._buffer(index, source)
            buffer.copy_(source, non_blocking=not on_cpu)
            if not on_cpu:
                devices.add(source.device)
            data[index] = buffer
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        if not borrow:
            for index in [index for index in self._held if index not in data]:
                del self._held[index]
        return Pieces(pieces.plan, data, pieces.plain)

    @property
    def bytes(self) -> int:
        """Memory that is held."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def _buffer(self, index: MetadataIndex, source: torch.Tensor) -> torch.Tensor:
        held = self._held.get(index)
        if held is None or held.shape != source.shape or held.dtype != source.dtype:
            held = torch.empty(
                source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda"
            )
            self._held[index] = held
        return held


def replica_words(pieces: Pieces) -> dict[str, str]:
    """For each key that torch would store once for all ranks, a word for its value here.

    crc32: it runs at 3.5 GB/s a core, and what must be noticed is a mistake, not an attack.
    Python objects count by their printed form where that is their value.
    """
    words: dict[str, str] = {}
    for item in pieces.plan.items:
        if item.type == WriteItemType.TENSOR:
            value = pieces.data.get(item.index)
            if isinstance(value, torch.Tensor):
                words[item.index.fqn] = _word_of_tensor(value)
        elif item.type == WriteItemType.BYTE_IO and _is_value(pieces.plain[item.index]):
            words[item.index.fqn] = repr(pieces.plain[item.index])[:200]
    return words


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The content of a tensor, without a copy where it lies in one piece in host memory.

    By way of ctypes, since a tensor has no buffer protocol and numpy may not be there.
    """
    whole = tensor.detach().to("cpu").contiguous()
    if whole.numel() == 0:
        return memoryview(b"")
    array = (ctypes.c_uint8 * whole.nbytes).from_address(whole.data_ptr())
    array.keeps = whole  # the memory must live as long as anybody looks at it
    return memoryview(array).cast("B")


def _word_of_tensor(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} crc {zlib.crc32(bytes_of(tensor)):08x}"


def _is_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _all_values(value.keys()) and _all_values(value.values())
    if isinstance(value, list | tuple):
        return _all_values(value)
    return value is None or isinstance(value, bool | int | float | str)


def _all_values(values: Iterable[Any]) -> bool:
    return all(_is_value(value) for value in values)


def _form(item: WriteItem) -> tuple[Any, ...]:
    tensor = item.tensor_data
    if tensor is None:
        return (item.index.fqn, item.type)
    return (
        item.index.fqn,
        item.type,
        tensor.chunk.offsets,
        tensor.chunk.sizes,
        tensor.size,
        tensor.properties.dtype,
    )

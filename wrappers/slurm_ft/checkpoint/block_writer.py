"""A checkpoint whose unchanging tensors lie in a block store. Torch only.

What goes into blocks is what other checkpoints will want again: frozen parameters, and any tensor
that is there already or has not changed since the save before. Trained weights and moments go into
a file of the checkpoint, which goes when the checkpoint goes; as blocks they would be garbage after
the next save. Small tensors go there too: a file each would cost more than it saves.

Digests are taken anew in each save. A tensor's version counter does not tell that it is unchanged:
``teacher.data.mul_(...)`` changes frozen weights and counts nothing.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurm_ft.checkpoint.blocks import BLOCK_BYTES, BlockStore, cut
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.hashing import write_new
from slurm_ft.checkpoint.manifest import BlockEntry
from slurm_ft.checkpoint.planner import told_as
from slurm_ft.checkpoint.staging import bytes_of
from slurm_ft.checkpoint.state import Nature
from slurm_ft.checkpoint.writer import METADATA, already, little_space

# A block costs two directory entries and an fsync.
SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item's bytes are: in a file of the checkpoint, or in blocks."""

    file: str
    offset: int
    length: int
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    blocks: tuple[str, ...] = ()
    block_bytes: int = BLOCK_BYTES

    def entries(self) -> list[BlockEntry]:
        """The blocks with their sizes."""
        last = self.length - self.block_bytes * (len(self.blocks) - 1)
        sizes = [self.block_bytes] * (len(self.blocks) - 1) + [last]
        return [BlockEntry(key, size) for key, size in zip(self.blocks, sizes, strict=True)]


class BlockWriter(StorageWriter):  # type: ignore[misc]
    """Writes one file and any number of blocks for this rank.

    ``before`` has the digests of tensors of unknown nature in the save before, ``after`` those of
    this one.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        store: BlockStore,
        nature: Nature,
        before: dict[MetadataIndex, tuple[str, ...]],
    ) -> None:
        self._directory = directory
        self._file = f"data-{rank:05d}.bin"
        self._store = store
        self._nature = nature
        self._before = before
        self.after: dict[MetadataIndex, tuple[str, ...]] = {}
        self.names: set[str] = set()
        self.blocks: dict[str, BlockEntry] = {}
        self.problem = ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; on disk when this returns, but for the file's own fsync."""
        try:
            return already(self._write(plan, planner))
        except Exception as exc:
            self.problem = told_as(exc) + little_space(self._directory)
            return already([])

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results: list[WriteResult] = []
        with (self._directory / self._file).open("xb", buffering=0) as file:
            self.names.add(self._file)
            for item in plan.items:
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    place = self._append(file, data.getbuffer(), (), None)
                else:
                    place = self._tensor(file, item.index, data)
                results.append(WriteResult(item.index, place.length, place))
        self._store.settle(self.blocks.values())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write where everything is."""
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        try:
            write_new(self._directory / METADATA, pickle.dumps(metadata))
        except Exception as exc:
            self.problem = self.problem or told_as(exc) + little_space(self._directory)
        self.names.add(METADATA)

    def _tensor(self, file: Any, index: MetadataIndex, tensor: torch.Tensor) -> Place:
        data, sizes = bytes_of(tensor), tuple(tensor.shape)
        trained = self._nature.is_trained(index.fqn)
        if data.nbytes < SMALL_BYTES or trained:
            return self._append(file, data, sizes, tensor.dtype)
        pieces = cut(data)
        keys = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
        if not self._nature.is_frozen(index.fqn):
            self.after[index] = keys
            entries = [BlockEntry(k, p.nbytes) for k, p in zip(keys, pieces, strict=True)]
            unchanged = self._before.get(index) == keys
            if not unchanged and not all(self._store.claim(entry) for entry in entries):
                return self._append(file, data, sizes, tensor.dtype)
        for key, piece in zip(keys, pieces, strict=True):
            self.blocks[key], _ = self._store.put(piece, key)
        return Place("", 0, data.nbytes, sizes, tensor.dtype, keys)

    def _append(
        self, file: Any, data: memoryview, sizes: tuple[int, ...], dtype: torch.dtype | None
    ) -> Place:
        offset = file.tell()
        left = data
        while left.nbytes:
            left = left[file.write(left) :]
        return Place(self._file, offset, data.nbytes, sizes, dtype)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Each save has a writer of its own."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Only torch's automatic choice of a writer asks this."""
        return False


class BlockReader(StorageReader):  # type: ignore[misc]
    """Reads what a BlockWriter wrote. Digests were checked before, by all ranks together."""

    def __init__(self, directory: Path, store: BlockStore) -> None:
        self._directory = directory
        self._store = store
        self._places: dict[MetadataIndex, Place] = {}
        self._metadata: Metadata | None = None
        self.problem = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is where, read once. The file was checked to be this user's own."""
        if self._metadata is None:
            with (self._directory / METADATA).open("rb") as file:
                self._metadata = pickle.load(file)  # noqa: S301
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Remember where everything is."""
        self._places = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items."""
        try:
            self._read_all(plan, planner)
        except Exception as exc:
            self.problem = told_as(exc)
        return already(None)

    def _read_all(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        for request in plan.items:
            place = self._places[request.storage_index]
            content = bytearray(place.length)
            self._read(place, memoryview(content))
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(content))
                continue
            piece = _as_tensor(content, place)
            for dimension, (at, length) in enumerate(
                zip(request.storage_offsets, request.lengths, strict=True)
            ):
                piece = piece.narrow(dimension, at, length)
            target = planner.resolve_tensor(request).detach()
            target.copy_(piece)
            planner.commit_tensor(request, target)

    def _read(self, place: Place, content: memoryview) -> None:
        if place.blocks:
            at = 0
            for entry in place.entries():
                self._store.read_into(entry, content[at : at + entry.size])
                at += entry.size
            return
        with (self._directory / place.file).open("rb", buffering=0) as file:
            file.seek(place.offset)
            done = 0
            while done < place.length and (count := file.readinto(content[done:])):
                done += count
        if done != place.length:
            raise CheckpointError(f"{self._directory / place.file}: ends within an entry")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """Each load has a reader of its own."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Only torch's automatic choice of a reader asks this."""
        return False


def _as_tensor(content: bytearray, place: Place) -> torch.Tensor:
    if not content:
        return torch.empty(place.sizes, dtype=place.dtype)
    # By way of bytes, which every type can be viewed from.
    return torch.frombuffer(content, dtype=torch.uint8).view(place.dtype).view(place.sizes)

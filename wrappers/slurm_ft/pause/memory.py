"""Device memory of parameters, gradients and optimizer state: to the host and back.

Only live storages are moved, never the allocator's pool: a storage is copied, shrunk to nothing in
place, and later grown and filled again. Tensors keep their storage object throughout, so views,
aliases and the optimizer's references stay what they are, and no program code has to know. Called
at the low moment after an optimizer step, when activations are gone.

On a GPU the copy lies in host memory. Storages that are in host memory already stay where they are
unless a directory to spill to is given; then they move into files there, and the memory is really
freed as well. What cannot be resized (shared or mapped memory, another library's) stays too. What
is restored lies at other addresses: what has kept a bare pointer, as a captured CUDA graph, breaks.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ft.pause.ladder import LostStateError, PartError
from slurm_ft.pause.room import host_room, ranks_here

_log = logging.getLogger(__name__)

# Whoever was let in meanwhile may still be clearing the device: a restore tries again so often.
_AGAIN_S = 0.5
# A roll-back has no deadline of its own.
_BACK_S = 30.0


@dataclass
class _Moved:
    """One storage that is away. ``copy`` is a storage-sized tensor of bytes."""

    storage: Any
    nbytes: int
    copy: Any


class DeviceMemory:
    """`slurm_ft.pause.ladder.Part` for the tensors reachable from a session's state."""

    name = "device memory"

    def __init__(self, state: Mapping[str, Any], spill: Path | None = None) -> None:
        self._state = state
        self._spill = spill
        self._moved: list[_Moved] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def missing(self) -> str:
        """Why nothing can be released; empty where it can."""
        if next(self._storages(), None) is None:
            return "no tensor of the session's state lies in memory that could be given back"
        return ""

    def release(self, deadline_s: float) -> int:
        """Move all; the bytes that became free."""
        import torch

        storages = list(self._storages())
        self._check_room(storages)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # The host is at a step boundary; the device may still be computing the last one.
            torch.cuda.synchronize()
        total = 0
        try:
            if self._spill is not None:
                self._directory = tempfile.TemporaryDirectory(prefix=".pause-", dir=self._spill)
            for storage in storages:
                if time.monotonic() >= deadline_s:
                    raise PartError(f"{total} bytes moved, and no time left for the others")
                total += self._move(torch, storage)
        except Exception as exc:
            # Whatever it is (RuntimeError is torch's word for memory that could not be had):
            # nobody may go on with a half of the tensors.
            moved = len(self._moved)
            try:
                self.restore(time.monotonic() + _BACK_S)
            except PartError as lost:
                raise LostStateError(f"{exc}; and while that was undone: {lost}") from exc
            raise PartError(f"{exc}; all {moved} moved tensors are back") from exc
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Without this the freed blocks stay in the allocator's pool, invisible to others.
            torch.cuda.empty_cache()
        return total

    def restore(self, deadline_s: float) -> None:
        """Move all back; bit by bit what it was. Tries until the deadline."""
        import torch

        told = False
        while self._moved:
            try:
                self._move_back(torch, self._moved[-1])
            except RuntimeError as exc:
                if time.monotonic() + _AGAIN_S >= deadline_s:
                    left = sum(moved.nbytes for moved in self._moved)
                    raise PartError(f"{left} bytes cannot be had back: {exc}") from exc
                if not told:
                    _log.warning("pause: %s; trying again until the deadline", exc)
                told = True
                time.sleep(_AGAIN_S)
            else:
                self._moved.pop()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    # --- one storage ----------------------------------------------------------------------------

    def _move(self, torch: Any, storage: Any) -> int:
        nbytes: int = storage.nbytes()
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if self._directory is None:
            copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=False)
        else:
            name = os.path.join(self._directory.name, str(len(self._moved)))
            copy = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        copy.copy_(flat)
        del flat
        storage.resize_(0)
        self._moved.append(_Moved(storage, nbytes, copy))
        return nbytes

    @staticmethod
    def _move_back(torch: Any, moved: _Moved) -> None:
        storage = moved.storage
        storage.resize_(moved.nbytes)
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat.copy_(moved.copy)

    def _check_room(self, storages: list[Any]) -> None:
        """Refuse before anything is moved where the host has no room for the copies."""
        if self._spill is not None:
            free = os.statvfs(self._spill)
            room, where = free.f_bavail * free.f_frsize, str(self._spill)
            room //= ranks_here(os.environ)
        else:
            room, where = host_room(os.environ), "the host's memory"
        needed = sum(storage.nbytes() for storage in storages)
        if needed > room:
            raise PartError(
                f"{needed} bytes are needed in {where}, which has room for {room} of each rank"
            )

    # --- which storages -------------------------------------------------------------------------

    def _storages(self) -> Iterator[Any]:
        """Each storage once, however many tensors look at it."""
        # By identity, which is only unique among what is alive: everything seen is kept.
        seen: dict[int, Any] = {}
        for tensor in _tensors(self._state, {}):
            try:
                storage = tensor.untyped_storage()
                hollow = storage.nbytes() == 0 or storage.data_ptr() == 0
            except (RuntimeError, ValueError):
                continue  # no memory of its own: not initialized yet, or of an opaque layout
            if hollow or storage._cdata in seen:
                continue
            seen[storage._cdata] = storage
            on_host = storage.device.type == "cpu"
            # Of memory on a device is_shared() is always true.
            if on_host and (self._spill is None or storage.is_shared()):
                continue
            if storage.device.type == "meta" or not storage.resizable():
                continue
            yield storage


def _tensors(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Every tensor reachable from a module, an optimizer, or nested containers of them."""
    import torch

    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        inner = _inner(torch, value)
        if inner:
            yield from _tensors(inner, seen)
        else:
            yield value
        if value.is_leaf and value.grad is not None:
            yield from _tensors(value.grad, seen)
    elif isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _tensors(tensor, seen)
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from _tensors(group["params"], seen)
        yield from _tensors(dict(value.state), seen)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif hasattr(value, "state_dict") and not isinstance(value, type):
        # A state dict refers to the live tensors; one that was copied for it is skipped below,
        # since nobody else holds its storage and giving it back is harmless.
        yield from _tensors(value.state_dict(), seen)


def _inner(torch: Any, value: Any) -> list[Any]:
    """The tensors that hold the memory of one that only wraps them; empty for a plain one."""
    if hasattr(value, "__tensor_flatten__"):
        # Sharded and quantized parameters, and other subclasses.
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []

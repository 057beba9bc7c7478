"""Device memory of parameters, gradients and optimizer state: to the host and back.

Only live storages are moved, never the allocator's pool: a storage is copied, shrunk to nothing in
place, and later grown and filled again. Tensors keep their storage object throughout, so views,
aliases and the optimizer's references stay what they are, and no program code has to know. Called
at the low moment after an optimizer step, when activations are gone.

On a GPU the copy lies in host memory. Storages that are in host memory already stay where they are
unless a directory to spill to is given; then they move into files there, and the memory is really
freed as well. What cannot be resized (shared or mapped memory, another library's) stays too.
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

from slurm_ft.pause.ladder import PartError

_log = logging.getLogger(__name__)

# Part of the host's free memory that the copies may take: data loaders and page cache need some.
_HOST_SHARE = 0.9
_MEMINFO = Path("/proc/meminfo")


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
        except (PartError, RuntimeError, OSError) as exc:
            # RuntimeError is torch's word for memory that could not be had.
            moved = len(self._moved)
            self.restore(float("inf"))
            raise PartError(f"{exc}; all {moved} moved tensors are back") from exc
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # Without this the freed blocks stay in the allocator's pool, invisible to others.
            torch.cuda.empty_cache()
        return total

    def restore(self, deadline_s: float) -> None:
        """Move all back; bit by bit what it was."""
        import torch

        try:
            while self._moved:
                self._move_back(torch, self._moved[-1])
                self._moved.pop()
        except RuntimeError as exc:
            left = sum(moved.nbytes for moved in self._moved)
            raise PartError(f"{left} bytes cannot be had back: {exc}") from exc
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
        else:
            room, where = int(_available_bytes() * _HOST_SHARE), "the host's memory"
        needed = sum(storage.nbytes() for storage in storages)
        if needed > room:
            raise PartError(f"{needed} bytes are needed in {where}, which has room for {room}")

    # --- which storages -------------------------------------------------------------------------

    def _storages(self) -> Iterator[Any]:
        """Each storage once, however many tensors look at it."""
        # By identity, which is only unique among what is alive: everything seen is kept.
        seen: dict[int, Any] = {}
        for tensor in _tensors(self._state, {}):
            storage = tensor.untyped_storage()
            if storage._cdata in seen or storage.nbytes() == 0:
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
        local = getattr(value, "_local_tensor", None)
        yield value if local is None else local
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


def _available_bytes() -> int:
    """What the kernel says could be allocated without swapping."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise PartError(f"{_MEMINFO} does not tell how much memory is available")

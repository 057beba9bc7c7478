"""The memory under a stage's tensors, one entry per storage.

Tensors may share a storage (tied weights, views, flattened parameters), so the storage is what
moves. `Held.adopt` puts another storage under all of its tensors at once: the parameters stay the
same objects, for the optimizer, the hooks and the schedule that know them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of the words whose sums are weighted alike: small beside a parameter, wide enough for a GPU.
_COLUMNS = 4096


class Held:
    """One storage of a stage: its bytes and the tensors that use them."""

    def __init__(self, key: str, layer: int, first: Tensor) -> None:
        self.key = key
        self.layer = layer
        self.bytes = storage_bytes(first)
        self.users: list[Tensor] = [first]

    @property
    def nbytes(self) -> int:
        """Size of the storage."""
        return len(self.bytes)

    def adopt(self, content: Tensor) -> Tensor:
        """Put these bytes (of equal size) under all tensors; the old bytes are returned."""
        if len(content) != self.nbytes:
            raise ValueError(f"{self.key}: {len(content)} bytes do not replace {self.nbytes}")
        for user in self.users:
            user.data = view_like(user, content)
        old, self.bytes = self.bytes, content
        return old

    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(self.bytes.cpu().numpy()).hexdigest()

    def mark(self) -> int:
        """See `mark_of`."""
        return mark_of(self.bytes)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage under a tensor as a flat byte tensor that shares it."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def mark_of(content: Tensor) -> int:
    """A number that changes with the content, in one pass where the bytes are.

    It tells whether something was changed by mistake, as a digest would, at the speed of memory: a
    weighted sum modulo 2^64 whose weights are odd, so that no change of a single word is missed.
    """
    whole = len(content) // (8 * _COLUMNS) * 8 * _COLUMNS
    columns = torch.zeros(_COLUMNS, dtype=torch.int64, device=content.device)
    if whole:
        columns += content[:whole].view(torch.int64).view(-1, _COLUMNS).sum(dim=0)
    rest = torch.zeros(8 * _COLUMNS, dtype=torch.uint8, device=content.device)
    rest[: len(content) - whole] = content[whole:]
    columns += rest.view(torch.int64)
    weights = 2 * torch.arange(_COLUMNS, device=content.device) + 1
    return int((columns * weights).sum())


def view_like(tensor: Tensor, content: Tensor) -> Tensor:
    """A tensor of the same form and place in its storage, over other bytes."""
    view = torch.empty(0, dtype=tensor.dtype, device=content.device)
    return view.set_(
        content.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def address(tensor: Tensor) -> int:
    """What two tensors of one storage have in common."""
    return int(tensor.untyped_storage().data_ptr())


def collect(layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> list[Held]:
    """Storages of parameters, buffers and optimizer state, keyed by layer and name.

    ``layers`` are the stage's parts in forward order. A storage used by two layers belongs to the
    first. Optimizer state that does not exist yet (before its first step) is not there.
    """
    found: dict[int, Held] = {}

    def take(key: str, layer: int, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        here = found.get(address(tensor))
        if here is None:
            found[address(tensor)] = Held(key, layer, tensor)
        elif all(tensor is not user for user in here.users):
            here.users.append(tensor)

    place: dict[Tensor, tuple[int, str]] = {}
    for layer, module in enumerate(layers):
        for name, tensor in _tensors(module):
            place.setdefault(tensor, (layer, name))
            take(f"{layer}.{name}", layer, tensor)
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                layer, name = place.get(parameter, (len(layers) - 1, "?"))
                for slot, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, Tensor):
                        take(f"{layer}.{name}.{slot}", layer, value)
    return list(found.values())


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def mirror(state: Any, twins: Mapping[int, Tensor]) -> Any:
    """The same nested state with its tensors over other bytes, by the address of their storage.

    Tensors whose storage has no twin stay as they are; so does everything that is no tensor.
    """
    if isinstance(state, Tensor):
        twin = twins.get(address(state))
        return state if twin is None else view_like(state, twin)
    if isinstance(state, Mapping):
        return {key: mirror(value, twins) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mirror(value, twins) for value in state)
    return state

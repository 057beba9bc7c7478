"""The user's state as one tree of dictionaries, and back. Torch only.

Saved is a mapping of names to objects with ``state_dict`` and ``load_state_dict``, to nested
dictionaries of tensors and plain values, or to a single value.

Loading fills tensors in place. What a fresh program does not have yet, an optimizer's moments above
all, is made from the checkpoint's own description: sharded like the parameter that it belongs to
where the parameter is sharded, whole otherwise. So nobody has to run an optimizer step first, and a
checkpoint loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slurm_ft.checkpoint.errors import CheckpointError

Path: TypeAlias = tuple[Any, ...]
# Entries of the checkpoint's path table that say which keys were whole numbers.
_NUMBERS = "slurm_ft.numbers:"


def unwrapped(holder: Any) -> Any:
    """The module inside a data-parallel one: names must not depend on the number of ranks."""
    return holder.module if isinstance(holder, DistributedDataParallel) else holder


def is_holder(value: Any) -> bool:
    """Whether an object gives and takes its state itself."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def tree_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as nested dictionaries and lists of our own; tensors are the live ones."""
    tree: dict[str, Any] = {}
    for name, value in state.items():
        holder = unwrapped(value)
        tree[name] = _copied(holder.state_dict() if is_holder(holder) else holder)
    return tree


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Leaves by dotted key, and the path that each came from.

    As torch does it, but for two things: a path keeps keys that are whole numbers (an optimizer
    numbers its parameters), where torch turns them into text; and an empty container is a leaf.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def visit(value: Any, path: Path) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                visit(item, (*path, key))
        elif isinstance(value, list) and _worth_opening(value):
            for number, item in enumerate(value):
                visit(item, (*path, At(number)))
        else:
            key = ".".join(str(part) for part in path)
            if key in flat:
                raise CheckpointError(f"state: two entries have the key {key!r}; rename one")
            flat[key] = value
            paths[key] = path

    for name, value in tree.items():
        visit(value, (name,))
    return flat, paths


class At(int):
    """A place in a list, told apart from a dictionary's key that is a whole number."""


def torch_paths(paths: Mapping[str, Path]) -> dict[str, tuple[Any, ...]]:
    """Paths as torch's own tools expect them in a checkpoint, and beside them what torch drops."""
    told: dict[str, tuple[Any, ...]] = {}
    for key, path in paths.items():
        told[key] = tuple(int(p) if isinstance(p, At) else str(p) for p in path)
        numbers = tuple(n for n, p in enumerate(path) if type(p) is int)
        if numbers:
            told[_NUMBERS + key] = numbers
    return told


def own_path(told: Mapping[str, tuple[Any, ...]], key: str) -> Path | None:
    """The path that `torch_paths` was given, as far as text and whole numbers go."""
    path = told.get(key)
    if path is None:
        return None
    numbers = told.get(_NUMBERS + key, ())
    return tuple(
        At(part) if isinstance(part, int) else int(part) if n in numbers else part
        for n, part in enumerate(path)
    )


def complete_flat(
    flat: dict[str, Any], paths: dict[str, Path], state: Mapping[str, Any], metadata: Metadata
) -> None:
    """Make a program's leaves ready to be loaded into.

    An optimizer gets whatever the checkpoint has for its parameters, and keeps its own value of a
    setting that the checkpoint has not (a newer torch has more of them). An empty container gets
    everything that was in it. Beyond that a program gets what it has a key for, and nothing else:
    the checkpoint of a pipeline holds all stages, and a rank asks for its own.
    """
    known = metadata.state_dict_metadata
    empty = {paths[key] for key, value in flat.items() if _is_empty(value) and key not in known}
    for key, path in list(paths.items()):
        own_setting = key not in known and _is_setting(unwrapped(state[path[0]]), path)
        if own_setting or path in empty:
            del flat[key], paths[key]
    for key, kind in known.items():
        at = own_path(metadata.planner_data or {}, key)
        if key in flat or at is None or at[0] not in state:
            continue
        holder = unwrapped(state[at[0]])
        if isinstance(holder, torch.optim.Optimizer):
            wanted = at[1] != "state" or _parameter_of(holder, at) is not None
        else:
            wanted = any(at[:length] in empty for length in range(1, len(at)))
        if not wanted:
            continue
        if isinstance(kind, BytesStorageMetadata):
            flat[key] = None
        elif isinstance(kind, TensorStorageMetadata):
            flat[key] = _room(holder, at, kind)
        paths[key] = at


def put_back(state: Mapping[str, Any], flat: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
    """Hand loaded leaves to the objects that they came from."""
    tree = tree_of(state)
    for key, value in flat.items():
        _put(tree, paths[key], value)
    for name, value in state.items():
        holder = unwrapped(value)
        if is_holder(holder):
            holder.load_state_dict(tree[name])
        elif isinstance(holder, MutableMapping):
            _fill(holder, tree[name])
        elif not isinstance(holder, torch.Tensor):  # a tensor was filled in place
            if not isinstance(state, MutableMapping):
                raise CheckpointError(
                    f"state[{name!r}] is a plain value in a mapping that cannot be changed: give"
                    " the state as a dict"
                )
            state[name] = tree[name]


@dataclass(frozen=True, slots=True)
class Nature:
    """What is known of tensors by their keys; what is neither is judged by its digest."""

    frozen: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    trained_below: tuple[str, ...] = ()

    def is_frozen(self, key: str) -> bool:
        """Training does not change it."""
        return key in self.frozen

    def is_trained(self, key: str) -> bool:
        """Training changes it in every step."""
        return key in self.trained or key.startswith(self.trained_below)


def nature_of(state: Mapping[str, Any]) -> Nature:
    """Which tensors training changes: modules and optimizers tell.

    So does any other object with a method ``frozen_names()``: dotted keys within its own state.
    """
    frozen: set[str] = set()
    trained: set[str] = set()
    below: list[str] = []
    for name, value in state.items():
        holder = unwrapped(value)
        if isinstance(holder, torch.optim.Optimizer):
            below.append(f"{name}.")
        elif isinstance(holder, torch.nn.Module):
            for inner, parameter in holder.named_parameters(remove_duplicate=False):
                (trained if parameter.requires_grad else frozen).add(f"{name}.{inner}")
        elif callable(tell := getattr(holder, "frozen_names", None)):
            frozen |= {f"{name}.{inner}" for inner in tell()}
    return Nature(frozenset(frozen), frozenset(trained), tuple(below))


def _room(holder: Any, path: Path, kind: TensorStorageMetadata) -> torch.Tensor:
    """An empty tensor for an entry, shaped and sharded as the program will want it."""
    parameter = _parameter_of(holder, path)
    if isinstance(parameter, DTensor) and parameter.size() == kind.size:
        return torch.empty_like(parameter, dtype=kind.properties.dtype, requires_grad=False)
    return torch.empty(kind.size, dtype=kind.properties.dtype)


def _parameter_of(holder: Any, path: Path) -> Any:
    """The parameter that an optimizer's entry ``(name, "state", number, ...)`` belongs to."""
    if not isinstance(holder, torch.optim.Optimizer) or len(path) < 4 or path[1] != "state":
        return None
    parameters = [p for group in holder.param_groups for p in group["params"]]
    number = path[2]
    in_range = isinstance(number, int) and number < len(parameters)
    return parameters[number] if in_range else None


def _put(tree: Any, path: Path, value: Any) -> None:
    """Set an entry, making the dictionaries and lists on the way."""
    place = tree
    for number, part in enumerate(path):
        last = number + 1 == len(path)
        fresh: Any = value if last else [] if isinstance(path[number + 1], At) else {}
        if isinstance(place, list):
            place.extend([None] * (part + 1 - len(place)))
            if last or place[part] is None:
                place[part] = fresh
        elif last or not isinstance(place.get(part), dict | list):
            place[part] = fresh
        place = place[part]


def _is_setting(holder: Any, path: Path) -> bool:
    return isinstance(holder, torch.optim.Optimizer) and path[1:2] == ("param_groups",)


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping | list) and not value


def _worth_opening(items: list[Any]) -> bool:
    return any(
        isinstance(item, torch.Tensor | Mapping)
        or (isinstance(item, list) and _worth_opening(item))
        for item in items
    )


def _copied(value: Any) -> Any:
    """Dictionaries and lists anew, leaves as they are: loading must not half change the user's."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


def _fill(target: MutableMapping[Any, Any], loaded: Mapping[Any, Any]) -> None:
    for key, value in loaded.items():
        present = target.get(key)
        if isinstance(present, MutableMapping) and isinstance(value, Mapping):
            _fill(present, value)
        elif not isinstance(present, torch.Tensor) or not isinstance(value, torch.Tensor):
            target[key] = value

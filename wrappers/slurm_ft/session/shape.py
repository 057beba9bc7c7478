"""What may be given as ``state=``, looked at before the first step. No torch.

A state that cannot be saved, or that would be loaded past the program, is found out by the first
save otherwise: with luck after half an hour, without it in the preemption itself. Whoever gives a
model in the place of a dictionary is told the dictionary.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from datetime import date, time, timedelta, tzinfo
from pathlib import PurePath
from typing import Any

# What a loaded value may take the place of: it is its value and no more.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, bytearray, range, set, frozenset, type(None)),
    *(enum.Enum, PurePath, date, time, timedelta, tzinfo),
)
# The same by name, since their modules need not exist.
_PLAIN_ELSEWHERE = {
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "dtype"),
    ("torch", "device"),
    ("numpy", "ndarray"),
    ("numpy", "generic"),
    ("collections", "deque"),
}
# Names that programs give such objects, for the messages.
_BY_METHOD = (("zero_grad", "step", "optimizer"), ("get_last_lr", "step", "scheduler"))
# Long lists are taken to be like their beginning.
_MOST_ITEMS = 100


def fault(state: object) -> str:
    """What is wrong with the state and how to mend it, empty where nothing is."""
    if not isinstance(state, Mapping):
        return _no_mapping(state)
    for name, value in state.items():
        if not isinstance(name, str):
            return (
                f"state= has the key {name!r}: keys are names; write"
                f' state={{"{_name_for(value)}": ...}}'
            )
        where = f'state["{name}"]'
        if gives_state(value):
            if not callable(getattr(value, "load_state_dict", None)):
                return (
                    f"{where}: {_kind(value)} has state_dict and no load_state_dict, so it could"
                    " not be restored: give it one, or give the mapping that you restore by hand"
                )
        elif words := _inside(value, where):
            return words
    return ""


def gives_state(value: object) -> bool:
    """Whether this is an object, and no class, that gives its state itself."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def _no_mapping(state: object) -> str:
    if gives_state(state):
        name = _name_for(state)
        return (
            f"state= is {_kind(state)} and no mapping of names to what is saved: write"
            f' state={{"{name}": {name}}}'
        )
    if isinstance(state, list | tuple) and state and all(gives_state(item) for item in state):
        names = [_name_for(item) for item in state]
        if len(set(names)) < len(names):
            names = [f"{name}{number}" for number, name in enumerate(names)]
        pairs = ", ".join(f'"{name}": {name}' for name in names)
        return f"state= is a {type(state).__name__} and no mapping: write state={{{pairs}}}"
    return (
        f"state= is {_kind(state)} and no mapping of names to what is saved: write"
        ' state={"model": model, "optimizer": optimizer}'
    )


def _inside(value: object, where: str) -> str:
    """What is wrong with a value that does not give its state itself."""
    if gives_state(value):
        return (
            f"{where}: {_kind(value)} gives its state itself and would not be restored from there:"
            f' give it a name of its own, as in state={{"{_name_for(value)}": ...}}'
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            if words := _inside(item, f"{where}[{key!r}]"):
                return words
        return ""
    if isinstance(value, list | tuple):
        for number, item in enumerate(itertools.islice(value, _MOST_ITEMS)):
            if words := _inside(item, f"{where}[{number}]"):
                return words
        return ""
    if _is_plain(value):
        return ""
    if callable(value):
        name = getattr(value, "__name__", "it")
        of = getattr(value, "__self__", None)
        if name == "state_dict" and of is not None:
            return f"{where}: the method state_dict is given and not called: give the object"
        return f"{where}: {name} is a {type(value).__name__} and no state: give an object or values"
    return (
        f"{where}: {_kind(value)} is neither an object with state_dict and load_state_dict nor made"
        " of tensors and plain values: give it these two methods, or give a dictionary of what it"
        " holds"
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, _PLAIN):
        return True
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) in _PLAIN_ELSEWHERE
        for kind in type(value).__mro__
    )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _name_for(value: Any) -> str:
    for *methods, name in _BY_METHOD:
        if all(callable(getattr(value, method, None)) for method in methods):
            # Modules have zero_grad, and some have a method step.
            return "model" if callable(getattr(value, "forward", None)) else name
    return "model"

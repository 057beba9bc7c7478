"""Dataclasses to JSON and back, by their annotations alone.

One codec for everything that the product writes to disk (ledger, plan document, requests), so that
the class is the only description of a document's form; ``schema`` prints the same annotations as a
JSON schema. Decoding trusts nothing: an unknown key, a missing key or a value of another type is
a ProtocolError that names the place and the path inside the document.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from slurm_ext.domain.errors import ProtocolError

T = TypeVar("T")


_TYPES: dict[type[Any], dict[str, Any]] = {}
_NAMES: dict[type[Any], tuple[str, ...]] = {}


def field_types(cls: type[Any]) -> dict[str, Any]:
    """The resolved annotation of each field."""
    known = _TYPES.get(cls)
    if known is None:
        hints = typing.get_type_hints(cls)
        known = _TYPES[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return known


def required_fields(cls: type[Any]) -> frozenset[str]:
    """Names of the fields without a default."""
    return frozenset(
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )


def _names(cls: type[Any]) -> tuple[str, ...]:
    known = _NAMES.get(cls)
    if known is None:
        known = _NAMES[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return known


def plain(value: Any) -> Any:
    """The value as JSON types: objects, lists, strings, numbers, booleans and null."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def dumps(value: Any) -> str:
    """One line of JSON. A number that JSON cannot hold (inf, nan) is a ValueError."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)


def loads(cls: type[T], text: str, place: str) -> T:
    """Read one document that may have been written by anybody."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{place}: not JSON ({exc}); not read") from exc
    decoded: T = _decode(cls, raw, place, "")
    return decoded


def _wrong(place: str, at: str, value: Any, wanted: str) -> ProtocolError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ProtocolError(f"{place}: {at or 'document'}={shown} is not {wanted}")


def _decode(kind: Any, raw: Any, place: str, at: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        members = typing.get_args(kind)
        if raw is None and type(None) in members:
            return None
        rest = [member for member in members if member is not type(None)]
        return _decode(rest[0], raw, place, at)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_object(kind, raw, place, at)
    if origin is tuple:
        return _decode_tuple(kind, raw, place, at)
    if origin is frozenset:
        (item,) = typing.get_args(kind)
        if not isinstance(raw, list):
            raise _wrong(place, at, raw, "a list")
        return frozenset(_decode(item, value, place, f"{at}[]") for value in raw)
    if origin is not None and issubclass(origin, Mapping):
        key_kind, item = typing.get_args(kind)
        if not isinstance(raw, dict):
            raise _wrong(place, at, raw, "an object")
        return {
            _decode_key(key_kind, key, place, at): _decode(item, value, place, f"{at}.{key}")
            for key, value in raw.items()
        }
    return _decode_scalar(kind, raw, place, at)


def _decode_object(kind: type[Any], raw: Any, place: str, at: str) -> Any:
    if not isinstance(raw, dict):
        raise _wrong(place, at, raw, "an object")
    known = field_types(kind)
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ProtocolError(f"{place}: {at or 'document'} has the unknown key {unknown[0]!r}")
    missing = sorted(required_fields(kind) - set(raw))
    if missing:
        raise ProtocolError(f"{place}: {at or 'document'} lacks {missing[0]!r}")
    dot = f"{at}." if at else ""
    values = {key: _decode(known[key], value, place, f"{dot}{key}") for key, value in raw.items()}
    try:
        return kind(**values)
    except ValueError as exc:  # a class that checks itself, such as Estimate
        raise ProtocolError(f"{place}: {at or 'document'}: {exc}") from exc


def _decode_tuple(kind: Any, raw: Any, place: str, at: str) -> Any:
    if not isinstance(raw, list):
        raise _wrong(place, at, raw, "a list")
    items = typing.get_args(kind)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_decode(items[0], value, place, f"{at}[]") for value in raw)
    if len(raw) != len(items):
        raise _wrong(place, at, raw, f"a list of {len(items)}")
    return tuple(
        _decode(item, value, place, f"{at}[]") for item, value in zip(items, raw, strict=True)
    )


def _decode_key(kind: Any, key: str, place: str, at: str) -> Any:
    if kind is int:
        try:
            return int(key)
        except ValueError as exc:
            raise _wrong(place, at, key, "a whole number") from exc
    return _decode_scalar(kind, key, place, at)


def _decode_scalar(kind: Any, raw: Any, place: str, at: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(raw)
        except ValueError as exc:
            words = ", ".join(str(member.value) for member in kind)
            raise _wrong(place, at, raw, f"one of {words}") from exc
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        raise _wrong(place, at, raw, "true or false")
    if kind is int:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        raise _wrong(place, at, raw, "a whole number")
    if kind is float:
        if isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw):
            return float(raw)
        raise _wrong(place, at, raw, "a number")
    if kind is str:
        if isinstance(raw, str):
            return raw
        raise _wrong(place, at, raw, "a string")
    raise TypeError(f"{kind!r} has no JSON form")

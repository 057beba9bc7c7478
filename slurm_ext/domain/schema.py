"""JSON schemas (draft 2020-12) of what the product writes, printed from the dataclasses.

``python -m slurm_ext.domain.schema --emit NAME`` prints one, ``--emit markdown`` the page of all.
The directive has its own short-keyed form, so its schema is given by hand beside the others and a
test holds it against what :mod:`slurm_ext.domain.directive` writes. Schemas are for people and
other programs; our own readers use :mod:`slurm_ext.domain.codec`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from slurm_ext.domain.attempt import ATTEMPTS_VERSION, Attempts
from slurm_ext.domain.codec import field_types, required_fields
from slurm_ext.domain.directive import VERSION as DIRECTIVE_VERSION
from slurm_ext.domain.directive import (
    Directive,
    GpuRequestKind,
    JobClass,
    MergeConsent,
    Precision,
)
from slurm_ext.domain.document import DOCUMENT_VERSION, ClusterDocument, PlanDocument
from slurm_ext.domain.job import ShapeKind
from slurm_ext.domain.journal import JOURNAL_VERSION, JournalRow, LedgerEntry
from slurm_ext.domain.progress import PROGRESS_VERSION, Progress
from slurm_ext.domain.request import REQUEST_VERSION, PinRequest

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# name -> (class, version of the form, None where the version is that of the enclosing document)
_DOCUMENTS: dict[str, tuple[type[Any], int | None]] = {
    "progress": (Progress, PROGRESS_VERSION),
    "attempts": (Attempts, ATTEMPTS_VERSION),
    "plan": (PlanDocument, DOCUMENT_VERSION),
    "cluster": (ClusterDocument, DOCUMENT_VERSION),
    "request": (PinRequest, REQUEST_VERSION),
    "ledger": (LedgerEntry, None),
    "journal": (JournalRow, JOURNAL_VERSION),
}


def json_schema(cls: type[Any], version: int | None = None) -> dict[str, Any]:
    """The schema of one dataclass. Nested classes become ``$defs``."""
    definitions: dict[str, Any] = {}
    body = _object(cls, definitions)
    if version is not None and "version" in body["properties"]:
        body["properties"]["version"] = {"const": version}
        # A version that is left out could mean any: documents always carry theirs.
        body["required"] = sorted({*body["required"], "version"})
    schema: dict[str, Any] = {"$schema": _DIALECT, "title": cls.__name__, **body}
    definitions.pop(cls.__name__, None)
    if definitions:
        schema["$defs"] = definitions
    return schema


def schemas() -> dict[str, dict[str, Any]]:
    """Every document's schema by name."""
    found = {name: json_schema(cls, version) for name, (cls, version) in _DOCUMENTS.items()}
    found["directive"] = directive_schema()
    return found


def _object(cls: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    definitions.setdefault(cls.__name__, {})  # ends recursion
    hints = field_types(cls)
    body = {
        "type": "object",
        "properties": {name: _type(kind, definitions) for name, kind in hints.items()},
        "required": sorted(required_fields(cls)),
        "additionalProperties": False,
    }
    definitions[cls.__name__] = body
    return dict(body)


def _type(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin = typing.get_origin(kind)
    if origin is types.UnionType or origin is typing.Union:
        return {"anyOf": [_type(member, definitions) for member in typing.get_args(kind)]}
    if kind is type(None):
        return {"type": "null"}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple:
        items = typing.get_args(kind)
        if len(items) == 2 and items[1] is Ellipsis:
            return {"type": "array", "items": _type(items[0], definitions)}
        return {
            "type": "array",
            "prefixItems": [_type(item, definitions) for item in items],
            "minItems": len(items),
            "maxItems": len(items),
        }
    if origin is frozenset:
        (item,) = typing.get_args(kind)
        return {"type": "array", "items": _type(item, definitions), "uniqueItems": True}
    if origin is not None and issubclass(origin, Mapping):
        _, item = typing.get_args(kind)
        return {"type": "object", "additionalProperties": _type(item, definitions)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": names[kind]}


def directive_schema() -> dict[str, Any]:
    """The stored directive: only what differs from the defaults is written."""
    count = {"type": "integer", "minimum": 1}
    text = {"type": "string", "minLength": 1}
    positive = {"type": "number", "exclusiveMinimum": 0}
    properties: dict[str, Any] = {
        "v": {"const": DIRECTIVE_VERSION},
        "model": text,
        "revision": text,
        "dataset": text,
        "samples": count,
        "epochs": positive,
        "steps": count,
        "batch_min": count,
        "batch_max": count,
        "gpus": {
            "anyOf": [
                {"enum": [GpuRequestKind.REQUESTED.value, GpuRequestKind.AUTO.value]},
                {"type": "string", "pattern": r"^[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*$"},
            ]
        },
        "input_shape": text,
        "frozen": text,
        "precision": {"enum": [p.value for p in Precision]},
        "grad_checkpointing": {"type": "boolean"},
        "job_class": {"enum": [c.value for c in JobClass]},
        "deadline_s": positive,
        "merge": {"enum": [m.value for m in MergeConsent]},
        "switch": {"type": "boolean"},
        "quality": {
            "type": "array",
            "prefixItems": [text, {"enum": [">=", "<="]}, {"type": "number"}],
            "minItems": 3,
            "maxItems": 3,
        },
        "max_pause_s": {"type": "integer", "minimum": 0},
        "max_gpu_hours": positive,
        "begin_s": positive,
        "shape": {"enum": [s.value for s in ShapeKind]},
        "req": {"type": "object"},
    }
    undocumented = {field.name for field in dataclasses.fields(Directive)} ^ set(properties)
    if undocumented:
        raise TypeError(f"the directive and its schema differ in {sorted(undocumented)}")
    return {
        "$schema": _DIALECT,
        "title": "Directive",
        "type": "object",
        "properties": properties,
        "required": ["v"],
        # An unknown key of the same version is ignored by readers.
        "additionalProperties": True,
    }


def _words(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_words(member) for member in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_words(schema['items'])}" if "items" in schema else "list"
    if isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_words(schema['additionalProperties'])}"
    return str(schema.get("type", "anything"))


def _first_paragraphs(cls: type[Any]) -> str:
    return " ".join((cls.__doc__ or "").split())


def markdown() -> str:
    """One page about every document."""
    lines = [
        "# Documents on disk",
        "",
        "<!-- printed by `python -m slurm_ext.domain.schema --emit markdown`; do not edit -->",
        "",
        "Every document carries the version of its form. JSON schemas are printed by"
        " `python -m slurm_ext.domain.schema --emit NAME`. Times are seconds since the epoch,"
        " durations seconds.",
    ]
    classes: dict[str, type[Any]] = {name: cls for name, (cls, _) in _DOCUMENTS.items()}
    classes["directive"] = Directive
    seen: set[str] = set()
    for name, schema in schemas().items():
        lines += ["", f"## {name}", "", _first_paragraphs(classes[name]), ""]
        lines += _table(schema)
        for inner, body in schema.get("$defs", {}).items():
            if inner not in seen:
                seen.add(inner)
                lines += ["", f"### {inner}", "", *_table(body)]
    return "\n".join(lines) + "\n"


def _table(schema: Mapping[str, Any]) -> list[str]:
    rows = ["| Key | Type | Required |", "|---|---|---|"]
    required = set(schema.get("required", ()))
    for key, body in schema["properties"].items():
        rows.append(f"| `{key}` | {_words(body)} | {'yes' if key in required else 'no'} |")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """``--emit NAME`` on stdout."""
    found = schemas()
    parser = argparse.ArgumentParser(prog="python -m slurm_ext.domain.schema")
    parser.add_argument("--emit", choices=[*sorted(found), "markdown"], required=True)
    wanted = parser.parse_args(argv).emit
    text = markdown() if wanted == "markdown" else json.dumps(found[wanted], indent=2) + "\n"
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

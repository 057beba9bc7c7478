"""Trackable resources: ``cpu=4,mem=4000M,node=2,gres/gpu=8,gres/gpu:v100=8`` and its relatives.

GPUs are counted here and nowhere else. ``gres/gpu=N`` is the total; ``gres/gpu:TYPE=N`` are parts
of it, and are the total only where the plain form is absent. The request forms differ in their
signs (``gres/gpu:v100:4``, ``gres:gpu:4``, ``gpu:4``, ``gres/gpu=1``); all of them are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_UNITS_MIB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_NONE = frozenset({"", "(null)", "N/A", "None"})
_REQUEST = re.compile(
    r"(?:gres[/:])?gpu(?::(?P<type>[A-Za-z_][\w.+-]*|\d[\w.+-]*[A-Za-z_][\w.+-]*))?"
    r"(?:[:=](?P<count>\d+)(?P<unit>[KkMm]?))?(?:\([^)]*\))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Tres:
    """One TRES text. ``None`` where the text does not name the resource."""

    cpus: int | None = None
    memory_mib: int | None = None
    nodes: int | None = None
    gpus: int | None = None
    gpu_types: Mapping[str, int] = field(default_factory=dict)

    @property
    def gpu_type(self) -> str:
        """The type, where exactly one is named."""
        return next(iter(self.gpu_types)) if len(self.gpu_types) == 1 else ""


def memory_mib(text: str) -> int:
    """``4000M``, ``250G``, ``1.50T``, ``512K`` or a bare number of MiB, rounded up to MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)B?[cn]?", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not an amount of memory")
    return int(-(-float(match[1]) * _UNITS_MIB[match[2]] // 1))


@lru_cache(maxsize=4096)
def parse_tres(text: str) -> Tres:
    """Read ``name=count`` pairs; names that are not ours are passed over."""
    if text in _NONE:
        return Tres()
    plain: dict[str, str] = {}
    types: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.startswith("gres/gpu:"):
            kind = name.removeprefix("gres/gpu:")
            types[kind] = types.get(kind, 0) + int(float(value))
        else:
            plain[name] = value
    total = int(float(plain["gres/gpu"])) if "gres/gpu" in plain else None
    return Tres(
        cpus=int(float(plain["cpu"])) if "cpu" in plain else None,
        memory_mib=memory_mib(plain["mem"]) if "mem" in plain else None,
        nodes=int(float(plain["node"])) if "node" in plain else None,
        gpus=total if total is not None else (sum(types.values()) if types else None),
        gpu_types=types,
    )


@lru_cache(maxsize=4096)
def parse_gpu_request(text: str) -> Tres:
    """GPUs of a request or of a node's Gres: ``gres/gpu:v100:4,gres/shard:2``, ``gpu:a100:2(S:0)``.

    A name without a count stands for one GPU, as in Slurm. Only the GPU fields are filled.
    """
    if text in _NONE:
        return Tres()
    total: int | None = None
    types: dict[str, int] = {}
    for part in _split_outside_brackets(text):
        match = _REQUEST.fullmatch(part)
        if match is None:
            continue
        count = 1 if match["count"] is None else int(match["count"])
        count *= {"k": 1024, "m": 1024**2}.get(match["unit"] or "", 1) if match["unit"] else 1
        total = (total or 0) + count
        if match["type"]:
            types[match["type"]] = types.get(match["type"], 0) + count
    return Tres(gpus=total, gpu_types=types)


def _split_outside_brackets(text: str) -> list[str]:
    """Parts between commas; ``gpu:4(IDX:0,2-3)`` is one part."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text)]

"""What starting, stopping and switching cost in a replay: stated once, nothing hidden.

Every start pays ``start_up_s`` (imports, data loaders), ``checkpoint_s`` (write and read back) and
the cold switch of its model. Where ranks of the same model have ended on the same GPUs at most
``warm_for_s`` ago, a pipeline switch takes ``pipeline_switch_s`` in place of the cold one; None
means that there is no such switch. A stopped job holds its GPUs for ``save_s`` and can start again
``requeue_delay_s`` later (Slurm itself waits 121 s unless it is told not to). An outage undoes the
work since the last multiple of ``checkpoint_every_s`` of work; 0 loses nothing.

The file is CSV with the columns ``kind,model,gpu_type,seconds``, or one with the columns
``model,gpu_type,context_switch_s``, which tells cold switches only. An empty model or GPU type
means any; a row that names both wins over one that does not. Lines that begin with ``#`` are
comments.

Files of the throughput table, such as ``slurm-ext report switch --costs`` writes, are read as well:
``switch`` is a pipeline switch there, ``naive_switch`` is left out (it is there to compare), and of
several GPU counts the dearest counts, since a replay does not tell them apart.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.overhead import Overhead

# Kind of a row -> field of Costs or Overhead, for kinds that no model or GPU type changes.
_PLAIN = {
    "checkpoint": "checkpoint_s",
    "checkpoint_every": "checkpoint_every_s",
    "start_up": "start_up_s",
    "save": "save_s",
    "requeue_delay": "requeue_delay_s",
    "warm_for": "warm_for_s",
}
_OVERHEAD = {
    "scheduling_cycle": "cycle_s",
    "launch": "launch_s",
    "epilog": "epilog_s",
    "grace": "grace_s",
}
_COLD, _PIPELINE = "cold_start", "pipeline_switch"
# Kinds of the throughput table that are called otherwise here, or have no place here.
_TABLE = {"switch": _PIPELINE}
_LEFT_OUT = {"naive_switch"}
KINDS = (_COLD, _PIPELINE, *_PLAIN, *_OVERHEAD)
_Keyed = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Costs:
    """See the module; free of any cost by default. Keys are (model, GPU type in capitals)."""

    checkpoint_s: float = 0.0
    start_up_s: float = 0.0
    cold_switch_s: _Keyed = field(default_factory=dict)
    pipeline_switch_s: _Keyed | None = None
    warm_for_s: float = 0.0
    save_s: float = 0.0
    requeue_delay_s: float = 0.0
    checkpoint_every_s: float = 0.0
    overhead: Overhead = field(default_factory=Overhead)

    def cold_s(self, model: str, gpu_type: str = "") -> float:
        """Seconds of the cold switch to a model, 0 where none is stated."""
        return _lookup(self.cold_switch_s, model, gpu_type) or 0.0

    def start_s(self, model: str, gpu_type: str = "") -> float:
        """Seconds of a cold start in which no work is done."""
        return self.start_up_s + self.checkpoint_s + self.cold_s(model, gpu_type)

    def warm_s(self, model: str, gpu_type: str = "") -> float | None:
        """Seconds of a pipeline switch to a model, None where there is none."""
        if self.pipeline_switch_s is None or not model:
            return None
        return _lookup(self.pipeline_switch_s, model, gpu_type)

    def without_switch(self) -> Costs:
        """The same without pipeline switches."""
        return replace(self, pipeline_switch_s=None)


def read_costs(path: Path) -> Costs:
    """Costs from a file. Raises DataError with line and fix for a bad row."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as packed:
                return parse_costs(packed, str(path))
        with path.open(encoding="utf-8-sig", newline="") as plain:
            return parse_costs(plain, str(path))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a readable CSV file") from exc


def parse_costs(lines: Iterable[str], place: str) -> Costs:
    """Costs from lines of CSV; ``place`` names the source in errors."""
    numbered = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]
    reader = csv.DictReader(line for _, line in numbered)
    columns = reader.fieldnames or ()
    only_cold = "context_switch_s" in columns
    needed = (
        ("model", "gpu_type", "context_switch_s")
        if only_cold
        else ("kind", "model", "gpu_type", "seconds")
    )
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(place, f"no column {', '.join(missing)}", f"name {', '.join(needed)}")
    plain: dict[str, float] = {}
    overhead: dict[str, float] = {}
    seen: dict[str, int] = {}
    # A table of measurements: of several GPU counts the dearest counts.
    measured = "gpus" in columns
    keyed: dict[str, dict[tuple[str, str], float]] = {_COLD: {}, _PIPELINE: {}}
    for row in reader:
        line = numbered[reader.line_num - 1][0]
        where = f"{place}, line {line}"
        if None in row:
            raise DataError(where, "more cells than columns", "leave out what is too much")
        kind = _COLD if only_cold else (row["kind"] or "").strip()
        if kind in _LEFT_OUT:
            continue
        kind = _TABLE.get(kind, kind)
        seconds = _seconds(row[needed[-1]], where)
        if kind not in keyed and kind in seen and not measured:
            raise DataError(where, f"{kind} also on line {seen[kind]}", "keep one of them")
        seen.setdefault(kind, line)
        if kind in _PLAIN:
            plain[_PLAIN[kind]] = max(seconds, plain.get(_PLAIN[kind], 0.0))
        elif kind in _OVERHEAD:
            overhead[_OVERHEAD[kind]] = max(seconds, overhead.get(_OVERHEAD[kind], 0.0))
        elif kind in keyed:
            key = (row["model"] or "").strip(), (row["gpu_type"] or "").strip().upper()
            before = keyed[kind].get(key)
            if before is not None and not measured:
                raise DataError(
                    where,
                    f"a second {kind} of {key[0] or 'any model'} on {key[1] or 'any GPU type'}",
                    "keep one of them",
                )
            keyed[kind][key] = max(seconds, before or 0.0)
        else:
            raise DataError(where, f"unknown kind {kind!r}", f"use one of {', '.join(KINDS)}")
    return Costs(
        cold_switch_s=keyed[_COLD],
        pipeline_switch_s=keyed[_PIPELINE] or None,
        overhead=Overhead(**overhead),
        **plain,
    )


def _seconds(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError as exc:
        raise DataError(where, f"{text!r}: not a number", "write seconds") from exc
    if not (math.isfinite(value) and value >= 0):
        raise DataError(where, f"{value!r}: not 0 or more", "write seconds")
    return value


def _lookup(table: _Keyed, model: str, gpu_type: str) -> float | None:
    kind = gpu_type.upper()
    for key in ((model, kind), (model, ""), ("", kind), ("", "")):
        if key in table:
            return table[key]
    return None

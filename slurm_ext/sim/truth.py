"""How long a job really runs on a GPU count: what the daemon may only estimate.

The rule is the one that the author of the titan_fm workloads used, checked against 593 of his jobs
(predicted/actual within 0.997..1.001), stated for any placement instead of up to eight GPUs:

    run_s = checkpoint + switch + optimizer steps * (sync + (step - sync) * micro-batches)

with the global batch constant, ``local = ceil(batch / gpus)`` samples per GPU, as many
micro-batches as the largest measured local batch demands, and step and sync time interpolated in
the local batch. Outside the measured range the nearest measured batch counts, as in that program;
a local batch below the range is therefore charged as if it were the smallest one.

Deliberately not built on `slurm_ext.estimate`: the truth must not share the estimator's code, or an
error there would cancel out in every comparison. For the same reason a job carries a hidden error
against the rule, the same for all its GPU counts, which nothing that decides may see.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.spans import counted

# What the author charges for writing and reading a checkpoint around each start (s).
CHECKPOINT_S = 30.0
# A job's true time lies within this factor of the rule, on a logarithmic scale.
ERROR_FACTOR = 1.2


@dataclass(frozen=True, slots=True)
class Curve:
    """Step and sync time (s) over the local batch, ascending, for one model and placement."""

    local: tuple[float, ...]
    step_s: tuple[float, ...]
    sync_s: tuple[float, ...]

    def at(self, local: float) -> tuple[float, float]:
        """(step, sync) at ``local``, linear between points, the end point outside of them."""
        right = bisect.bisect_left(self.local, local)
        if right == 0:
            return self.step_s[0], self.sync_s[0]
        if right == len(self.local):
            return self.step_s[-1], self.sync_s[-1]
        low, high = self.local[right - 1], self.local[right]
        share = (local - low) / (high - low)
        return (
            _between(self.step_s[right - 1], self.step_s[right], share),
            _between(self.sync_s[right - 1], self.sync_s[right], share),
        )


# (model, placement) -> what was measured there, for one GPU type.
Curves = Mapping[tuple[str, tuple[int, ...]], Curve]


@dataclass(frozen=True, slots=True)
class Truth:
    """The rule with its numbers: one curve per (model, placement) and the switch cost per model."""

    curves: Curves
    switch_s: Mapping[str, float]
    checkpoint_s: float = CHECKPOINT_S

    def run_s(self, model: str, batch: int, samples: float, placement: Sequence[int]) -> float:
        """Seconds from start to end. Raises DataError where nothing was measured."""
        curve = self.curves.get((model, tuple(placement)))
        if curve is None or model not in self.switch_s:
            digits = "".join(map(str, placement))
            raise DataError(
                f"true run time of {model} on placement {digits}",
                "nothing was measured",
                "choose a model, GPU type and GPU count of the throughput table",
            )
        gpus = sum(placement)
        local = math.ceil(batch / gpus)
        micro_batches = math.ceil(local / curve.local[-1])
        local_batch = math.ceil(local / micro_batches)
        step_s, sync_s = curve.at(local_batch)
        steps = samples / (gpus * local_batch * micro_batches)
        each_s = sync_s + (step_s - sync_s) * micro_batches
        return self.start_up_s(model) + steps * each_s

    def start_up_s(self, model: str) -> float:
        """Seconds of every start in which no training is done."""
        return self.checkpoint_s + self.switch_s[model]


def consolidated(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """The placement on the fewest nodes: whole nodes, then the rest on one more."""
    whole, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * whole + ((rest,) if rest else ())


def hidden_error(job_id: str, seed: int, factor: float = ERROR_FACTOR) -> float:
    """A job's true time over the rule's: log-uniform in [1/factor, factor].

    Drawn from the job's own id, so that a part of a workload has the errors of the whole.
    """
    spread = math.log(factor)
    return math.exp(random.Random(f"{seed}:{job_id}").uniform(-spread, spread))


def read_truth(throughput: Path, costs: Path, gpu_type: str = "V100") -> Truth:
    """The truth from a throughput table (CSV, may be gzipped) and a table of start-up costs."""
    return Truth(
        curves=read_curves(throughput, gpu_type),
        switch_s=_switches(_rows(costs, _COST_COLUMNS), costs, gpu_type),
    )


def read_curves(throughput: Path, gpu_type: str) -> Curves:
    """The curves of one GPU type from a throughput table (CSV, may be gzipped)."""
    rows = _rows(throughput, _CURVE_COLUMNS)
    kind = gpu_type.upper()
    curves = _curves(_points([r for r in rows if _type(r[1]).upper() == kind], throughput))
    if curves:
        return curves
    types = dict.fromkeys(_type(row) for _, row in rows)
    if not any(name.upper() == kind for name in types):
        raise DataError(
            str(throughput),
            f"no row for GPU type {gpu_type}",
            f"name a type of the table ({', '.join(types) or 'it is empty'})",
        )
    raise DataError(str(throughput), f"no usable row for GPU type {gpu_type}", _USABLE)


@dataclass(frozen=True, slots=True)
class Table:
    """What a replay takes from a throughput table: GPU type -> curves, of the types that are
    wanted; every type that the table names; and one line for each row that cannot be used."""

    curves: Mapping[str, Curves]
    types: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def read_types(throughput: Path, wanted: Collection[str]) -> Mapping[str, Curves]:
    """GPU type -> its curves, as `read_table` has it; a bad row refuses the table."""
    return read_table(throughput, wanted, strict=True).curves


def read_table(throughput: Path, wanted: Collection[str], *, strict: bool = False) -> Table:
    """The types that are wanted and in the table; "" is the first one of the table.

    Bad rows are told, also those of other types, or raised with ``strict``. Raises DataError
    where there is no row that can be used.
    """
    rows = _rows(throughput, _CURVE_COLUMNS)
    if not rows:
        raise DataError(str(throughput), "no row", "fill in what slurm-ext table template prints")
    skipped: list[str] = []
    points = _points(rows, throughput, None if strict else skipped)
    names: dict[str, str] = {}
    for _, row in rows:
        if name := _type(row):
            names.setdefault(name.upper(), name)
    first = next(iter(names), "")
    kinds = dict.fromkeys(name.upper() or first for name in wanted)
    found = {
        names[kind]: _curves([point for point in points if point.gpu_type.upper() == kind])
        for kind in kinds
        if kind in names
    }
    if not any(found.values()) and (found or not points):
        bad = f"; {counted(len(skipped), 'bad row')}, first {skipped[0]}" if skipped else ""
        raise DataError(str(throughput), f"no usable row{bad}", _USABLE)
    usable = {name: curves for name, curves in found.items() if curves}
    return Table(usable, tuple(names.values()), tuple(skipped))


_CURVE_COLUMNS = ("model", "gpu_type", "local_batch")
# Either of each: how the GPUs lie on nodes, and how fast a step is.
_CHOICES = ((("placement",), ("gpus", "nodes")), (("step_time_s",), ("throughput",)))
_COST_COLUMNS = ("kind", "model", "gpu_type", "seconds")
_COLD_START = "cold_start"
_DOCUMENTED = "use the columns that slurm-ext table template prints"
_USABLE = "give local_batch, placement or gpus and nodes, and step_time_s or throughput"
_SQLITE = b"SQLite format 3"


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as packed:
                return _read(packed, path, columns)
        with path.open("rb") as first:
            if first.read(len(_SQLITE)) == _SQLITE:
                raise DataError(
                    str(path), "a table file, not CSV", "write it with slurm-ext table export"
                )
        with path.open(encoding="utf-8-sig", newline="") as plain:
            return _read(plain, path, columns)
    except OSError as exc:
        why = exc.strerror or str(exc)
        raise DataError(str(path), f"cannot be read: {why}", "name a readable CSV file") from exc
    except (EOFError, UnicodeDecodeError, csv.Error, zlib.error) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a CSV file in UTF-8") from exc


def _read(
    lines: Iterable[str], path: Path, columns: Sequence[str]
) -> list[tuple[int, dict[str, str]]]:
    numbers: list[int] = []

    def counted() -> Iterator[str]:
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith("#"):
                numbers.append(number)
                yield line

    reader = csv.DictReader(counted())
    there = reader.fieldnames or ()
    missing = [name for name in columns if name not in there]
    if columns == _CURVE_COLUMNS:
        missing += [
            " or ".join(" and ".join(names) for names in choice)
            for choice in _CHOICES
            if not any(set(names) <= set(there) for names in choice)
        ]
    if missing:
        raise DataError(str(path), f"no column {', '.join(missing)}", _DOCUMENTED)
    return [(numbers[-1], row) for row in reader]


@dataclass(frozen=True, slots=True)
class _Point:
    """One usable row. ``whole`` ones tell placement, step and sync time themselves."""

    model: str
    gpu_type: str
    placement: tuple[int, ...]
    local: float
    times_s: tuple[float, float]
    whole: bool


def _type(row: Mapping[str, str | None]) -> str:
    return (row.get("gpu_type") or "").strip()


def _points(
    rows: Iterable[tuple[int, dict[str, str]]], path: Path, skipped: list[str] | None = None
) -> list[_Point]:
    """The usable rows; a bad one is told in ``skipped``, or raised where there is none."""
    points: list[_Point] = []
    for line, row in rows:
        try:
            point = _point(row, path, line)
        except DataError as exc:
            if skipped is None:
                raise
            skipped.append(str(exc))
            continue
        if point is not None:
            points.append(point)
    return points


def _point(row: dict[str, str], path: Path, line: int) -> _Point | None:
    """A row; None for a sound one of which no use can be made (unequal shares, out of memory)."""
    where = f"{path}, line {line}"
    # DictReader has too many cells under None, and None in place of missing ones.
    if None in row or None in row.values():
        raise DataError(where, "not as many cells as columns", "write one, or nothing, per column")
    for column in ("model", "gpu_type"):
        if not row[column].strip():
            raise DataError(f"{where}, column {column}", "empty", "it is needed in every row")
    placement = _placement(row, where)
    local = _positive(row, "local_batch", path, line)
    times = _times(row, local, sum(placement), path, line)
    if not placement or times is None:
        return None
    whole = row.get("placement") and row.get("step_time_s") and row.get("sync_time_s")
    return _Point(row["model"], _type(row), placement, local, times, bool(whole))


def _curves(points: Iterable[_Point]) -> dict[tuple[str, tuple[int, ...]], Curve]:
    """Curves of one GPU type. Where a placement has rows that tell everything (placement, step and
    sync time), the others of it do not count: they would mix two ways of measuring."""
    full: defaultdict[tuple[str, tuple[int, ...]], dict[float, tuple[float, float]]]
    rest: defaultdict[tuple[str, tuple[int, ...]], dict[float, tuple[float, float]]]
    full, rest = defaultdict(dict), defaultdict(dict)
    for point in points:
        kind = full if point.whole else rest
        kind[point.model, point.placement].setdefault(point.local, point.times_s)
    curves: dict[tuple[str, tuple[int, ...]], Curve] = {}
    for key in (*full, *(key for key in rest if key not in full)):
        measured = full.get(key) or rest[key]
        order = sorted(measured)
        curves[key] = Curve(
            tuple(order),
            tuple(measured[local][0] for local in order),
            tuple(measured[local][1] for local in order),
        )
    return curves


def _placement(row: Mapping[str, str], where: str) -> tuple[int, ...]:
    """GPUs per node: as written, else equal shares of the GPUs; empty where they are not equal."""
    text = (row.get("placement") or "").strip()
    if text:
        # 44 is two nodes with four each; from ten GPUs of a node on they are joined: 16+16.
        parts = text.rstrip("+").split("+") if "+" in text else list(text)
        if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise DataError(f"{where}, column placement", f"{text!r}", "write 44 or 16+16")
        return tuple(sorted((int(part) for part in parts), reverse=True))
    gpus, nodes = ((row.get(name) or "").strip() for name in ("gpus", "nodes"))
    if gpus == "1" and not nodes:
        return (1,)
    for column, cell in (("gpus", gpus), ("nodes", nodes)):
        if not (cell.isascii() and cell.isdigit() and int(cell)):
            raise DataError(
                f"{where}, column {column}",
                f"{cell!r}" if cell else "empty, as placement is",
                "write placement (44: two nodes with four GPUs each), or gpus and nodes",
            )
    share, left = divmod(int(gpus), int(nodes))
    return () if left or not share else (share,) * int(nodes)


def _times(
    row: Mapping[str, str], local: float, gpus: int, path: Path, line: int
) -> tuple[float, float] | None:
    """(step, sync) of one micro-batch (s); None for a row that tells no speed (out of memory).

    A step of several micro-batches has one sync; where that is not told, all of it is charged to
    each of them.
    """
    sync = _positive(row, "sync_time_s", path, line, zero=True) if row.get("sync_time_s") else 0.0
    accumulation = _positive(row, "accumulation", path, line) if row.get("accumulation") else 1.0
    if row.get("step_time_s"):
        step = _positive(row, "step_time_s", path, line)
    elif row.get("throughput"):
        speed = _positive(row, "throughput", path, line, zero=True)
        if not speed:
            return None
        step = gpus * local * accumulation / speed
    elif (row.get("out_of_memory") or "").strip() not in ("", "0"):
        return None
    else:
        raise DataError(
            f"{path}, line {line}", "no speed", "give throughput (0: out of memory) or step_time_s"
        )
    return sync + (step - sync) / accumulation, sync


def _switches(
    rows: Iterable[tuple[int, dict[str, str]]], path: Path, gpu_type: str
) -> dict[str, float]:
    return {
        row["model"]: _positive(row, "seconds", path, line)
        for line, row in rows
        if row["kind"] == _COLD_START and row["gpu_type"].upper() == gpu_type.upper()
    }


def _positive(
    row: Mapping[str, str], column: str, path: Path, line: int, *, zero: bool = False
) -> float:
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError) as exc:
        raise DataError(
            f"{path}, line {line}, column {column}", f"{row[column]!r}: not a number", "write one"
        ) from exc
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise DataError(
            f"{path}, line {line}, column {column}", f"{value!r}: not above 0", "write seconds"
        )
    return value


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share

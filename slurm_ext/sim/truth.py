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
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import DataError

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


@dataclass(frozen=True, slots=True)
class Truth:
    """The rule with its numbers: one curve per (model, placement) and the switch cost per model."""

    curves: Mapping[tuple[str, tuple[int, ...]], Curve]
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
        curves=_curves(_rows(throughput, _CURVE_COLUMNS), throughput, gpu_type),
        switch_s=_switches(_rows(costs, _COST_COLUMNS), costs, gpu_type),
    )


def read_curves(throughput: Path, gpu_type: str) -> Mapping[tuple[str, tuple[int, ...]], Curve]:
    """The curves of one GPU type from a throughput table (CSV, may be gzipped)."""
    return _curves(_rows(throughput, _CURVE_COLUMNS), throughput, gpu_type)


def gpu_types_of(throughput: Path) -> tuple[str, ...]:
    """The GPU types of a throughput table, in its order."""
    return tuple(dict.fromkeys(row["gpu_type"] for _, row in _rows(throughput, _CURVE_COLUMNS)))


_CURVE_COLUMNS = ("model", "gpu_type", "placement", "local_batch", "step_time_s", "sync_time_s")
_COST_COLUMNS = ("kind", "model", "gpu_type", "seconds")
_COLD_START = "cold_start"


def _rows(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", newline="") as packed:
                return _read(packed, path, columns)
        with path.open(encoding="utf-8", newline="") as plain:
            return _read(plain, path, columns)
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "restore the file") from exc


def _read(
    lines: Iterable[str], path: Path, columns: Sequence[str]
) -> list[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(lines)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(str(path), f"no column {', '.join(missing)}", "use the documented columns")
    return [(reader.line_num, row) for row in reader]


def _curves(
    rows: Iterable[tuple[int, dict[str, str]]], path: Path, gpu_type: str
) -> dict[tuple[str, tuple[int, ...]], Curve]:
    points: defaultdict[tuple[str, tuple[int, ...]], dict[float, tuple[float, float]]]
    points = defaultdict(dict)
    for line, row in rows:
        # Rows without a placement or without a sync time cannot feed the rule.
        if row["gpu_type"].upper() != gpu_type.upper() or not row["placement"].isdigit():
            continue
        if not row["sync_time_s"] or not row["step_time_s"]:
            continue
        placement = tuple(sorted((int(digit) for digit in row["placement"]), reverse=True))
        local = _positive(row, "local_batch", path, line)
        step = _positive(row, "step_time_s", path, line)
        sync = _positive(row, "sync_time_s", path, line, zero=True)
        points[row["model"], placement].setdefault(local, (step, sync))
    curves: dict[tuple[str, tuple[int, ...]], Curve] = {}
    for key, measured in points.items():
        order = sorted(measured)
        curves[key] = Curve(
            tuple(order),
            tuple(measured[local][0] for local in order),
            tuple(measured[local][1] for local in order),
        )
    if not curves:
        raise DataError(str(path), f"no row for GPU type {gpu_type}", "name a type of the table")
    return curves


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
    except (TypeError, ValueError) as exc:
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

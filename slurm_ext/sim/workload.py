"""Reader of fine-tuning workloads: one CSV row per job, as a user submitted it.

Strict on purpose. A replay that silently drops a row compares two different workloads, so the
first bad cell stops the reader with file, line, column, value and fix.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import DataError

COLUMNS = (
    "job_id",
    "submit_s",
    "application",
    "model",
    "task",
    "gpus",
    "target_batch_size",
    "target_lr",
    "target_accum_steps",
    "target_metric",
    "total_samples",
)

# Bounds against slips (a date in place of seconds, a batch in place of a count), not limits of use.
_MAX_SECONDS = 10.0**9
_MAX_GPUS = 4096
_MAX_BATCH = 2**24
_MAX_SAMPLES = 10.0**12


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """One submission. ``submit_s`` is relative to the start of the trace.

    ``total_samples`` is the work until the target metric is reached, and ``batch_size`` the global
    batch at which that holds; both stay the same whatever GPU count the job gets.
    """

    job_id: str
    submit_s: float
    model: str
    task: str
    gpus: int
    batch_size: int
    total_samples: float


def read_workload(path: Path, limit: int | None = None) -> tuple[WorkloadJob, ...]:
    """Jobs of a workload file in order of submission; ``limit`` keeps the first so many.

    Raises DataError when the file cannot be read or a cell is unusable.
    """
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            jobs = parse_workload(handle, str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(str(path), f"cannot be read: {exc}", "name a readable CSV file") from exc
    return jobs if limit is None else jobs[:limit]


def parse_workload(lines: Iterable[str], place: str) -> tuple[WorkloadJob, ...]:
    """Jobs of a workload given as lines of CSV; ``place`` names the source in errors."""
    reader = csv.DictReader(lines, strict=True)
    seen: dict[str, int] = {}
    jobs: list[WorkloadJob] = []
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(
                f"{place}, line 1",
                f"no column {', '.join(missing)}",
                f"the first line must name {', '.join(COLUMNS)}",
            )
        for row in reader:
            cells = _Row(row, f"{place}, line {reader.line_num}")
            job = cells.job()
            if job.job_id in seen:
                raise cells.error("job_id", f"also on line {seen[job.job_id]}", "use each id once")
            seen[job.job_id] = reader.line_num
            jobs.append(job)
    except csv.Error as exc:
        raise DataError(f"{place}, line {reader.line_num}", str(exc), "write plain CSV") from exc
    if not jobs:
        raise DataError(place, "no jobs", "add at least one row below the header")
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


class _Row:
    """One row that knows where it stands, so that every refusal can say so."""

    def __init__(self, row: dict[str, str | list[str] | None], place: str) -> None:
        self._row = row
        self._place = place
        if None in row:
            raise DataError(place, "more cells than columns", "quote cells that hold a comma")

    def error(self, column: str, reason: str, fix: str) -> DataError:
        value = self._row.get(column)
        return DataError(f"{self._place}, column {column}", f"{value!r}: {reason}", fix)

    def text(self, column: str) -> str:
        value = self._row.get(column)
        if not isinstance(value, str) or not value.strip():
            raise self.error(column, "empty", "fill the cell")
        return value.strip()

    def number(self, column: str, low: float, high: float) -> float:
        try:
            value = float(self.text(column))
        except ValueError as exc:
            raise self.error(column, "not a number", "write a plain number") from exc
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(column, f"outside {low:g}..{high:g}", "check the unit")
        return value

    def whole(self, column: str, high: int) -> int:
        value = self.number(column, 1, high)
        if value != int(value):
            raise self.error(column, "not whole", "write a whole number")
        return int(value)

    def job(self) -> WorkloadJob:
        return WorkloadJob(
            job_id=self.text("job_id"),
            submit_s=self.number("submit_s", 0, _MAX_SECONDS),
            model=self.text("model"),
            task=self.text("task"),
            gpus=self.whole("gpus", _MAX_GPUS),
            batch_size=self.whole("target_batch_size", _MAX_BATCH),
            total_samples=self.number("total_samples", 1, _MAX_SAMPLES),
        )

"""The Standard Workload Format of the Parallel Workloads Archive.

Eighteen numbers a line, ``-1`` for "not known", comments behind a semicolon. Its processors are
taken for GPUs one to one: the format knows no others, so the replayed cluster must be given as
many GPUs as the original had processors (``MaxProcs`` of its header).

Lines of status 2, 3 and 4 are parts of a job that the line of status 0 or 1 sums up, and are passed
over. The application number is not a model name, so it is not made one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_ext.estimate.csvtext import RowError
from slurm_ext.sim.readers.harvest import MAX_GPUS, MAX_SECONDS, Harvest, Row
from slurm_ext.sim.readers.tracejob import Trace, TraceJob

COLUMNS = (
    "job_number",
    "submit_time",
    "wait_time",
    "run_time",
    "allocated_processors",
    "average_cpu_time",
    "used_memory",
    "requested_processors",
    "requested_time",
    "requested_memory",
    "status",
    "user_id",
    "group_id",
    "executable",
    "queue",
    "partition",
    "preceding_job",
    "think_time",
)
_STATES = {"0": "FAILED", "1": "COMPLETED", "5": "CANCELLED"}
_PARTS = frozenset({"2", "3", "4"})
_NUMBER = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
UNKNOWN = "-1"


def is_swf(line: str) -> bool:
    """Whether ``line`` is a comment or a job of this format."""
    cells = line.split()
    return line.lstrip().startswith(";") or (
        len(cells) == len(COLUMNS) and all(_NUMBER.fullmatch(cell) for cell in cells)
    )


def read_swf(
    lines: Iterable[str], file: str, *, strict: bool = False, limit: int | None = None
) -> Trace:
    """The jobs that ran. Raises DataError where there is none, or for a bad row with ``strict``."""
    harvest = Harvest(file, strict)
    for number, line in enumerate(lines, start=1):
        text = line.partition(";")[0]
        if not text.strip():
            continue
        cells = text.split()
        try:
            if len(cells) != len(COLUMNS):
                raise RowError(
                    file,
                    number,
                    "row",
                    line,
                    f"{len(cells)} fields, not {len(COLUMNS)}",
                    f"write {UNKNOWN} for what is not known",
                )
            _keep(harvest, Row(file, number, dict(zip(COLUMNS, cells, strict=True))))
        except RowError as exc:
            harvest.refuse(exc)
    return harvest.trace("swf", limit=limit)


def _real(row: Row, column: str, what: str) -> float:
    """A number of seconds; 0 where it is not known."""
    if row.text(column) == UNKNOWN:
        return 0.0
    return row.real(column, MAX_SECONDS, what) or 0.0


def _processors(row: Row, column: str) -> int:
    if row.text(column) == UNKNOWN:
        return 0
    return row.whole(column, MAX_GPUS, f"whole processors, or {UNKNOWN} where not known") or 0


def _keep(harvest: Harvest, row: Row) -> None:
    status = row.text("status")
    if status in _PARTS:
        harvest.leave_out("a part of a job that another line sums up")
        return
    job_id = row.whole("job_number", 10**12, "the number of the job")
    submit_s = row.real("submit_time", MAX_SECONDS, "seconds since the first job") or 0.0
    run_s = _real(row, "run_time", "the run time in seconds")
    processors = _processors(row, "allocated_processors")
    processors = processors or _processors(row, "requested_processors")
    limit_s = _real(row, "requested_time", "the time limit in seconds")
    if not run_s:
        harvest.leave_out("no run time (cancelled before it started, or not recorded)")
        return
    if not processors:
        harvest.leave_out("no processors recorded")
        return
    harvest.add(
        TraceJob(
            job_id=str(job_id),
            submit_s=submit_s,
            duration_s=run_s,
            gpus=processors,
            user=_name(row, "user_id"),
            vc=_name(row, "group_id"),
            state=_STATES.get(status, ""),
            limit_s=limit_s or None,
            partition=_name(row, "partition"),
        ),
        row,
        "job_number",
    )


def _name(row: Row, column: str) -> str:
    value = row.text(column)
    return "" if value == UNKNOWN else value

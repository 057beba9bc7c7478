"""Workloads as CSV with a header: the standard columns and four published relatives.

A format is a table that says which column feeds which field, so that a new one is a few lines.
Columns that no field needs are passed over. Every line is parsed by itself: a stray quote costs
one row, not the rest of the file, and no trace has cells with line ends.

The batch of Muri's traces is kept, but no amount of work is made of it: the source does not say
whether it is per GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.csvtext import RowError
from slurm_ext.sim.readers.harvest import (
    MAX_BATCH,
    MAX_GPUS,
    MAX_SAMPLES,
    MAX_SECONDS,
    Harvest,
    Row,
)
from slurm_ext.sim.readers.tracejob import Trace, TraceJob

# What the shared columns of all workloads are called; blank cells are "not in the source".
STANDARD_COLUMNS = ("job_id", "user", "vc", "submit_s", "duration_s", "gpus", "state")


@dataclass(frozen=True, slots=True)
class Form:
    """One CSV format: TraceJob field -> columns that may feed it (the first one there is used).

    ``needed`` are fields without which a row is useless; ``filled`` those whose cell may not be
    blank. ``parts`` are columns that split a file into several workloads, of which exactly one is
    read. A header that has all of ``known_by`` is taken for this format.
    """

    fields: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]
    filled: tuple[str, ...]
    known_by: tuple[str, ...]
    parts: tuple[str, ...] = ()


_COMMON = {
    name: (name,)
    for name in ("job_id", "submit_s", "duration_s", "gpus", "model", "user", "vc", "state")
}
_STANDARD = {
    **_COMMON,
    "batch": ("batch", "batch_size", "target_batch_size", "global_batch"),
    "samples": ("samples", "total_samples"),
    "limit_s": ("limit_s",),
    "task": ("task",),
    "partition": ("partition",),
    "gpu_type": ("gpu_type",),
}

# In this order a header is compared with them: the more particular ones first.
FORMS: dict[str, Form] = {
    "titan_fm": Form(
        fields={**_STANDARD, "batch": ("target_batch_size",), "samples": ("total_samples",)},
        needed=("job_id", "submit_s", "gpus", "model", "batch", "samples"),
        filled=("model", "batch", "samples"),
        known_by=("target_batch_size", "total_samples"),
    ),
    "pollux": Form(
        fields={**_COMMON, "model": ("application",), "batch": ("batch_size",)},
        needed=("job_id", "submit_s", "gpus", "model", "batch"),
        filled=("model", "batch"),
        known_by=("application", "workload", "load"),
        parts=("workload", "load"),
    ),
    "muri": Form(
        fields={**_COMMON, "batch": ("batch_size",)},
        needed=("job_id", "submit_s", "duration_s", "gpus", "model"),
        filled=("duration_s", "model"),
        known_by=("iterations", "batch_size"),
    ),
    "standard": Form(
        fields=_STANDARD,
        needed=("job_id", "submit_s", "gpus"),
        filled=(),
        known_by=("job_id", "submit_s"),
    ),
    "philly": Form(
        fields=_COMMON,
        needed=("job_id", "submit_s", "duration_s", "gpus", "vc"),
        filled=("duration_s",),
        known_by=STANDARD_COLUMNS,  # never guessed: standard comes first and reads it just as well
    ),
}


def recognise(header: str) -> str:
    """The format that a header line belongs to; empty where it is none of these."""
    try:
        names = {name.strip() for name in next(csv.reader([header], strict=True), [])}
    except csv.Error:
        return ""
    return next((fmt for fmt, form in FORMS.items() if names.issuperset(form.known_by)), "")


def read_csv(
    lines: Iterable[str],
    file: str,
    fmt: str,
    *,
    strict: bool = False,
    limit: int | None = None,
    where: Mapping[str, str] | None = None,
) -> Trace:
    """The jobs of a CSV workload; ``where`` keeps the rows whose columns have these values.

    Lines that begin with ``#`` are comments. Raises DataError for an unusable header, and for the
    first bad row with ``strict``.
    """
    form = FORMS[fmt]
    harvest = Harvest(file, strict)
    chosen = dict(where or {})
    columns: list[str] = []
    source: dict[str, str] = {}
    seen_parts: dict[tuple[str, ...], None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            cells = _cells(line, file, number)
            if not columns:
                columns = [cell.strip() for cell in cells]
                source = _sources(form, columns, f"{file}:{number}", fmt, chosen)
                continue
            if len(cells) != len(columns):
                raise RowError(
                    file,
                    number,
                    "row",
                    line,
                    f"{len(cells)} cells under {len(columns)} columns",
                    "write one cell, or nothing, per column, and quote those with a comma",
                )
            row = Row(file, number, dict(zip(columns, cells, strict=True)))
            if form.parts:
                seen_parts[tuple(row.text(part) for part in form.parts)] = None
            several = len(seen_parts) > 1 and not set(form.parts) <= set(chosen)
            if several or any(row.text(column) != value for column, value in chosen.items()):
                continue
            _keep(harvest, row, source, form)
        except RowError as exc:
            if not columns:
                raise
            harvest.refuse(exc)
    if not columns:
        raise DataError(file, "no header line", f"the first line must name {_wanted(form)}")
    if len(seen_parts) > 1 and not set(form.parts) <= set(chosen):
        raise DataError(file, f"holds {len(seen_parts)} workloads", _choose(form, seen_parts))
    if chosen and not harvest.jobs and not harvest.skipped:
        said = ", ".join(f"{column}={value}" for column, value in chosen.items())
        raise DataError(
            file,
            f"no row with {said}",
            _choose(form, seen_parts) if seen_parts else "choose values that occur in the file",
        )
    return harvest.trace(fmt, limit=limit)


def _cells(line: str, file: str, number: int) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as exc:
        raise RowError(
            file, number, "row", line, f"not CSV ({exc})", "write plain CSV in one line"
        ) from exc


def _sources(
    form: Form, columns: list[str], place: str, fmt: str, chosen: Mapping[str, str]
) -> dict[str, str]:
    """Field -> the column that feeds it."""
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(place, f"column {twice[0]} occurs twice", "keep one of them")
    unknown = [column for column in chosen if column not in columns]
    if unknown:
        raise DataError(
            place, f"no column {unknown[0]} to choose rows by", f"there are {', '.join(columns)}"
        )
    found = {
        field: next((name for name in names if name in columns), "")
        for field, names in form.fields.items()
    }
    missing = [form.fields[field][0] for field in form.needed if not found[field]]
    if missing:
        raise DataError(
            place, f"no column {', '.join(missing)}", f"a {fmt} trace must name {_wanted(form)}"
        )
    return {field: column for field, column in found.items() if column}


def _keep(harvest: Harvest, row: Row, source: Mapping[str, str], form: Form) -> None:
    def text(field: str) -> str:
        return row.text(source.get(field, ""), needed=field in form.filled)

    def real(field: str, high: float, what: str) -> float | None:
        text(field)
        return row.real(source.get(field, ""), high, what)

    def whole(field: str, high: int, what: str) -> int | None:
        text(field)
        return row.whole(source.get(field, ""), high, what)

    submit_s = real("submit_s", MAX_SECONDS, "seconds since the first job")
    gpus = whole("gpus", MAX_GPUS, "the GPUs that the job asked for")
    if submit_s is None or gpus is None:
        empty = source["submit_s" if submit_s is None else "gpus"]
        raise row.refuse(empty, "empty", "this column is needed in every row")
    batch = whole("batch", MAX_BATCH, "the global batch in samples")
    samples = real("samples", MAX_SAMPLES, "the samples until the job is done")
    for field, value in (("batch", batch), ("samples", samples)):
        if field in form.filled and not value:
            raise row.refuse(source[field], "zero", "a job without work cannot be replayed")
    limit_s = real("limit_s", MAX_SECONDS, "the time limit in seconds")
    job = TraceJob(
        job_id=row.text(source["job_id"], needed=True),
        submit_s=submit_s,
        duration_s=real("duration_s", MAX_SECONDS, "the run time in seconds"),
        gpus=gpus,
        model=text("model"),
        batch=batch or 0,
        samples=samples or 0.0,
        user=text("user"),
        vc=text("vc"),
        state=text("state"),
        limit_s=limit_s or None,
        task=text("task"),
        partition=text("partition"),
        gpu_type=text("gpu_type"),
    )
    if gpus == 0:
        harvest.leave_out("no GPU")
    elif job.duration_s == 0:
        harvest.leave_out("ran for 0 s")
    else:
        harvest.add(job, row, source["job_id"])


def _wanted(form: Form) -> str:
    return ", ".join(form.fields[field][0] for field in form.needed)


def _choose(form: Form, seen: Iterable[tuple[str, ...]]) -> str:
    shown = [
        ",".join(f"{part}={value}" for part, value in zip(form.parts, values, strict=True))
        for values in sorted(seen)
    ]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return f"name one as FILE#{shown[0]}; there are {'; '.join(shown[:8])}{more}"

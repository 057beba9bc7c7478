"""Measurements and costs as CSV text, both ways. Reads given lines; opens no file.

Two headers are understood: the full template (:data:`TEMPLATE`, what ``export`` writes) and the
shorter one of published traces (``global_batch``, ``accum_steps``, ``unit``). A file with ``kind``
and ``seconds`` holds costs. Every bad row gives one :class:`RowError` that names file, line,
column, value and the way out; whether it is skipped or refuses the file is the caller's choice.

A throughput of 0 means that the configuration ran out of memory, as published tables write it.
Rows in steps/s are refused and not converted: sources disagree about what a step of several
workers is, and a table that is wrong by the number of GPUs is worse than a shorter one.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.measurement import Cost, CostKind, Key, Measurement, Settings

TEMPLATE = (
    "model",
    "revision",
    "input_shape",
    "gpu_type",
    "gpus",
    "nodes",
    "placement",
    "local_batch",
    "accumulation",
    "frozen",
    "precision",
    "grad_checkpointing",
    "stages",
    "micro_batches",
    "environment",
    "throughput",
    "step_time_s",
    "sync_time_s",
    "memory_gb",
    "variance",
    "count",
    "out_of_memory",
    "measured",
    "source",
)
COST_TEMPLATE = ("kind", "model", "gpu_type", "gpus", "seconds", "source")
_ALIASES = {"accum_steps": "accumulation"}
_KNOWN = {*TEMPLATE, "global_batch", "unit"}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
MAX_INT = 10**9
MAX_REAL = 1e15
MAX_TEXT = 255
# Throughput and step time in one row say the same thing twice; rounding explains this much.
CONSISTENT = 0.02

_T = TypeVar("_T")


class RowError(DataError):
    """One unusable row: file, line, column, value, reason and fix."""

    def __init__(
        self, file: str, line: int, column: str, value: str, reason: str, fix: str
    ) -> None:
        self.file, self.line, self.column, self.value = file, line, column, value
        super().__init__(f"{file}:{line}: {column}={_shown(value)}", reason, fix)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The usable rows of a file, and one error for each other row."""

    measurements: tuple[Measurement, ...] = ()
    costs: tuple[Cost, ...] = ()
    errors: tuple[RowError, ...] = ()


def parse(lines: Iterable[str], file: str) -> Parsed:
    """Read the lines of one CSV file. Lines that begin with ``#`` are comments.

    Raises DataError where the header is unusable or the text is no CSV at all.
    """
    numbered = _Numbered(lines)
    reader = csv.reader(numbered, strict=True)
    try:
        header = next(reader, None)
        if not header:
            raise DataError(
                file, "no header line", "take the header that slurm-ext table template prints"
            )
        names = _header(header, file)
        if "kind" in names:
            return _read(reader, numbered, names, file, _cost)
        return _read(reader, numbered, names, file, _measurement)
    except (csv.Error, UnicodeDecodeError) as exc:
        raise DataError(
            f"{file}:{numbered.line}",
            f"not CSV text in UTF-8 ({exc})",
            "mend or re-export the file",
        ) from exc


def format_measurements(measurements: Iterable[Measurement]) -> Iterator[list[str]]:
    """Rows in the order of :data:`TEMPLATE`; reading them back gives the same measurements."""
    for m in measurements:
        k, s = m.key, m.key.settings
        yield [
            k.model,
            s.revision,
            s.input_shape,
            k.gpu_type,
            str(k.gpus),
            _blank(k.nodes),
            placement_text(k.placement),
            str(k.local_batch),
            str(k.accumulation),
            s.frozen,
            s.precision,
            "" if s.grad_checkpointing is None else str(int(s.grad_checkpointing)),
            _blank(s.stages),
            _blank(s.micro_batches),
            s.environment,
            _real(m.throughput),
            _real(m.step_time_s),
            _real(m.sync_time_s),
            _real(m.memory_gb),
            _real(m.variance),
            str(m.count),
            _blank(m.out_of_memory),
            "" if m.measured_s is None else _time(m.measured_s),
            m.source,
        ]


def format_costs(costs: Iterable[Cost]) -> Iterator[list[str]]:
    """Rows in the order of :data:`COST_TEMPLATE`."""
    for c in costs:
        yield [c.kind.value, c.model, c.gpu_type, _blank(c.gpus), _real(c.seconds), c.source]


def placement_text(placement: tuple[int, ...]) -> str:
    """``44`` for two nodes with four GPUs each; ``16+16`` where a node has more than nine."""
    joint = "+" if any(n > 9 for n in placement) else ""
    if joint and len(placement) == 1:
        return f"{placement[0]}+"
    return joint.join(str(n) for n in placement)


def parse_placement(text: str) -> tuple[int, ...]:
    """GPUs per node in descending order. A single node of ten or more is written ``16+``."""
    parts = text.rstrip("+").split("+") if "+" in text else list(text)
    if not parts or not all(p.isascii() and p.isdigit() and 0 < int(p) <= 9999 for p in parts):
        raise ValueError("not digits (44: two nodes with four GPUs each) nor 16+16")
    return tuple(sorted((int(p) for p in parts), reverse=True))


class _Numbered:
    """Lines without comments, remembering the number of the last one."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.line = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            text = next(self._lines)
            self.line += 1
            if "\0" in text:
                raise csv.Error("a NUL character")
            if text.strip() and not text.startswith("#"):
                return text.removeprefix("\ufeff")


def _header(header: list[str], file: str) -> list[str]:
    names = [_ALIASES.get(h.strip(), h.strip()) for h in header]
    costs = "kind" in names
    known = set(COST_TEMPLATE) if costs else _KNOWN
    for given, name in zip(header, names, strict=True):
        if name not in known:
            raise DataError(
                f"{file}: header",
                f"unknown column {_shown(given)}",
                f"the columns are {', '.join(COST_TEMPLATE if costs else TEMPLATE)}",
            )
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise DataError(f"{file}: header", f"column {twice[0]} occurs twice", "keep one of them")
    needed = (
        [{"kind"}, {"seconds"}]
        if costs
        else [
            {"model"},
            {"gpu_type"},
            {"gpus", "placement"},
            {"local_batch", "global_batch"},
            {"throughput", "step_time_s"},
        ]
    )
    for choice in needed:
        if not choice & set(names):
            raise DataError(
                f"{file}: header",
                f"no column {' or '.join(sorted(choice))}",
                "take the header that slurm-ext table template prints",
            )
    return names


def _read(
    reader: Iterator[list[str]],
    numbered: _Numbered,
    names: list[str],
    file: str,
    make: Callable[[_Row], Measurement] | Callable[[_Row], Cost],
) -> Parsed:
    measurements: list[Measurement] = []
    costs: list[Cost] = []
    errors: list[RowError] = []
    for values in reader:
        try:
            if len(values) != len(names):
                raise RowError(
                    file,
                    numbered.line,
                    "row",
                    ",".join(values),
                    f"{len(values)} values under {len(names)} columns",
                    "write one value, or nothing, per column",
                )
            made = make(_Row(file, numbered.line, dict(zip(names, values, strict=True))))
        except RowError as exc:
            errors.append(exc)
            continue
        if isinstance(made, Cost):
            costs.append(made)
        else:
            measurements.append(made)
    return Parsed(tuple(measurements), tuple(costs), tuple(errors))


class _Row:
    """Typed access to one row; every refusal knows where it stands."""

    def __init__(self, file: str, line: int, values: Mapping[str, str]) -> None:
        self.file, self.line, self.values = file, line, values

    def refuse(self, column: str, reason: str, fix: str) -> RowError:
        return RowError(self.file, self.line, column, self.values.get(column, ""), reason, fix)

    def text(self, column: str, *, needed: bool = False) -> str:
        value = self.values.get(column, "").strip()
        if needed and not value:
            raise self.refuse(column, "empty", "this column is needed in every row")
        if len(value) > MAX_TEXT or not value.isprintable():
            raise self.refuse(
                column, "too long or not printable", f"write at most {MAX_TEXT} plain characters"
            )
        return value

    def whole(self, column: str, default: _T, low: int = 1) -> int | _T:
        value = self.text(column)
        if not value:
            return default
        if not (value.isascii() and value.isdigit()) or not low <= int(value) <= MAX_INT:
            raise self.refuse(
                column, "not a whole number", f"write a whole number from {low} to {MAX_INT}"
            )
        return int(value)

    def real(self, column: str) -> float | None:
        value = self.text(column)
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number <= MAX_REAL:  # also refuses NaN
            raise self.refuse(column, "not a number of at least 0", "write a plain decimal number")
        return number


def _measurement(row: _Row) -> Measurement:
    unit = row.text("unit") or "samples/s"
    if unit != "samples/s":
        raise row.refuse(
            "unit",
            "only samples/s is understood",
            "multiply steps/s by the samples of one step over all GPUs and write samples/s",
        )
    key = _key(row)
    measured = row.real("throughput")
    step = row.real("step_time_s")
    sync = row.real("sync_time_s")
    failed = row.whole("out_of_memory", 0, low=0)
    if measured is None and step is None and not failed:
        raise row.refuse("throughput", "empty", "give throughput or step_time_s")
    if step is not None and step <= 0:
        raise row.refuse("step_time_s", "not above 0", "leave it blank where it is not known")
    throughput = measured
    if throughput is None:
        throughput = key.global_batch / step if step is not None else 0.0
    elif step is not None and throughput > 0:
        implied = key.global_batch / step
        if abs(implied / throughput - 1) > CONSISTENT:
            raise row.refuse(
                "throughput",
                f"the step time gives {implied:.4g} samples/s",
                "correct one of them, or leave one blank",
            )
    if sync is not None and step is not None and sync > step * (1 + CONSISTENT):
        raise row.refuse("sync_time_s", "longer than the step", "give the part of the step")
    if throughput == 0:
        return Measurement(
            key=key,
            count=0,
            out_of_memory=max(1, failed),
            measured_s=_measured(row),
            source=row.text("source"),
        )
    count = row.whole("count", 1)
    variance = row.real("variance")
    return Measurement(
        key=key,
        throughput=throughput,
        step_time_s=step,
        sync_time_s=sync if sync is None or step is None else min(sync, step),
        memory_gb=row.real("memory_gb"),
        variance=variance if count > 1 else None,
        count=count,
        out_of_memory=failed,
        measured_s=_measured(row),
        source=row.text("source"),
    )


def _key(row: _Row) -> Key:
    gpus = row.whole("gpus", None)
    nodes = row.whole("nodes", 0)
    placement: tuple[int, ...] = ()
    text = row.text("placement")
    if text:
        try:
            placement = parse_placement(text)
        except ValueError as exc:
            raise row.refuse("placement", str(exc), "write 44 or 16+16") from exc
        gpus = sum(placement) if gpus is None else gpus
        if sum(placement) != gpus:
            raise row.refuse(
                "placement", f"holds {sum(placement)} GPUs, not {gpus}", "correct one of them"
            )
    elif gpus is None:
        raise row.refuse("gpus", "empty", "give placement, or gpus and nodes")
    elif nodes == 1 or gpus == 1:
        placement = (gpus,)
    if placement:
        if nodes not in (0, len(placement)):
            raise row.refuse(
                "nodes", f"the placement has {len(placement)} nodes", "correct one of them"
            )
        nodes = len(placement)
    if nodes > gpus:
        raise row.refuse("nodes", f"more nodes than the {gpus} GPUs", "correct one of them")
    if nodes == 0:
        raise row.refuse("nodes", "neither nodes nor placement given", "give one of them")
    accumulation = row.whole("accumulation", 1)
    return Key(
        model=row.text("model", needed=True),
        gpu_type=row.text("gpu_type", needed=True),
        gpus=gpus,
        nodes=nodes,
        placement=placement,
        local_batch=_local_batch(row, gpus, accumulation),
        accumulation=accumulation,
        settings=Settings(
            revision=row.text("revision"),
            input_shape=row.text("input_shape"),
            frozen=row.text("frozen"),
            precision=row.text("precision"),
            grad_checkpointing=_switch(row, "grad_checkpointing"),
            stages=row.whole("stages", 0),
            micro_batches=row.whole("micro_batches", 0),
            environment=row.text("environment"),
        ),
    )


def _local_batch(row: _Row, gpus: int, accumulation: int) -> int:
    local = row.whole("local_batch", None)
    total = row.whole("global_batch", None)
    if local is None and total is None:
        raise row.refuse("local_batch", "empty", "give local_batch or global_batch")
    if total is not None:
        each, rest = divmod(total, gpus * accumulation)
        if rest or (local is not None and each != local):
            raise row.refuse(
                "global_batch",
                f"is not local batch x {gpus} GPUs x {accumulation} micro-batches",
                "correct one of them, or leave global_batch blank",
            )
        local = each
    assert local is not None
    return local


def _switch(row: _Row, column: str) -> bool | None:
    value = row.text(column).lower()
    if value and value not in _TRUE | _FALSE:
        raise row.refuse(column, "neither yes nor no", "write 1 or 0, or leave it blank")
    return None if not value else value in _TRUE


def _measured(row: _Row) -> float | None:
    value = row.text("measured")
    if not value:
        return None
    try:
        when = datetime.fromisoformat(value)
        seconds = when.replace(tzinfo=when.tzinfo or UTC).timestamp()
    except ValueError as exc:
        raise row.refuse("measured", "not a date and time", "write 2025-01-31T12:00:00Z") from exc
    return seconds


def _cost(row: _Row) -> Cost:
    kind = row.text("kind", needed=True)
    if kind not in {k.value for k in CostKind}:
        raise row.refuse("kind", "unknown", f"one of {', '.join(k.value for k in CostKind)}")
    seconds = row.real("seconds")
    if seconds is None:
        raise row.refuse("seconds", "empty", "this column is needed in every row")
    return Cost(
        kind=CostKind(kind),
        seconds=seconds,
        model=row.text("model"),
        gpu_type=row.text("gpu_type"),
        gpus=row.whole("gpus", 0),
        source=row.text("source"),
    )


def _blank(number: int) -> str:
    return str(number) if number else ""


def _real(value: float | None) -> str:
    """The shortest text that reads back as the same number."""
    return "" if value is None else repr(value).removesuffix(".0")


def _time(epoch_s: float) -> str:
    return datetime.fromtimestamp(epoch_s, UTC).isoformat().replace("+00:00", "Z")


def _shown(value: str, limit: int = 60) -> str:
    """``value`` made safe and short for one line."""
    plain = "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode("ascii")
        for c in value
    )
    return repr(plain if len(plain) <= limit else plain[: limit - 3] + "...").replace("\\\\", "\\")

"""One door to every recorded workload: finds the format, opens the file, calls the reader.

The format is recognised by the first line, never by the file's name. What a row must look like is
the readers' business (`slurm_ext.sim.readers`).
"""

from __future__ import annotations

import gzip
import io
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.readers.csvtrace import FORMS, read_csv, recognise
from slurm_ext.sim.readers.sacct import read_sacct, to_trace
from slurm_ext.sim.readers.sacctfile import is_heading
from slurm_ext.sim.readers.swf import is_swf, read_swf
from slurm_ext.sim.readers.tracejob import Trace, TraceJob

__all__ = ["FORMATS", "Trace", "TraceJob", "read_lines", "read_trace"]

AUTO = "auto"
FORMATS = (AUTO, *FORMS, "swf", "sacct")
# A larger file is a mistake: a million jobs take about a quarter of it.
MAX_BYTES = 2**30


def read_trace(
    path: str | Path,
    fmt: str = AUTO,
    strict: bool = False,
    limit: int | None = None,
    where: Mapping[str, str] | None = None,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str | None = None,
    model_pattern: re.Pattern[str] | None = None,
) -> Trace:
    """The jobs of a recorded workload (may be gzipped, ``-`` is standard input).

    ``limit`` keeps the first so many in order of submission. ``where`` keeps the rows of a CSV
    whose columns have these values; ``FILE#workload=1,load=1.0`` says the same. A bad row is told
    in ``skipped``, or raised as DataError with ``strict``; an unusable file always raises.
    ``columns``, ``delimiter`` and ``model_pattern`` are `read_sacct`'s; with ``columns`` the file
    is taken for sacct's.
    """
    if fmt not in FORMATS:
        raise DataError(f"format {fmt!r}", "is not known", f"choose among {', '.join(FORMATS)}")
    if limit is not None and limit < 1:
        raise DataError(f"limit {limit}", "keeps no job", "give at least 1")
    name, chosen = _selection(str(path))
    chosen.update(where or {})
    lines = read_lines(name)
    if fmt == AUTO:
        fmt = _recognise(lines, name) if columns is None else "sacct"
    if fmt in FORMS:
        return read_csv(lines, name, fmt, strict=strict, limit=limit, where=chosen)
    if chosen:
        raise DataError(str(path), f"rows of {fmt} cannot be chosen", "leave the part from # out")
    if fmt == "swf":
        return read_swf(lines, name, strict=strict, limit=limit)
    log = read_sacct(
        lines,
        name,
        strict=strict,
        columns=columns,
        delimiter=delimiter,
        model_pattern=model_pattern,
    )
    return to_trace(log, limit)


def read_lines(name: str) -> list[str]:
    """The lines of a text file, unpacked where it is gzip. Raises DataError.

    What is not UTF-8 becomes U+FFFD, which costs the row and not the file. Only line feeds end a
    line: other separators (0x1e, U+2028) may stand inside a row.
    """
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise DataError(name, f"cannot be read ({exc.strerror})", "name a readable file") from exc
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as exc:
            raise DataError(name, f"damaged gzip data ({exc})", "fetch the file again") from exc
    if len(data) > MAX_BYTES:
        raise DataError(name, f"larger than {MAX_BYTES >> 20} MiB", "split the file")
    text = data.decode("utf-8", errors="replace").removeprefix("\ufeff")
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _selection(path: str) -> tuple[str, dict[str, str]]:
    """``FILE#column=value,...`` taken apart; a file whose own name has a ``#`` stays whole."""
    name, mark, words = path.rpartition("#")
    if not mark or Path(path).exists():
        return path, {}
    chosen: dict[str, str] = {}
    for word in words.split(","):
        column, equals, value = word.partition("=")
        if not equals or not column.strip():
            raise DataError(path, f"{word!r} is not COLUMN=VALUE", "write FILE#workload=1,load=1.0")
        chosen[column.strip()] = value.strip()
    return name, chosen


def _recognise(lines: list[str], name: str) -> str:
    first = next((line for line in lines if line.strip() and not line.startswith("#")), None)
    if first is None:
        raise DataError(name, "empty", "name a file with a workload")
    if is_swf(first):
        return "swf"
    # A comma may be sacct's delimiter, but "job_id" is never its heading.
    if is_heading(first):
        return "sacct"
    found = recognise(first)
    if found:
        return found
    if "\0" in first:
        raise DataError(name, "not UTF-8 text (UTF-16?)", "save it as UTF-8")
    for word, separator in (("semicolons", ";"), ("tabs", "\t"), ("bars", "|")):
        if separator in first and recognise(first.replace(separator, ",")):
            raise DataError(name, f"its columns are separated by {word}", "separate them by commas")
    raise DataError(
        name,
        "not a workload that can be recognised by its first line",
        f"name the format, one of {', '.join(FORMATS[1:])}; a CSV file needs the columns"
        " job_id, submit_s and gpus; output of sacct without a heading needs --sacct-columns",
    )

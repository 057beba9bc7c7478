"""``slurm-ext table``: the throughput table, in and out, listed as squeue lists jobs."""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import json
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_ext.cli import stale
from slurm_ext.cli.tabular import Column, letters_help, parse_format, render
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.spans import counted
from slurm_ext.estimate.csvtext import (
    COST_TEMPLATE,
    TEMPLATE,
    Parsed,
    RowError,
    format_costs,
    format_measurements,
    parse,
    placement_text,
)
from slurm_ext.estimate.measurement import Cost, Measurement
from slurm_ext.estimate.starter import STARTER_FILES, starter_bytes
from slurm_ext.estimate.table import TableWriter, read_table

LIST_FORMAT = "%20m %8g %.6r %.16G %.14B %.12e %.8p %.5c %S"
SHOW_FORMAT = "%8g %.5G %.5N %.12P %.6b %.4k %.10t %.10s %.10y %.8M %.5c %8p %S"
# More bad rows than this are counted, not printed.
ERRORS_SHOWN = 20
# A larger file is a mistake: a million rows take less.
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class _Summary:
    """One line of ``list``: all rows of a model on a GPU type."""

    model: str
    gpu_type: str
    rows: tuple[Measurement, ...]

    def values(self, name: str) -> list[Any]:
        """Distinct values of one key column, ascending; settings included."""
        found = {getattr(r.key, name, None) or getattr(r.key.settings, name, "") for r in self.rows}
        return sorted(v for v in found if v)


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"


def _several(values: Sequence[Any]) -> str:
    return ",".join(str(v) for v in values) or "-"


def _sources(rows: Iterable[Measurement]) -> str:
    return _several(sorted({r.source for r in rows if r.source}))


def _day(rows: Iterable[Measurement]) -> str:
    latest = max((r.measured_s for r in rows if r.measured_s is not None), default=None)
    return "-" if latest is None else time.strftime("%Y-%m-%d", time.gmtime(latest))


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _switch(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


LIST_LETTERS: dict[str, Column[_Summary]] = {
    "m": Column("MODEL", lambda s: s.model, "model"),
    "g": Column("GPU_TYPE", lambda s: s.gpu_type, "GPU type"),
    "r": Column("ROWS", lambda s: str(len(s.rows)), "measured points"),
    "G": Column("GPUS", lambda s: _range(s.values("gpus")), "least and most GPUs"),
    "B": Column("LOCAL_BATCH", lambda s: _range(s.values("local_batch")), "samples per GPU"),
    "v": Column("REVISION", lambda s: _several(s.values("revision")), "revisions"),
    "i": Column("INPUT_SHAPE", lambda s: _several(s.values("input_shape")), "input shapes"),
    "f": Column("FROZEN", lambda s: _several(s.values("frozen")), "frozen layers"),
    "p": Column("PRECISION", lambda s: _several(s.values("precision")), "precisions"),
    "e": Column("ENVIRONMENT", lambda s: _several(s.values("environment")), "environments"),
    "o": Column("OOM", lambda s: str(sum(1 for r in s.rows if not r.count)), "out of memory"),
    "c": Column("RUNS", lambda s: str(max(r.count for r in s.rows)), "most runs of one point"),
    "d": Column("MEASURED", lambda s: _day(s.rows), "day of the latest measurement"),
    "S": Column("SOURCE", lambda s: _sources(s.rows), "where the rows come from"),
}
SHOW_LETTERS: dict[str, Column[Measurement]] = {
    "m": Column("MODEL", lambda r: r.key.model, "model"),
    "g": Column("GPU_TYPE", lambda r: r.key.gpu_type, "GPU type"),
    "G": Column("GPUS", lambda r: str(r.key.gpus), "GPUs"),
    "N": Column("NODES", lambda r: str(r.key.nodes), "nodes"),
    "P": Column("PLACEMENT", lambda r: placement_text(r.key.placement) or "-", "GPUs per node"),
    "b": Column("LOCAL", lambda r: str(r.key.local_batch), "samples per GPU and micro-batch"),
    "k": Column("ACC", lambda r: str(r.key.accumulation), "micro-batches per step"),
    "v": Column("REVISION", lambda r: r.key.settings.revision or "-", "revision"),
    "i": Column("INPUT_SHAPE", lambda r: r.key.settings.input_shape or "-", "input shape"),
    "f": Column("FROZEN", lambda r: r.key.settings.frozen or "-", "frozen layers"),
    "p": Column("PRECISION", lambda r: r.key.settings.precision or "-", "precision"),
    "x": Column(
        "CHECKPTG", lambda r: _switch(r.key.settings.grad_checkpointing), "gradient checkpointing"
    ),
    "l": Column("STAGES", lambda r: str(r.key.settings.stages or "-"), "pipeline stages"),
    "u": Column("MICRO", lambda r: str(r.key.settings.micro_batches or "-"), "micro-batches"),
    "e": Column("ENVIRONMENT", lambda r: r.key.settings.environment or "-", "environment"),
    "t": Column("SAMPLES/S", lambda r: _number(r.throughput) if r.count else "OOM", "throughput"),
    "s": Column("STEP_S", lambda r: _number(r.step_time_s), "seconds of a step"),
    "y": Column("SYNC_S", lambda r: _number(r.sync_time_s), "its synchronisation"),
    "M": Column("MEM_GB", lambda r: _number(r.memory_gb), "peak memory per GPU"),
    "V": Column("VARIANCE", lambda r: _number(r.variance), "variance of the throughput"),
    "c": Column("RUNS", lambda r: str(r.count), "runs"),
    "o": Column("OOM", lambda r: str(r.out_of_memory), "runs that ran out of memory"),
    "d": Column("MEASURED", lambda r: _day([r]), "day of measurement"),
    "S": Column("SOURCE", lambda r: r.source or "-", "source"),
}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = subparsers.add_parser(
        "table",
        help="throughput table: import, list, show, export",
        description="Measured training throughput, from which run times are estimated.",
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    add = _action(actions, "import", "read CSV files (.csv, .csv.gz, - for stdin) into the table")
    add.add_argument(
        "files", nargs="*", metavar="FILE", help="CSV file as export writes it; - reads stdin"
    )
    add.add_argument("--starter", action="store_true", help="the published rows of the package")
    add.add_argument("--strict", action="store_true", help="one bad row refuses every file")
    add.add_argument(
        "--again",
        action="store_true",
        help="count a file that was imported before as new measurements",
    )

    shown = _action(actions, "list", "one line per model and GPU type", LIST_LETTERS, LIST_FORMAT)
    _listing(shown, LIST_FORMAT)

    show = _action(actions, "show", "every row of one model", SHOW_LETTERS, SHOW_FORMAT)
    show.add_argument("model", metavar="MODEL", help="name of a model, as table list has it")
    show.add_argument("-g", "--gpu-type", metavar="TYPE", help="only this GPU type")
    show.add_argument("-G", "--gpus", metavar="N", type=int, help="only this GPU count")
    _listing(show, SHOW_FORMAT)

    export = _action(actions, "export", "everything as CSV that import reads")
    export.add_argument("--costs", action="store_true", help="start-up costs instead of rows")
    export.add_argument("-m", "--model", metavar="MODEL", help="only this model")

    stale.register(actions)

    template = _action(actions, "template", "an empty CSV file with its explanation")
    template.add_argument("--costs", action="store_true", help="the one for start-up costs instead")

    from slurm_ext.cli import profile  # starts processes: only where the command is built

    profile.register(actions)


def run(args: argparse.Namespace) -> int:
    """Do one action."""
    match args.action:
        case "import":
            return _import(args)
        case "list":
            return _list(args)
        case "show":
            return _show(args)
        case "export":
            return _export(args)
        case "stale":
            return stale.run(args)
        case _:
            return _template(args)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    letters: dict[str, Any] | None = None,
    default: str = "",
) -> argparse.ArgumentParser:
    epilog = None
    if letters is not None:
        epilog = f"Format fields:\n{letters_help(letters)}\nDefault: {default}"
    parser = actions.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # of a listing, -h is --noheader, as in squeue
    )
    helping = ("--help",) if letters is not None else ("-h", "--help")
    parser.add_argument(*helping, action="help", help="show this help and exit")
    parser.add_argument(
        "--table", metavar="FILE", type=Path, help="table file (default: table of the config)"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="configuration to read")
    return parser


def _listing(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "-o", "--format", metavar="FORMAT", default=default, help="fields of a line, see below"
    )
    parser.add_argument("-h", "--noheader", action="store_true", help="no heading line")
    parser.add_argument("--json", action="store_true", help="a JSON list instead")


def _table(args: argparse.Namespace) -> Path:
    if args.table is not None:
        return Path(args.table)
    from slurm_ext.control.config import load_config

    return load_config(args.config).table


def _import(args: argparse.Namespace) -> int:
    if bool(args.files) == args.starter:
        print("slurm-ext table import: give FILE... or --starter, not both", file=sys.stderr)
        return 2
    named = (
        [(name, starter_bytes(name)) for name in STARTER_FILES]
        if args.starter
        else [(name, _bytes(name)) for name in args.files]
    )
    parsed = [(name, data, parse(_lines(name, data), name)) for name, data in named]
    errors = [error for _, _, one in parsed for error in one.errors]
    _report(errors)
    if errors and args.strict:
        print(f"nothing imported: {len(errors)} bad rows (--strict)", file=sys.stderr)
        return 1
    path = _table(args)
    with TableWriter(path) as table:
        for name, data, one in parsed:
            _add(table, name, data, one, again=args.again)
    empty = [name for name, _, one in parsed if not one.measurements and not one.costs]
    return 1 if empty else 0


def _add(table: TableWriter, name: str, data: bytes, one: Parsed, *, again: bool) -> None:
    digest = "" if again else hashlib.sha256(data).hexdigest()
    rows = len(one.measurements) + len(one.costs)
    if not rows:
        print(f"{name}: no usable row", file=sys.stderr)
        return
    done = table.add(one.measurements, one.costs, digest=digest, name=name, at_s=time.time())
    skipped = f", {counted(len(one.errors), 'bad row')} skipped" if one.errors else ""
    if done:
        print(f"{name}: {rows} rows imported into {table.path}{skipped}")
    else:
        print(f"{name}: imported before, nothing changed (--again counts it once more)")


def _report(errors: Sequence[RowError]) -> None:
    for error in errors[:ERRORS_SHOWN]:
        print(error, file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"... and {len(errors) - ERRORS_SHOWN} more bad rows", file=sys.stderr)


def _bytes(name: str) -> bytes:
    try:
        if name == "-":
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        with open(name, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise DataError(name, f"cannot be read ({exc.strerror})", "name a readable file") from exc


def _lines(name: str, data: bytes) -> Iterator[str]:
    """The text lines of a file, unpacked where it is gzip, bounded in size either way."""
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as exc:
            raise DataError(name, f"damaged gzip data ({exc})", "fetch the file again") from exc
    if len(data) > MAX_BYTES:
        raise DataError(name, f"larger than {MAX_BYTES >> 20} MiB", "split the file")
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="")


def _list(args: argparse.Namespace) -> int:
    pieces = parse_format(args.format, LIST_LETTERS)
    content = read_table(_table(args))
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for row in content.measurements:
        groups.setdefault((row.key.model, row.key.gpu_type), []).append(row)
    summaries = [_Summary(*kind, tuple(rows)) for kind, rows in sorted(groups.items())]
    if args.json:
        document = [
            {
                "model": s.model,
                "gpu_type": s.gpu_type,
                "rows": len(s.rows),
                "gpus": s.values("gpus"),
                "local_batch": s.values("local_batch"),
                "out_of_memory": sum(1 for r in s.rows if not r.count),
                "sources": sorted({r.source for r in s.rows}),
            }
            for s in summaries
        ]
        print(json.dumps(document))
        return 0
    for line in render(summaries, pieces, LIST_LETTERS, header=not args.noheader):
        print(line)
    return 0


def _show(args: argparse.Namespace) -> int:
    pieces = parse_format(args.format, SHOW_LETTERS)
    path = _table(args)
    every = [r for r in read_table(path).measurements if r.key.model == args.model]
    rows = [
        r
        for r in every
        if (args.gpu_type is None or r.key.gpu_type.lower() == args.gpu_type.lower())
        and (args.gpus is None or r.key.gpus == args.gpus)
    ]
    if not rows:
        known = ", ".join(sorted({r.key.gpu_type for r in every}))
        raise DataError(
            str(path),
            f"no such rows of {args.model}" if every else f"no model {args.model}",
            f"it is measured on {known}" if every else "slurm-ext table list shows what there is",
        )
    rows.sort(
        key=lambda r: (
            r.key.gpu_type,
            r.key.gpus,
            r.key.nodes,
            r.key.placement,
            r.key.accumulation,
            r.key.local_batch,
        )
    )
    if args.json:
        print(json.dumps([_document(r) for r in rows]))
        return 0
    for line in render(rows, pieces, SHOW_LETTERS, header=not args.noheader):
        print(line)
    return 0


def _document(row: Measurement) -> dict[str, Any]:
    """One flat object per row, with the names of the template."""
    document = asdict(row)
    key = document.pop("key")
    settings = key.pop("settings")
    return {**key, **settings, **document}


def _export(args: argparse.Namespace) -> int:
    content = read_table(_table(args))
    if args.costs:
        costs: Iterable[Cost] = content.costs
        if args.model is not None:
            costs = [c for c in costs if c.model in ("", args.model)]
        _write(COST_TEMPLATE, format_costs(costs))
        return 0
    rows: Iterable[Measurement] = content.measurements
    if args.model is not None:
        rows = [r for r in rows if r.key.model == args.model]
    _write(TEMPLATE, format_measurements(rows))
    return 0


def _template(args: argparse.Namespace) -> int:
    print(_COST_HELP if args.costs else _TEMPLATE_HELP, end="")
    _write(COST_TEMPLATE if args.costs else TEMPLATE, ())
    return 0


def _write(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)


_TEMPLATE_HELP = """\
# Measured training throughput, one row per configuration. Blank = not recorded.
# Needed: model, gpu_type, local_batch, placement (or gpus and nodes), throughput or step_time_s.
# placement: GPUs on each node, 44 = two nodes with four each, 16+16 from ten on.
# local_batch: samples per GPU and micro-batch. accumulation: micro-batches per optimizer step.
# throughput: samples/s over all GPUs, 0 = ran out of memory. step_time_s: one optimizer step,
# sync_time_s: the part of it that comes once per step. memory_gb: peak per GPU.
# environment: one word for driver, CUDA, NCCL, torch and compile mode. measured: 2025-01-31T12:00Z
"""
_COST_HELP = """\
# Seconds that a job pays beside its steps. Blank model or gpu_type, and blank gpus, stand for any.
# kind: cold_start (until the first step), checkpoint (per start), switch (in a warm process),
# naive_switch (the same without overlap, to compare)
"""

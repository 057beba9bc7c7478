"""``slurm-ext report switch``: what each stage did while one task gave way to the next.

Reads the time lines that a chain of tasks writes beside its checkpoints. A table in any case; a
picture where one is asked for, with one panel per switch on a common time axis, so that a naive
and an overlapped run can be compared by eye. matplotlib is imported only then.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from slurm_ext.cli.checkpoint import JobFolders, find
from slurm_ext.domain.errors import DataError, SlurmExtError
from slurm_ext.domain.spans import counted
from slurm_ext.estimate.csvtext import COST_TEMPLATE, format_costs
from slurm_ext.estimate.measurement import Cost, CostKind
from slurm_ft.switch.timeline import Kind, Span, Timeline, busy_s, parse_timeline

_FOLDER = "chain"
_FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito: apart for colour-blind readers and in print.
_COLOURS = {
    Kind.COMPUTE: "#0072b2",
    Kind.OUT: "#e69f00",
    Kind.IN: "#009e73",
    Kind.SAVE: "#cc79a7",
    Kind.GROUP: "#d55e00",
    Kind.START: "#f0e442",
    Kind.WAIT: "#bbbbbb",
}
_MOMENTS: dict[Literal[":", "--"], str] = {
    ":": "old task durable",
    "--": "new task's first step over",
}
_MB = 1e6
# Of the most spans that a time line may have, with a long name each.
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Shown:
    """One switch and where it was read."""

    name: str
    line: Timeline

    @property
    def title(self) -> str:
        """Which tasks it was between, and how they were switched."""
        line = self.line
        tasks = f" {line.old} -> {line.new}" if line.old else ""
        return f"{self.name}{tasks}: {line.how}"


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the report to ``slurm-ext report``."""
    parser = kinds.add_parser(
        "switch",
        help="what each stage did while one task of a chain gave way to the next",
        description="Show the switches of jobs that trained a chain of tasks: per stage the seconds"
        " of each activity, and the bytes moved. Several places are shown side by side.",
    )
    parser.add_argument(
        "places",
        metavar="JOBID|DIR",
        nargs="+",
        help="a job, its checkpoint directory, or a file of one switch",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="picture: .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="the time lines as a JSON list")
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        help="write the measured costs as CSV, for slurm-ext table import",
    )
    parser.add_argument("--gpu-type", metavar="TYPE", default="", help="GPU type of those rows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the tables, and draw where asked to."""
    if args.plot is not None and args.plot.suffix not in _FORMATS:
        raise DataError(str(args.plot), "is no kind of picture", f"end in {', '.join(_FORMATS)}")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise _no_matplotlib(args.plot)  # before anything is printed
    shown: list[Shown] = []
    wrong: list[SlurmExtError] = []
    for place in args.places:
        found, problems = read(place, several=len(args.places) > 1)
        shown += found
        wrong += problems
    if wrong and not shown:
        raise wrong[0]
    for problem in wrong:
        print(f"slurm-ext: left out: {problem}", file=sys.stderr)
    if args.json:
        print(json.dumps([{"name": s.name, **json.loads(s.line.to_json())} for s in shown]))
    else:
        for item in shown:
            print("\n".join(table(item)))
    costs: list[Cost] | None = None
    if args.costs is not None:
        costs, nothing = measured(shown, args.gpu_type)
        for line in nothing:
            print(f"slurm-ext: {line}", file=sys.stderr)
        if costs:
            with open(args.costs, "w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([COST_TEMPLATE, *format_costs(costs)])
            if not args.json:
                told = f"{counted(len(costs), 'cost')} in {args.costs}"
                print(f"{told}: slurm-ext table import {args.costs}")
        else:
            print(f"slurm-ext: {args.costs} is not written: it has no cost", file=sys.stderr)
    if args.plot is not None:
        draw(shown, args.plot)
        if not args.json:
            print(f"picture in {args.plot}")
    return 1 if wrong or costs == [] else 0


def read(place: str, *, several: bool = False) -> tuple[list[Shown], list[SlurmExtError]]:
    """All switches of one place, in their order, and what is wrong with those that cannot be
    read. Raises DataError where there are none."""
    path = Path(place)
    if path.is_file():
        files = [path]
    else:
        folder = find(place, JobFolders())
        files = sorted((folder / _FOLDER).glob("switch-*.json"))
        if not files:
            raise DataError(
                str(folder), "holds no switches", "did the job train more than one task of a chain?"
            )
    found: list[Shown] = []
    wrong: list[SlurmExtError] = []
    for file in files:
        name = f"{place} {file.stem}" if several else file.stem
        try:
            found.append(Shown(name, parse_timeline(_text(file), str(file))))
        except SlurmExtError as exc:
            wrong.append(exc)
    return found, wrong


def _text(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as exc:
        raise DataError(str(file), f"cannot be read ({exc.strerror})", "mend its rights") from exc
    if len(data) > _MAX_BYTES:
        raise DataError(str(file), f"is longer than {_MAX_BYTES} bytes", "it is no time line")
    return data.decode(errors="replace")


_KINDS = {
    "overlapped": CostKind.SWITCH,
    "naive": CostKind.NAIVE_SWITCH,
    "cold": CostKind.COLD_START,
}


def measured(shown: Sequence[Shown], gpu_type: str) -> tuple[list[Cost], list[str]]:
    """Median cost for each kind of switch, model and GPU count, and a line for each that is none.

    What a switch adds to the two tasks' steps: until the old task is durable and the new one's
    first step is over, less the length of that step, which the old task's last one tells. Where
    the median is not above 0, the switch was shorter than steps differ from each other: how long
    it takes is then not known, and a 0 in the table would be read as a switch that is free.
    """
    found: dict[tuple[CostKind, str, int], list[float]] = {}
    for item in shown:
        line = item.line
        steps = [
            span.end_s - span.start_s
            for span in line.spans
            if span.kind is Kind.COMPUTE and span.start_s < line.last_step_s
        ]
        key = (_KINDS.get(line.how, CostKind.COLD_START), line.model, line.gpus)
        found.setdefault(key, []).append(line.cost_s(max(steps, default=0.0)))
    costs: list[Cost] = []
    nothing: list[str] = []
    for (kind, model, gpus), seconds in sorted(found.items()):
        middle = statistics.median(seconds)
        if middle > 0:
            costs.append(Cost(kind, middle, model, gpu_type, gpus, "slurm-ext report switch"))
        else:
            nothing.append(
                f"{kind} of {model or 'any model'} on {counted(gpus, 'GPU')} is left out of the"
                f" costs: no longer than a step ({middle:.2f} s without it, median of"
                f" {len(seconds)}), so that it cannot be told from 0"
            )
    return costs, nothing


def table(item: Shown) -> list[str]:
    """Lines of one switch: a heading, a row per stage."""
    line = item.line
    start = min((span.start_s for span in line.spans), default=0.0)
    lines = [
        f"{item.title}, {line.stages} stage{'s' if line.stages > 1 else ''};"
        f" from the old task's last step to the new one's first {line.first_step_s:.2f} s,"
        f" until the old one was durable {line.durable_s:.2f} s"
    ]
    lines.append(
        f"  seconds of each activity between {start:.2f} s and {line.end_s:.2f} s, counted from the"
        " end of the old task's last step"
    )
    shown = [
        kind
        for kind in Kind
        # Only a task of another form has the one, and then nothing of the rest.
        if kind is not Kind.WAIT and (kind is not Kind.START or _any(line.spans, kind))
    ]
    heads = [*(kind.value for kind in shown), "idle", "MB out", "MB in"]
    lines.append("  stage " + " ".join(f"{head:>14}" for head in heads))
    for stage in range(line.stages):
        mine = worked([span for span in line.spans if span.stage == stage])
        cells = [
            f"{busy_s((s for s in mine if s.kind is kind), start, line.end_s):.3f}"
            for kind in shown
        ]
        working = [span for span in mine if span.kind is not Kind.WAIT]
        cells.append(f"{line.end_s - start - busy_s(working, start, line.end_s):.3f}")
        cells += [_megabytes(mine, kind) for kind in (Kind.OUT, Kind.IN)]
        lines.append(f"  {stage:5} " + " ".join(f"{cell:>14}" for cell in cells))
    return lines


def worked(spans: Sequence[Span]) -> list[Span]:
    """One stage's spans, its computing without the waits inside it: a step waits for the new
    task's layers in the middle of its forward."""
    waits = sorted((s for s in spans if s.kind is Kind.WAIT), key=lambda span: span.start_s)
    found: list[Span] = []
    for span in spans:
        if span.kind is not Kind.COMPUTE:
            found.append(span)
            continue
        at = span.start_s
        for wait in waits:
            if wait.start_s > at:
                found.append(replace(span, start_s=at, end_s=min(wait.start_s, span.end_s)))
            at = max(at, wait.end_s)
            if at >= span.end_s:
                break
        if at < span.end_s:
            found.append(replace(span, start_s=at))
    return found


def _any(spans: Sequence[Span], kind: Kind) -> bool:
    return any(span.kind is kind for span in spans)


def _megabytes(spans: Sequence[Span], kind: Kind) -> str:
    moved = sum(span.nbytes for span in spans if span.kind is kind) / _MB
    return f"{moved:.1f}" if moved >= 1 or not moved else f"{moved:.2g}"


def _no_matplotlib(path: Path) -> DataError:
    fix = "pip install matplotlib, or slurm-ext with its extra: pip install '.[plots]'"
    return DataError(str(path), "matplotlib is not installed", fix)


def draw(shown: Sequence[Shown], path: Path) -> None:
    """One panel per switch. Raises DataError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ModuleNotFoundError as exc:
        raise _no_matplotlib(path) from exc
    height = 1.5 + sum(0.6 + 0.5 * s.line.stages for s in shown)
    figure: Any = Figure(figsize=(11, height))
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        len(shown),
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [item.line.stages for item in shown]},
    )
    for item, axes in zip(shown, panels[:, 0], strict=True):
        _panel(axes, item)
    panels[-1, 0].set_xlabel("seconds after the old task's last step")
    used = {span.kind for item in shown for span in item.line.spans}
    figure.legend(
        handles=[
            *(Patch(color=_COLOURS[kind], label=kind.value) for kind in Kind if kind in used),
            *(
                Line2D([], [], color="black", linestyle=style, linewidth=0.8, label=words)
                for style, words in _MOMENTS.items()
            ),
        ],
        loc="upper center",
        ncols=min(5, len(used) + len(_MOMENTS)),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.5 / height))
    figure.savefig(path)


def _panel(axes: Any, item: Shown) -> None:
    # Three lanes a stage: what computes or waits, what moves out and is saved, what moves in.
    lanes = {Kind.OUT: 1, Kind.SAVE: 1, Kind.IN: 2}
    # Waits last: they lie inside what computes.
    for span in sorted(item.line.spans, key=lambda span: span.kind is Kind.WAIT):
        bottom = span.stage + 0.1 + 0.27 * lanes.get(span.kind, 0)
        axes.broken_barh(
            [(span.start_s, span.end_s - span.start_s)],
            (bottom, 0.25),
            color=_COLOURS[span.kind],
            linewidth=0,
        )
    for moment, style in zip((item.line.durable_s, item.line.first_step_s), _MOMENTS, strict=True):
        axes.axvline(moment, color="black", linestyle=style, linewidth=0.8)
    axes.set_ylim(item.line.stages, 0)
    axes.set_yticks([stage + 0.5 for stage in range(item.line.stages)])
    axes.set_yticklabels([f"stage {stage}" for stage in range(item.line.stages)])
    axes.set_title(item.title, loc="left", fontsize=9)

"""A picture of schedules: who held which GPUs when, and how many jobs waited.

One panel per schedule, all with the same time axis, so that two schedules can be compared by eye;
bars are coloured by GPU count, since that is what the planner chooses. matplotlib is imported when
a picture is drawn and used without a display (Agg); everything else here is plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_ext.domain.errors import DataError, SlurmExtError
from slurm_ext.sim.curves import HOURS, NO_MATPLOTLIB
from slurm_ext.sim.engine import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HOUR_S = 3600.0
# Colours that stay apart for colour-blind readers and in print (Okabe and Ito), small jobs first.
_COLOURS = ("#56b4e9", "#0072b2", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#000000")
# More names than this on one axis overlap: then every second, third ... node is named.
_MOST_NAMES = 20
_FORMATS = frozenset({".png", ".svg", ".pdf"})


@dataclass(frozen=True, slots=True)
class Bar:
    """GPUs of one node that one job holds: ``row`` is the first GPU's line, ``height`` how many."""

    job_id: str
    node: str
    row: int
    height: int
    start_s: float
    end_s: float
    gpus: int


def bars(runs: Iterable[Run], nodes: Mapping[str, int]) -> list[Bar]:
    """Bars without overlap; ``nodes`` maps each node to its GPUs, in the order of drawing.

    Raises DataError when a node is unknown or holds more GPUs than it has.
    """
    first: dict[str, int] = {}
    row = 0
    for name, gpus in nodes.items():
        first[name] = row
        row += gpus
    free_at = [0.0] * row
    drawn: list[Bar] = []
    for run in sorted(runs, key=lambda item: (item.start_s, item.job_id)):
        for name, gpus in run.seats.items():
            if name not in first:
                raise DataError(f"job {run.job_id}", f"ran on unknown node {name}", "name its node")
            lines = [
                line
                for line in range(first[name], first[name] + nodes[name])
                if free_at[line] <= run.start_s
            ][:gpus]
            if len(lines) < gpus:
                raise DataError(
                    f"node {name} at {run.start_s:g} s",
                    f"job {run.job_id} wants {gpus} GPUs, {len(lines)} are free",
                    "check the schedule",
                )
            for line in lines:
                free_at[line] = run.end_s
            for start, height in _stretches(lines):
                bar = Bar(run.job_id, name, start, height, run.start_s, run.end_s, run.gpus)
                drawn.append(bar)
    return drawn


def waiting(runs: Iterable[Run]) -> list[tuple[float, int]]:
    """(time, jobs that wait from then on), one step per change."""
    changes: dict[float, int] = {}
    for run in runs:
        since = run.submit_s if run.queued_s is None else run.queued_s
        changes[since] = changes.get(since, 0) + 1
        changes[run.start_s] = changes.get(run.start_s, 0) - 1
    steps: list[tuple[float, int]] = []
    count = 0
    for at in sorted(changes):
        count += changes[at]
        steps.append((at, count))
    return steps


def draw(
    schedules: Mapping[str, Sequence[Run]],
    nodes: Mapping[str, int],
    path: Path,
    title: str = "",
    labels: Mapping[str, str] | None = None,
) -> None:
    """Write the picture; the suffix of ``path`` chooses PNG, SVG or PDF.

    ``labels`` says what a node is called in it, where that is more than its name.
    """
    if path.suffix.lower() not in _FORMATS:
        raise DataError(str(path), f"unknown picture format {path.suffix!r}", "use .png or .svg")
    try:
        import matplotlib
    except ImportError as exc:
        raise SlurmExtError(NO_MATPLOTLIB) from exc
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    ratios = [4.0] * len(schedules) + [1.5]
    figure = Figure(figsize=(12, 2.2 * sum(ratios) / 3), layout="constrained")
    axes = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    counts = sorted({run.gpus for runs in schedules.values() for run in runs})
    colour = {count: _COLOURS[i % len(_COLOURS)] for i, count in enumerate(counts)}
    origin = min((run.submit_s for runs in schedules.values() for run in runs), default=0.0)
    for axis, (name, runs) in zip(axes, schedules.items(), strict=False):
        _panel(axis, name, bars(runs, nodes), nodes, colour, origin, labels or {})
    for name, runs in schedules.items():
        steps = waiting(runs)
        axes[-1].step(
            [(at - origin) / _HOUR_S for at, _ in steps],
            [count for _, count in steps],
            where="post",
            linewidth=1.2,
            label=name,
        )
    axes[-1].set_ylabel("jobs waiting")
    axes[-1].set_xlabel(HOURS)
    axes[-1].set_ylim(bottom=0)
    axes[-1].legend(loc="upper right", fontsize="small")
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(
    axis: Axes,
    name: str,
    drawn: Sequence[Bar],
    nodes: Mapping[str, int],
    colour: Mapping[int, str],
    origin: float,
    labels: Mapping[str, str],
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    boxes = []
    for bar in drawn:
        left, right = (bar.start_s - origin) / _HOUR_S, (bar.end_s - origin) / _HOUR_S
        low, high = bar.row, bar.row + bar.height
        boxes.append([(left, low), (left, high), (right, high), (right, low)])
    faces = [colour[bar.gpus] for bar in drawn]
    axis.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="white", linewidths=0.4))
    total = sum(nodes.values())
    row = 0
    marks: list[float] = []
    names: list[str] = []
    every = -(-len(nodes) // _MOST_NAMES)
    for number, (node, gpus) in enumerate(nodes.items()):
        if number % every == 0:
            marks.append(row + gpus / 2)
            names.append(labels.get(node, node))
        row += gpus
        axis.axhline(row, color="0.8", linewidth=0.5, zorder=0)
    axis.set_yticks(marks, names)
    axis.set_ylim(0, total)
    axis.autoscale(axis="x")
    axis.set_xlim(left=0)
    axis.set_title(name, loc="left", fontsize="medium")
    handles = [
        Patch(color=colour[count], label=f"{count} GPU{'s' if count > 1 else ''}")
        for count in sorted(colour)
    ]
    # Above the panel, so that it covers no bar.
    axis.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 0.995),
        borderaxespad=0.0,
        fontsize="x-small",
        ncols=len(handles) + 1,
        frameon=False,
    )


def _stretches(lines: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring lines joined: (first, how many)."""
    result: list[tuple[int, int]] = []
    for line in lines:
        if result and line == sum(result[-1]):
            result[-1] = (result[-1][0], result[-1][1] + 1)
        else:
            result.append((line, 1))
    return result

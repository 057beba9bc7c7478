"""Curves of replays: how JCTs are spread, and how many GPUs are in use over time.

The arithmetic is plain; matplotlib is imported when a picture is drawn and used without a display.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.sim.metrics import outcomes_of
from slurm_ext.sim.model import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NO_MATPLOTLIB = (
    "pictures need matplotlib; install it with pip install '.[plots]' where slurm-ext was"
    " installed from, or pip install matplotlib"
)
HOURS = "hours since the first submission"
_HOUR_S = 3600.0
# So many intervals are averaged over in a curve of the use.
_INTERVALS = 120
# More points than a picture has columns only make it large.
_MOST_POINTS = 4000


def distribution(values: Iterable[float]) -> list[tuple[float, float]]:
    """(value, share of values up to it), ascending, one point per distinct value."""
    ascending = sorted(values)
    points: dict[float, float] = {}
    for rank, value in enumerate(ascending, 1):
        points[value] = rank / len(ascending)
    return list(points.items())


def in_use(runs: Iterable[Run]) -> list[tuple[float, int]]:
    """(time, GPUs held from then on), one step per change."""
    changes: dict[float, int] = {}
    for run in runs:
        changes[run.start_s] = changes.get(run.start_s, 0) + run.gpus
        changes[run.end_s] = changes.get(run.end_s, 0) - run.gpus
    steps: list[tuple[float, int]] = []
    held = 0
    for at in sorted(changes):
        held += changes[at]
        if not steps or steps[-1][1] != held:
            steps.append((at, held))
    return steps


def share_in_use(
    steps: Sequence[tuple[float, int]], gpus: int, width_s: float
) -> list[tuple[float, float]]:
    """(middle of an interval, share of GPU time in use within it), for a readable curve."""
    if not steps:
        return []
    begin, end = steps[0][0], steps[-1][0]
    count = max(1, math.ceil((end - begin) / width_s))
    width = (end - begin) / count or 1.0
    total = [0.0]
    for (at, held), (until, _) in pairwise(steps):
        total.append(total[-1] + held * (until - at))

    def used_until(at: float) -> float:
        index = max(0, bisect.bisect_right(steps, at, key=lambda step: step[0]) - 1)
        return total[index] + steps[index][1] * (at - steps[index][0])

    edges = [used_until(begin + index * width) for index in range(count)] + [total[-1]]
    return [
        (begin + (index + 0.5) * width, (after - before) / (gpus * width))
        for index, (before, after) in enumerate(pairwise(edges))
    ]


def use_over_time(runs: Iterable[Run], gpus: int) -> list[tuple[float, float]]:
    """(time, share of GPU time in use) of a whole schedule, down to nothing at its end."""
    steps = in_use(runs)
    if not steps:
        return []
    begin, end = steps[0][0], steps[-1][0]
    return [*share_in_use(steps, gpus, max(1.0, (end - begin) / _INTERVALS)), (end, 0.0)]


def draw_jct(schedules: Mapping[str, Sequence[Run]], path: Path, title: str = "") -> None:
    """Share of jobs that are done within a time, one curve per policy."""
    figure, axis = _figure(title)
    for name, runs in schedules.items():
        points = _thin(distribution(item.jct_s / _HOUR_S for item in outcomes_of(runs)))
        times, shares = [x for x, _ in points], [y for _, y in points]
        axis.step([*times[:1], *times], [0.0, *shares], where="post", label=name)
    axis.set_xscale("log")
    _plain_hours(axis)
    axis.set_xlabel("job completion time (hours)")
    axis.set_ylabel("share of jobs")
    axis.set_ylim(0, 1)
    _finish(figure, axis, path)


def draw_utilisation(
    schedules: Mapping[str, Sequence[Run]], gpus: int, path: Path, title: str = ""
) -> None:
    """Share of the GPUs in use over time, one curve per policy, down to nothing at its end."""
    figure, axis = _figure(title)
    origin = min((run.submit_s for runs in schedules.values() for run in runs), default=0.0)
    for name, runs in schedules.items():
        points = use_over_time(runs, gpus)
        axis.plot([(x - origin) / _HOUR_S for x, _ in points], [y for _, y in points], label=name)
    axis.set_xlabel(HOURS)
    axis.set_ylabel("share of GPUs in use")
    axis.set_ylim(0, 1.02)
    _finish(figure, axis, path)


def _thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    step = -(-len(points) // _MOST_POINTS)
    return points if step <= 1 else [*points[::step], points[-1]]


def _plain_hours(axis: Axes) -> None:
    """0.1, 0.2, 0.5, 1 ... hours instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _figure(title: str) -> tuple[Figure, Axes]:
    try:
        import matplotlib
    except ImportError as exc:
        raise SlurmExtError(NO_MATPLOTLIB) from exc
    matplotlib.use("Agg")
    from matplotlib import figure as drawing

    figure = drawing.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize="medium")
    return figure, axes


def _finish(figure: Figure, axis: Axes, path: Path) -> None:
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)

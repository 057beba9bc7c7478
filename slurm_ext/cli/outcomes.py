"""What ``slurm-ext simulate`` prints and writes: the table of policies, and the JSON document.

No file is opened here. Times in the table are hours, in the JSON document seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from slurm_ext.cli.tabular import Column, parse_format, render
from slurm_ext.sim.model import Schedule
from slurm_ext.sim.setting import Setting
from slurm_ext.sim.summary import Summary, job_rows

FORMAT = "%16P %.8a %.8m %.8q %.8n %.8w %.8W %.9M %.6u %.8g %.9S %.6s %.6b %.6h %.9L"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy and its numbers."""

    name: str
    found: Summary


def _hours(pick: Callable[[Summary], float]) -> Callable[[Row], str]:
    return lambda row: f"{pick(row.found) / 3600:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


LETTERS: dict[str, Column[Row]] = {
    "P": Column("POLICY", lambda r: r.name, "policy"),
    "a": Column("AVG_JCT", _hours(lambda s: s.avg_jct_s), "average job completion time, hours"),
    "m": Column("MEDIAN", _hours(lambda s: s.median_jct_s), "median of it, hours"),
    "q": Column("P95", _hours(lambda s: s.p95_jct_s), "95th percentile, hours"),
    "n": Column("P99", _hours(lambda s: s.p99_jct_s), "99th percentile, hours"),
    "w": Column("AVG_WAIT", _hours(lambda s: s.avg_wait_s), "average time without GPUs, hours"),
    "W": Column("P99_WAIT", _hours(lambda s: s.p99_wait_s), "99th percentile of it, hours"),
    "M": Column("MAKESPAN", _hours(lambda s: s.makespan_s), "first submission to last end, hours"),
    "u": Column(
        "UTIL",
        lambda r: _percent(r.found.gpu_utilisation),
        "GPU hours held over GPUs x MAKESPAN; lower with fewer GPUH, it is a gain",
    ),
    "g": Column(
        "GPUH",
        lambda r: f"{r.found.gpu_s_held / 3600:.1f}",
        "GPU hours held: the same jobs done on fewer leave room for others",
    ),
    "S": Column(
        "SLOWDOWN", lambda r: f"{r.found.worst_slowdown:.1f}", "worst JCT over run without queue"
    ),
    "s": Column("STARTS", lambda r: f"{r.found.starts_per_job:.2f}", "starts per job"),
    "b": Column(
        "BETTER",
        lambda r: _percent(r.found.share_better_than_srtf),
        "jobs at least 10 percent faster than under srtf; - where --policy lacks srtf",
    ),
    "h": Column(
        "WORSE",
        lambda r: _percent(r.found.share_worse_than_srtf),
        "jobs at least 10 percent slower than under srtf; - where --policy lacks srtf",
    ),
    "L": Column(
        "LOST_GPUH",
        lambda r: f"{r.found.gpu_s_lost / 3600:.1f}",
        "GPU hours of starts, switches and lost steps",
    ),
    "Q": Column("QUEUE", lambda r: _percent(r.found.queue_share_of_jct), "waits over JCTs"),
    "j": Column("JOBS", lambda r: str(r.found.jobs), "jobs"),
    "d": Column("DECIDED", lambda r: str(r.found.decisions), "times the policy was asked"),
}


def table(rows: Iterable[Row], columns: str, setting: Setting, *, heading: bool) -> Iterator[str]:
    """Lines of the table; ``heading`` says of what it is."""
    if heading:
        yield from setting.heading()
    yield from render(rows, parse_format(columns, LETTERS), LETTERS, heading)


def as_document(
    rows: Iterable[Row],
    schedules: Mapping[str, Schedule],
    setting: Setting,
    gpu_types: Mapping[str, str],
) -> dict[str, object]:
    """What ``--json`` writes; ``gpu_types`` names the GPU type of each node."""
    return {
        "setting": setting.as_dict(),
        "policies": {row.name: row.found.as_dict() for row in rows},
        "jobs": {name: job_rows(schedule.runs, gpu_types) for name, schedule in schedules.items()},
    }

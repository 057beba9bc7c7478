"""Our policies beside the published results of the eight titan_fm workloads (32 V100).

    python -m tests.bench.titan_fm [--workload NAME ...] [--json FILE]

Three tables. First the author's policies under the author's rules and intervals, beside what was
published: is the ground the same? Then ours, which decide when something happens, beside the
author's Titan without merging: what must hold is checked, and a miss ends with exit code 1. At
last all policies at one interval and under one event rule, with one job list each for rigid and for
elastic policies: how much of a gain is deciding sooner, how much elastic counts, how much starting
running jobs anew.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.sim.engine import replay, seats_overlap
from slurm_ext.sim.metrics import outcomes_of
from slurm_ext.sim.model import Schedule
from slurm_ext.sim.summary import Summary, summarise
from tests.bench.titan_fm_data import (
    HARDWARE,
    WORKLOADS,
    Case,
    Published,
    lower_bound_s,
    ours,
    p99_s,
    published,
    reproduced,
)

HOUR = 3600.0
HURT = 1.1
# What must hold, ours over the published Titan without merging.
MOST_AVG, MOST_AVG_GEO, MOST_MAKESPAN, MOST_P99 = 0.97, 0.90, 1.02, 1.0
STRETCH_AVG_GEO = 0.80
# The author's SRTF and Tiresias, ours over published.
SRTF_WITHIN, TIRESIAS_WITHIN = 0.03, 0.10
INTERVALS_S = (0.0, 120.0, 300.0)
FORMULATION = "titan-published"


@dataclass(frozen=True, slots=True)
class Row:
    """One replay, and the published row that it stands beside, if any."""

    workload: str
    table: str
    name: str
    interval_s: float
    found: Summary
    p99_s: float
    theirs: Published | None
    worse_than_srtf: float
    over_srtf: float
    took_s: float

    @property
    def avg(self) -> float:
        """Average JCT, ours over theirs."""
        return self.found.avg_jct_s / HOUR / self.theirs.avg_jct_h if self.theirs else math.nan

    @property
    def p99(self) -> float:
        """p99 of the JCTs, ours over theirs."""
        return self.p99_s / HOUR / self.theirs.p99_jct_h if self.theirs else math.nan

    @property
    def makespan(self) -> float:
        """Makespan, ours over theirs."""
        return self.found.makespan_s / HOUR / self.theirs.makespan_h if self.theirs else math.nan


def run(workload: str, table: str, case: Case, interval_s: float, srtf: Schedule | None) -> Row:
    """Replay one case; ``srtf`` is what "worse" and the ratio are taken against (None: itself)."""
    begun = time.perf_counter()
    schedule = replay(case.jobs, HARDWARE, case.policy, interval_s=interval_s)
    took = time.perf_counter() - begun
    if problem := seats_overlap(schedule.runs, HARDWARE):
        raise SystemExit(f"{workload} {case.name}: {problem}")
    base = {o.job_id: o.jct_s for o in outcomes_of((srtf or schedule).runs)}
    mine = outcomes_of(schedule.runs)
    return Row(
        workload=workload,
        table=table,
        name=case.name,
        interval_s=interval_s,
        found=summarise(schedule),
        p99_s=p99_s(schedule.runs),
        theirs=published().get((case.theirs, workload)),
        worse_than_srtf=sum(o.jct_s > HURT * base[o.job_id] for o in mine) / len(mine),
        over_srtf=math.fsum(o.jct_s for o in mine) / math.fsum(base.values()),
        took_s=took,
    )


def compare(workload: str) -> list[Row]:
    """All three tables of one workload."""
    authors, mine = reproduced(workload), ours(workload)
    srtf = authors[0]

    def schedule_of(interval_s: float) -> Schedule:
        return replay(srtf.jobs, HARDWARE, srtf.policy, interval_s=interval_s)

    base = schedule_of(srtf.interval_s)
    rows = [run(workload, "published", case, case.interval_s, base) for case in [*authors, *mine]]
    for interval_s in INTERVALS_S:
        base = schedule_of(interval_s)
        rows += [
            run(workload, "one interval", case, interval_s, base) for case in [*authors, *mine]
        ]
    return rows


def geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def misses(rows: Sequence[Row]) -> list[str]:
    """What must hold and does not."""
    found = []
    published_rows = [row for row in rows if row.table == "published"]
    for row in published_rows:
        where = f"{row.name} on {row.workload}"
        within = {"srtf": SRTF_WITHIN, "tiresias": TIRESIAS_WITHIN}.get(row.name)
        if within is not None and max(abs(row.avg - 1), abs(row.makespan - 1)) > within:
            found.append(f"{where} is off: average x {row.avg:.3f}, makespan x {row.makespan:.3f}")
        if row.name != "titan-grow":
            continue
        for what, value, most in (
            ("average JCT", row.avg, MOST_AVG),
            ("p99", row.p99, MOST_P99),
            ("makespan", row.makespan, MOST_MAKESPAN),
        ):
            if value > most:
                found.append(f"{where}: {what} is {value:.3f} of the published, above {most:g}")
    mean = geometric(row.avg for row in published_rows if row.name == "titan-grow")
    if mean > MOST_AVG_GEO:
        found.append(
            f"titan-grow: average JCT is {mean:.3f} of the published, above {MOST_AVG_GEO:g}"
        )
    return found


def show(rows: Sequence[Row], workloads: Sequence[str]) -> None:
    print("Published intervals; ours decide when something happens. Hours, and ours / published.")
    print(
        f"{'workload':20}{'policy':17}{'every s':>8}{'avg':>8}{'publ.':>8}{'ratio':>7}{'p99':>8}"
        f"{'publ.':>8}{'ratio':>7}{'makespan':>9}{'ratio':>7}{'starts':>7}{'worst':>7}{'hurt':>7}"
        f"{'/srtf':>7}"
    )
    for workload in workloads:
        for row in rows:
            if row.workload == workload and row.table == "published":
                print(_line(row))
        bound = lower_bound_s(workload)
        print(f"{workload:20}{'lower bound':25}{bound / HOUR:8.3f}")
    print("starts: per job; worst: slowdown; hurt: share of jobs above 1.1 times the author's SRTF")
    _means(rows)
    print()
    print("All at one interval (0: when something happens): average JCT over SRTF's at the same,")
    print("geometric mean over the workloads.")
    names = list(dict.fromkeys(row.name for row in rows))
    print(f"{'policy':17}" + "".join(f"{f'every {step:g} s':>14}" for step in INTERVALS_S))
    print(f"{'srtf over 300 s':17}" + "".join(f"{_sooner(rows, s):14.3f}" for s in INTERVALS_S))
    for name in names:
        cells = (
            geometric(
                row.over_srtf
                for row in rows
                if row.table == "one interval" and row.name == name and row.interval_s == step
            )
            for step in INTERVALS_S
        )
        print(f"{name:17}" + "".join(f"{cell:14.3f}" for cell in cells))


def _sooner(rows: Sequence[Row], interval_s: float) -> float:
    """What deciding sooner alone is worth: SRTF at an interval over itself at the published one."""
    at: dict[tuple[str, float], float] = {
        (row.workload, row.interval_s): row.found.avg_jct_s
        for row in rows
        if row.table == "one interval" and row.name == "srtf"
    }
    names = {workload for workload, _ in at}
    return geometric(at[name, interval_s] / at[name, INTERVALS_S[-1]] for name in sorted(names))


def _line(row: Row) -> str:
    theirs = row.theirs
    avg, p99 = row.found.avg_jct_s / HOUR, row.p99_s / HOUR
    return (
        f"{row.workload:20}{row.name:17}{row.interval_s:8g}"
        f"{avg:8.3f}{_or_dash(theirs and theirs.avg_jct_h, 8)}{_or_dash(theirs and row.avg, 7)}"
        f"{p99:8.3f}{_or_dash(theirs and theirs.p99_jct_h, 8)}{_or_dash(theirs and row.p99, 7)}"
        f"{row.found.makespan_s / HOUR:9.3f}{_or_dash(theirs and row.makespan, 7)}"
        f"{row.found.starts_per_job:7.2f}{row.found.worst_slowdown:7.1f}"
        f"{row.worse_than_srtf:7.1%}{row.over_srtf:7.3f}"
    )


def _or_dash(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.3f}"


def _means(rows: Sequence[Row]) -> None:
    print()
    print("Over the published Titan without merging: geometric mean and largest of the ratios")
    print(f"{'policy':17}{'avg':>8}{'largest':>9}{'p99':>8}{'largest':>9}{'makespan':>10}")
    for name in (FORMULATION, "titan-rigid", "titan", "titan-grow"):
        mine = [row for row in rows if row.table == "published" and row.name == name]
        avg, p99 = [row.avg for row in mine], [row.p99 for row in mine]
        print(
            f"{name:17}{geometric(avg):8.3f}{max(avg):9.3f}{geometric(p99):8.3f}{max(p99):9.3f}"
            f"{max(row.makespan for row in mine):10.3f}"
        )
    bounds = [
        lower_bound_s(row.workload) / HOUR / row.theirs.avg_jct_h
        for row in rows
        if row.table == "published" and row.name == "titan-grow" and row.theirs
    ]
    print(f"{'lower bound':17}{geometric(bounds):8.3f}{max(bounds):9.3f}")
    mean = geometric(r.avg for r in rows if r.table == "published" and r.name == "titan-grow")
    reached = "reached" if mean <= STRETCH_AVG_GEO else "not reached"
    print(f"stretch goal {STRETCH_AVG_GEO:.2f} of the average: {reached}")


def _as_json(row: Row) -> dict[str, object]:
    theirs = row.theirs
    return {
        "workload": row.workload,
        "table": row.table,
        "policy": row.name,
        "interval_s": row.interval_s,
        "published_avg_jct_h": theirs.avg_jct_h if theirs else None,
        "published_p99_jct_h": theirs.p99_jct_h if theirs else None,
        "published_makespan_h": theirs.makespan_h if theirs else None,
        "p99_lower_rank_s": row.p99_s,
        "avg_jct_over_srtf": row.over_srtf,
        "share_hurt_10pct": row.worse_than_srtf,
        "lower_bound_avg_jct_s": lower_bound_s(row.workload),
        "replay_took_s": row.took_s,
        **row.found.as_dict(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [row for workload in args.workload for row in compare(workload)]
    show(rows, args.workload)
    if args.json:
        args.json.write_text(json.dumps([_as_json(r) for r in rows], indent=1) + "\n", "utf-8")
    missed = misses(rows)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""How much worse titan gets with wrong estimates and with dearer checkpoints.

    python -m tests.bench.sensitivity [--workload NAME ...] [--seeds N] [--json FILE]

Two series on the titan_fm workloads, 8 x 4 GPUs, beside the rows that the author published for them
(FM-1 workloads). Estimate error of 0 to 100 %: an estimate lies between 1/(1+e) and 1+e of the
truth, log-uniform, drawn for each job, mean over several draws. Checkpoint of 0 to 90 s, paid at
every start. The author's rows were made with merging, ours without, so what is compared is not the
hours but how they grow: each row over the one at 0 % and over the one at the published 30 s.

SRTF is shown beside ours: its order depends on estimates, its counts do not. Exit code 1 where ours
grows more than the author's does at the worst error, or is no better than SRTF with the same error.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from slurm_ext.domain.policy import Policy
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.sim.build import Terms, build
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.library import THROUGHPUT, find_workload, starter_truth
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import read_trace
from slurm_ext.sim.truth import CHECKPOINT_S, Curve, Truth, read_curves
from tests.bench.titan_fm_data import REFERENCE

HARDWARE = Hardware(nodes=8, gpus_per_node=4)
PUBLISHED_FOR = ("FM-1-vit-large", "FM-1-vit", "FM-1-roberta-base")
ERRORS_PCT = (0, 5, 10, 20, 40, 60, 80, 100)
CHECKPOINTS_S = (0, 15, 30, 45, 60, 75, 90)
HOUR = 3600.0
POLICIES: Mapping[str, Policy] = {
    "titan-grow": TitanPolicy(GROWING),
    "titan": TitanPolicy(),
    "srtf": SrtfPolicy(),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One step of a series: average JCT in hours by policy, and the author's titan."""

    workload: str
    series: str
    step: int
    avg_jct_h: Mapping[str, float]
    starts: float
    theirs_h: float | None


@cache
def published() -> Mapping[tuple[str, str, int], float]:
    """(series, workload, step) -> average JCT (h) of the author's titan, merging included."""
    found = {}
    with REFERENCE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, _, value = row["setting"].partition("=")
            if row["experiment"] == "error" and name == "estimation_error":
                found["error", row["workload"], int(value.rstrip("%"))] = float(row["avg_jct_h"])
            elif row["experiment"] == "ckpt" and name == "ckpt_overhead_s":
                found["checkpoint", row["workload"], int(value)] = float(row["avg_jct_h"])
    return found


@cache
def _switch_s() -> Mapping[str, float]:
    return starter_truth().switch_s


def one(
    workload: str, policy: Policy, error: float, checkpoint_s: float, seed: int
) -> tuple[float, float]:
    """Average JCT (h) and starts per job of one replay."""
    truth = Truth(_curves(), _switch_s(), checkpoint_s)
    costs = Costs(
        checkpoint_s=checkpoint_s,
        cold_switch_s={(model, ""): seconds for model, seconds in _switch_s().items()},
    )
    rows = read_trace(find_workload(workload)).jobs
    built = build(rows, HARDWARE, {"": truth}, costs, Terms(estimate_error=error, seed=seed))
    if built.left_out:
        raise SystemExit(f"{workload}: {built.left_out[0]}")
    found = summarise(replay(built.jobs, HARDWARE, policy, costs))
    return found.avg_jct_s / HOUR, found.starts_per_job


@cache
def _curves() -> Mapping[tuple[str, tuple[int, ...]], Curve]:
    return read_curves(THROUGHPUT, "V100")


def rows_of(workload: str, seeds: Sequence[int]) -> list[Row]:
    """Both series of a workload."""
    found = []
    steps = [("error", pct, pct / 100, CHECKPOINT_S) for pct in ERRORS_PCT]
    steps += [("checkpoint", seconds, 0.0, float(seconds)) for seconds in CHECKPOINTS_S]
    for series, step, error, checkpoint_s in steps:
        draws = seeds if error else seeds[:1]
        each = {
            name: [one(workload, policy, error, checkpoint_s, seed) for seed in draws]
            for name, policy in POLICIES.items()
        }
        found.append(
            Row(
                workload=workload,
                series=series,
                step=step,
                avg_jct_h={name: fmean(jct for jct, _ in pairs) for name, pairs in each.items()},
                starts=fmean(starts for _, starts in each["titan-grow"]),
                theirs_h=published().get((series, workload, step)),
            )
        )
    return found


def over(rows: Sequence[Row], row: Row) -> tuple[dict[str, float], float | None]:
    """Ours and theirs over the row that the series is measured from."""
    first = {"error": 0, "checkpoint": int(CHECKPOINT_S)}[row.series]
    base = next(
        r for r in rows if r.workload == row.workload and r.series == row.series and r.step == first
    )
    ours = {name: value / base.avg_jct_h[name] for name, value in row.avg_jct_h.items()}
    if row.theirs_h is None or base.theirs_h is None:
        return ours, None
    return ours, row.theirs_h / base.theirs_h


def misses(rows: Sequence[Row]) -> list[str]:
    """What must hold and does not."""
    found = []
    for row in rows:
        where = f"{row.workload}, {row.series} {row.step}"
        if row.avg_jct_h["titan-grow"] >= row.avg_jct_h["srtf"]:
            found.append(f"{where}: titan-grow is no better than srtf with the same estimates")
        if row.series == "error" and row.step == ERRORS_PCT[-1]:
            ours, theirs = over(rows, row)
            if theirs is not None and ours["titan-grow"] > theirs:
                found.append(
                    f"{where}: average JCT grows by the factor {ours['titan-grow']:.2f}, the "
                    f"author's by {theirs:.2f}"
                )
    return found


def show(rows: Sequence[Row]) -> None:
    print("Average JCT in hours, and over the first (checkpoint: over the one at 30 s)")
    print(
        f"{'workload':20}{'':12}{'':>5}"
        + "".join(f"{name:>12}{'':7}" for name in POLICIES)
        + f"{'starts':>7}{'author':>9}{'':7}"
    )
    for row in rows:
        ours, theirs = over(rows, row)
        cells = "".join(f"{row.avg_jct_h[name]:12.3f}{ours[name]:7.2f}" for name in POLICIES)
        known = row.theirs_h is not None and theirs is not None
        author = f"{row.theirs_h:9.3f}{theirs:7.2f}" if known else ""
        unit = "%" if row.series == "error" else "s"
        print(
            f"{row.workload:20}{row.series:12}{row.step:4}{unit}{cells}{row.starts:7.2f}{author}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=list(PUBLISHED_FOR), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="draws of the error (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = [row for name in args.workload for row in rows_of(name, range(args.seeds))]
    show(rows)
    if args.json:
        plain = [
            {
                "workload": row.workload,
                "series": row.series,
                "step": row.step,
                "avg_jct_h": dict(row.avg_jct_h),
                "starts_per_job": row.starts,
                "published_avg_jct_h": row.theirs_h,
            }
            for row in rows
        ]
        args.json.write_text(json.dumps(plain, indent=1) + "\n", "utf-8")
    missed = misses(rows)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

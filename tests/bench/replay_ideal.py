"""Ideal event-driven replays of the fine-tuning workloads: no Slurm, no delay, no hidden error.

    python -m tests.bench.replay_ideal [--workload NAME ...] [--json FILE]

Each policy on each workload at 8 nodes x 4 GPUs. ``knapsack`` is the policy `titan` with its
objective reduced to progress per second (1/R): the rule of which average JCTs are known from an
independent implementation that gives out any free GPUs. They are printed beside ours, and a
deviation above 0.002 h fails the run. ``titan`` is the same policy as the daemon runs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.policy import Policy
from slurm_ext.optimize.objective import Weights
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from slurm_ext.sim.engine import Hardware, Schedule, replay, seats_overlap
from slurm_ext.sim.jobs import Rules, build_jobs
from slurm_ext.sim.library import find_workload, starter_truth
from slurm_ext.sim.metrics import Metrics, measure, outcomes_of, ratios
from slurm_ext.sim.workload import read_workload

WORKLOADS = ("FM-1-vit-large", "FM-1.5-vit-large", "FM-2-vit")
# (workload, policy, pooled) -> average JCT in hours, known from an independent implementation.
KNOWN_H = {
    ("FM-1-vit-large", "easy", True): 0.727,
    ("FM-1-vit-large", "knapsack", True): 0.375,
    ("FM-1.5-vit-large", "knapsack", True): 0.620,
    ("FM-2-vit", "easy", True): 3.165,
    ("FM-2-vit", "knapsack", True): 0.799,
}
TOLERANCE_H = 0.002


@dataclass(frozen=True, slots=True)
class Result:
    """One replay."""

    workload: str
    policy: str
    pooled: bool
    metrics: Metrics
    seconds: float
    known_h: float | None

    @property
    def deviates(self) -> bool:
        return (
            self.known_h is not None
            and abs(self.metrics.avg_jct_s / 3600 - self.known_h) > TOLERANCE_H
        )


def policies() -> dict[str, Policy]:
    """Name in the table -> policy."""
    progress_only = Weights(start=0, waiting=0, deadline=0, lease=0, switch=0)
    return {
        "easy": Backfill(),
        "fifo": Backfill(reserve=False),
        "srtf": SrtfPolicy(),
        "knapsack": TitanPolicy(TitanConfig(weights=progress_only, margin=0.0)),
        "titan": TitanPolicy(),
    }


def run(workloads: Sequence[str]) -> list[Result]:
    truth = starter_truth()
    results = []
    for name in workloads:
        workload = read_workload(find_workload(name))
        for pooled in (True, False):
            hardware = Hardware(pooled=pooled)
            jobs = build_jobs(workload, truth, hardware, Rules())
            base: Schedule | None = None
            for label, policy in policies().items():
                begun = time.perf_counter()
                schedule = replay(jobs, hardware, policy)
                seconds = time.perf_counter() - begun
                if problem := seats_overlap(schedule.runs, hardware):
                    raise SystemExit(f"{name} {label}: {problem}")
                base = base or schedule
                results.append(
                    Result(
                        name,
                        label,
                        pooled,
                        measure(outcomes_of(schedule.runs), hardware.gpus, outcomes_of(base.runs)),
                        seconds,
                        KNOWN_H.get((name, label, pooled)),
                    )
                )
    return results


def show(results: Sequence[Result]) -> None:
    print(
        f"{'workload':18}{'GPUs':14}{'policy':10}{'avg JCT h':>10}{'known':>8}{'p99 h':>8}"
        f"{'makespan':>9}{'hurt':>7}{'util':>7}{'easy/x':>8}{'took s':>8}"
    )
    base: Metrics | None = None
    for result in results:
        found = result.metrics
        if result.policy == "easy":
            base = found
        ratio = ratios(base, found)["avg_jct_s"] if base else None
        known = "" if result.known_h is None else f"{result.known_h:.3f}"
        mark = "  DEVIATES" if result.deviates else ""
        print(
            f"{result.workload:18}{'any free' if result.pooled else 'fewest nodes':14}"
            f"{result.policy:10}{found.avg_jct_s / 3600:10.4f}{known:>8}"
            f"{found.p99_jct_s / 3600:8.3f}{found.makespan_s / 3600:9.3f}"
            f"{found.share_hurt_10pct:7.1%}{found.gpu_utilisation:7.1%}{ratio or 0:8.2f}"
            f"{result.seconds:8.2f}{mark}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    results = run(args.workload)
    show(results)
    if args.json:
        rows = [
            {
                "workload": r.workload,
                "policy": r.policy,
                "pooled": r.pooled,
                "known_avg_jct_h": r.known_h,
                "replay_took_s": r.seconds,
                **r.metrics.as_dict(),
            }
            for r in results
        ]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result.deviates for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

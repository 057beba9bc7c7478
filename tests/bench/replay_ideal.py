"""Ideal event-driven replays of the fine-tuning workloads: no Slurm, no delay, no hidden error.

    python -m tests.bench.replay_ideal [--workload NAME ...] [--json FILE]
    python -m tests.bench.replay_ideal --ablation [NAME ...] [--json FILE]

Each policy on each workload at 8 nodes x 4 GPUs. ``knapsack`` is the policy `titan` with its
objective reduced to progress per second (1/R), declining no start: the rule of which average JCTs
are known from an independent implementation that gives out any free GPUs. They are printed beside
ours, and a deviation above 0.002 h fails the run. ``titan`` is the policy as the daemon runs it.

``--ablation`` varies what docs/policy.md and `slurm_ext.optimize.objective` give reasons for, one
thing at a time around the daemon's own settings: the weight of starting at all, the efficiency
floor, the patience of the waiting term. Each is replayed without a hidden error and with four draws
of it, on the fewest nodes. It fails where a setting that we ship is beaten by another one in all of
the table's workloads together.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ext.control.config import Config
from slurm_ext.domain.policy import Policy
from slurm_ext.optimize.objective import Weights
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from slurm_ext.sim.engine import Hardware, Schedule, replay, seats_overlap
from slurm_ext.sim.jobs import Rules, build_jobs
from slurm_ext.sim.library import find_workload, starter_truth, workload_names
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
        "knapsack": TitanPolicy(TitanConfig(weights=progress_only, margin=0.0, hold_out=None)),
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


# -- ablation ------------------------------------------------------------------------------------

# None is a replay without a hidden error; the others are draws of it.
SEEDS = (None, 1, 2, 3, 4)
FLOOR = float(Config.model_fields["efficiency_floor"].default)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run ``titan``; ``shipped`` is the daemon's own."""

    label: str
    weights: Weights
    floor: float = FLOOR
    shipped: bool = False


@dataclass(frozen=True, slots=True)
class Ablated:
    """One setting on one workload, in hours: without a hidden error, and the mean of all draws."""

    group: str
    setting: Setting
    workload: str
    exact: tuple[float, float]
    mean: tuple[float, float]


def settings() -> dict[str, tuple[Setting, ...]]:
    """Group -> settings, the shipped one first."""
    ours = Weights()
    hour = ours.patience_s / 3600
    return {
        "start": (
            Setting(f"weight {ours.start:g}", ours, shipped=True),
            *(Setting(f"weight {w:g}", replace(ours, start=w)) for w in (0.13, 0.25)),
        ),
        "floor": (
            Setting(f"floor {FLOOR:g}", ours, shipped=True),
            *(Setting(f"floor {floor:g}", ours, floor) for floor in (0.0, 0.6)),
        ),
        "patience": (
            Setting(f"{hour:g} h", ours, shipped=True),
            Setting("1 h", replace(ours, patience_s=3600.0)),
            Setting("no waiting", replace(ours, waiting=0.0)),
        ),
    }


def ablate(groups: Sequence[str], workloads: Sequence[str]) -> list[Ablated]:
    """Every setting of the groups on every workload. The shipped one is replayed once."""
    truth, hardware = starter_truth(), Hardware()
    known: dict[tuple[str, Weights, float], list[tuple[float, float]]] = {}
    found = []
    for name in workloads:
        workload = read_workload(find_workload(name))
        for group in groups:
            for setting in settings()[group]:
                key = (name, setting.weights, setting.floor)
                if key not in known:
                    known[key] = []
                    for seed in SEEDS:
                        rules = Rules(seed=seed, efficiency_floor=setting.floor)
                        jobs = build_jobs(workload, truth, hardware, rules)
                        policy = TitanPolicy(TitanConfig(weights=setting.weights))
                        runs = outcomes_of(replay(jobs, hardware, policy).runs)
                        metrics = measure(runs, hardware.gpus, runs)
                        known[key].append((metrics.avg_jct_s / 3600, metrics.p99_jct_s / 3600))
                draws = known[key]
                mean = tuple(sum(column) / len(draws) for column in zip(*draws, strict=True))
                found.append(Ablated(group, setting, name, draws[0], (mean[0], mean[1])))
    return found


def geometric(found: Sequence[Ablated], setting: Setting, base: Setting, column: int) -> float:
    """Mean ratio to ``base`` over the workloads, of the mean of all draws."""
    values = {(a.setting, a.workload): a.mean[column] for a in found}
    logs = [
        math.log(values[setting, name] / values[base, name]) for name in {a.workload for a in found}
    ]
    return math.exp(math.fsum(logs) / len(logs))


def show_ablation(found: Sequence[Ablated]) -> bool:
    """One table per group; whether a setting that we do not ship has the shorter average JCT."""
    beaten = False
    for group, choices in settings().items():
        rows = [a for a in found if a.group == group]
        if not rows:
            continue
        print(f"\n{group}: hours; exact = no hidden error, mean = that and draws 1 to 4")
        print(
            f"{'workload':20}{'setting':14}{'avg exact':>10}{'avg mean':>10}"
            f"{'p99 exact':>11}{'p99 mean':>10}{'avg/ours':>10}{'p99/ours':>10}"
        )
        own = {a.workload: a for a in rows if a.setting.shipped}
        for row in rows:
            base = own[row.workload]
            mark = "  ours" if row.setting.shipped else ""
            print(
                f"{row.workload:20}{row.setting.label:14}{row.exact[0]:10.3f}{row.mean[0]:10.3f}"
                f"{row.exact[1]:11.3f}{row.mean[1]:10.3f}{row.mean[0] / base.mean[0]:10.3f}"
                f"{row.mean[1] / base.mean[1]:10.3f}{mark}"
            )
        for setting in choices[1:]:
            average, tail = (geometric(rows, setting, choices[0], column) for column in (0, 1))
            print(f"{'geometric mean':20}{setting.label:14}{'':41}{average:10.3f}{tail:10.3f}")
            # The waiting term is there for the tail, and may cost some average.
            beaten |= group != "patience" and average < 1
    return beaten


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", metavar="NAME")
    parser.add_argument(
        "--ablation",
        nargs="*",
        choices=sorted(settings()),
        metavar="NAME",
        help=f"vary {', '.join(settings())} (all by default) instead, on every workload",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.ablation is not None:
        found = ablate(args.ablation or tuple(settings()), args.workload or workload_names())
        beaten = show_ablation(found)
        if args.json:
            _write(args.json, [_row(a) for a in found])
        return 1 if beaten else 0
    results = run(args.workload or WORKLOADS)
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
        _write(args.json, rows)
    return 1 if any(result.deviates for result in results) else 0


def _row(found: Ablated) -> dict[str, object]:
    return {
        "group": found.group,
        "setting": found.setting.label,
        "shipped": found.setting.shipped,
        "workload": found.workload,
        "seeds": list(SEEDS),
        "avg_jct_h": {"exact": found.exact[0], "mean": found.mean[0]},
        "p99_jct_h": {"exact": found.exact[1], "mean": found.mean[1]},
    }


def _write(path: Path, rows: object) -> None:
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

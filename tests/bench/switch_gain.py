"""What a pipeline switch is worth in replays: the same jobs with it and without.

    python -m tests.bench.switch_gain [--costs FILE] [--samples N] [--json FILE]

On the eight titan_fm workloads (8 x 4 GPUs) and on our samples of the paper's 320 jobs (16 x 4),
average JCT of `titan` and `titan-grow`. Every start pays 30 s of checkpoint and a cold start; the
switch takes the cold start's place where ranks of the same model have ended on all of the job's
GPUs at most 10 s before. Two pairs of costs: those published for ViT-Large on 4 GPUs (29 and 5 s),
and those measured on the containerized cluster by `tests/cluster/test_ft_switch.py` (8.3 and
0.1 s). ``--costs`` takes a third from a file, such as ``slurm-ext report switch --costs`` writes.

Published for the 320 jobs: 1.16 h without, 1.04 h with. Exit code 1 where the switch makes the
average over workloads or samples longer, by more than they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from slurm_ext.domain.errors import SlurmExtError
from slurm_ext.domain.policy import Policy
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.sim.build import Terms, build
from slurm_ext.sim.costs import Costs, read_costs
from slurm_ext.sim.engine import replay, seats_overlap
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.library import THROUGHPUT, find_workload
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import TraceJob, read_trace
from slurm_ext.sim.truth import CHECKPOINT_S, Truth, read_curves
from tests.bench import paper320
from tests.bench.titan_fm_data import WORKLOADS

HOUR = 3600.0
WARM_FOR_S = 10.0
# Cold start and switch, seconds.
PUBLISHED_S, MEASURED_S = (29.0, 5.0), (8.3, 0.1)
POLICIES: Mapping[str, Policy] = {"titan": TitanPolicy(), "titan-grow": TitanPolicy(GROWING)}
# Replays that differ by less than this do not differ.
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Ground:
    """Lists of jobs that are replayed one by one on the same hardware."""

    name: str
    hardware: Hardware
    lists: tuple[tuple[TraceJob, ...], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One pair of costs under one policy on a ground; hours are means over its lists."""

    ground: str
    costs: str
    policy: str
    with_h: float
    without_h: float
    warm: float
    shorter: float
    error: float

    @property
    def harms(self) -> bool:
        """Whether the average is longer with the switch, by more than replays and lists differ."""
        return self.shorter < -max(NOISE, 2 * self.error)


def stated(cold_s: float, switch_s: float) -> Costs:
    """Costs that are the same for every model."""
    return Costs(
        checkpoint_s=CHECKPOINT_S,
        cold_switch_s={("", ""): cold_s},
        pipeline_switch_s={("", ""): switch_s},
        warm_for_s=WARM_FOR_S,
    )


def from_file(path: Path) -> Costs:
    """A site's own costs; what the file does not tell is as in the others."""
    costs = read_costs(path)
    if costs.pipeline_switch_s is None or not costs.cold_switch_s:
        raise SystemExit(f"{path}: needs rows of the kinds cold_start and switch")
    return replace(
        costs,
        checkpoint_s=costs.checkpoint_s or CHECKPOINT_S,
        warm_for_s=costs.warm_for_s or WARM_FOR_S,
    )


def grounds(samples: int) -> list[Ground]:
    """The shared workloads, and the paper's experiment on samples of our own."""
    shared = tuple(read_trace(find_workload(name)).jobs for name in WORKLOADS)
    drawn = tuple(paper320.sample(seed) for seed in range(samples))
    return [
        Ground("titan_fm", Hardware(nodes=8, gpus_per_node=4), shared),
        Ground("320 jobs", paper320.HARDWARE, drawn),
    ]


def one(
    ground: Ground, rows: Sequence[TraceJob], policy: Policy, costs: Costs
) -> tuple[float, float]:
    """Average JCT in hours, and the share of starts that were warm, of one replay."""
    cold_s = {model: costs.cold_s(model) for model in paper320.MODELS}
    truth = Truth(read_curves(THROUGHPUT, "V100"), cold_s, costs.checkpoint_s)
    built = build(rows, ground.hardware, {"": truth}, costs, Terms())
    if built.left_out:
        raise SystemExit(f"{ground.name}: {built.left_out[0]}")
    schedule = replay(built.jobs, ground.hardware, policy, costs)
    if problem := seats_overlap(schedule.runs, ground.hardware):
        raise SystemExit(f"{ground.name}: {problem}")
    models = {row.job_id: row.model for row in rows}
    warm = sum(r.lost_s < costs.start_s(models[r.job_id]) - 1e-6 for r in schedule.runs)
    return summarise(schedule).avg_jct_s / HOUR, warm / len(schedule.runs)


def rows_of(ground: Ground, costs: Mapping[str, Costs]) -> list[Row]:
    """Every pair of costs under every policy."""
    found = []
    for name, having in costs.items():
        lacking = having.without_switch()
        for label, policy in POLICIES.items():
            both = [
                (one(ground, rows, policy, having), one(ground, rows, policy, lacking))
                for rows in ground.lists
            ]
            gains = [1 - here[0] / there[0] for here, there in both]
            spread = stdev(gains) if len(gains) > 1 else 0.0
            found.append(
                Row(
                    ground=ground.name,
                    costs=name,
                    policy=label,
                    with_h=fmean(here[0] for here, _ in both),
                    without_h=fmean(there[0] for _, there in both),
                    warm=fmean(here[1] for here, _ in both),
                    shorter=fmean(gains),
                    error=spread / math.sqrt(len(gains)),
                )
            )
    return found


def misses(rows: Sequence[Row]) -> list[str]:
    """What must hold and does not."""
    return [
        f"{row.policy} on {row.ground}, {row.costs}: {-row.shorter:.1%} longer with the switch"
        for row in rows
        if row.harms
    ]


def show(rows: Sequence[Row], write: Callable[[str], object] = print) -> None:
    """One line per row; "shorter by" is the mean over lists with its standard error."""
    write(
        f"{'jobs':10} {'cold start, switch':24} {'policy':10} {'with h':>7} {'without':>7}"
        f" {'shorter by':>17} {'warm starts':>11}"
    )
    for row in rows:
        gain = f"{row.shorter:.1%} +- {row.error:.1%}"
        write(
            f"{row.ground:10} {row.costs:24} {row.policy:10} {row.with_h:7.3f} {row.without_h:7.3f}"
            f" {gain:>17} {row.warm:11.0%}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, metavar="FILE")
    parser.add_argument("--samples", type=int, default=10, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.samples < 1:
        parser.error(f"--samples={args.samples}: write 1 or more")
    costs = {
        f"{label}, {cold:g} and {switch:g} s": stated(cold, switch)
        for label, (cold, switch) in (("published", PUBLISHED_S), ("cluster", MEASURED_S))
    }
    if args.costs:
        try:
            costs[args.costs.name] = from_file(args.costs)
        except SlurmExtError as exc:
            raise SystemExit(str(exc)) from exc
    rows = [row for ground in grounds(args.samples) for row in rows_of(ground, costs)]
    show(rows)
    if args.json:
        args.json.write_text(
            json.dumps(
                [
                    {
                        "jobs": row.ground,
                        "costs": row.costs,
                        "policy": row.policy,
                        "avg_jct_h": {"with": row.with_h, "without": row.without_h},
                        "shorter": {"mean": row.shorter, "standard_error": row.error},
                        "warm_starts": row.warm,
                    }
                    for row in rows
                ],
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    found = misses(rows)
    for miss in found:
        print(f"MISSED {miss}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

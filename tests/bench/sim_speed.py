"""How fast a replay is: titan beside srtf on one workload, and how time grows with a long trace.

    python -m tests.bench.sim_speed [TRACE] [--cluster 192x4] [--policy NAME ...] [--jobs N ...]

First FM-2-vit: every policy on the same jobs, on events, CPU seconds, best of three. Titan may take
at most five times as long per job as srtf (exit code 1 otherwise); what the author's program does
on the same workload is printed beside it. Then, with a TRACE, its first 1,000, 10,000 and all jobs:
CPU seconds, jobs per second, decisions, longest queue, and the growth exponent between neighbouring
sizes, log(time ratio) / log(job ratio); 1 is linear. For fifo and srtf the last one must be at most
1.4: what grows faster than that does something for every waiting job.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.sim.build import build
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.gantt import waiting
from slurm_ext.sim.hardware import parse_cluster
from slurm_ext.sim.policies import POLICIES, policy_named
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import read_trace
from tests.bench.titan_fm_data import HARDWARE, jobs_as_ours

WORKLOAD = "FM-2-vit"
# Jobs per second of the author's program on the titan_fm workloads.
THEIRS = {"srtf": "1,250 to 1,730", "titan": "44"}
MOST_TIMES_SRTF = 5.0
SIZES = (1_000, 10_000, 54_688)
LINEAR, MOST_EXPONENT = ("fifo", "srtf"), 1.4
_REPEAT = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """One policy on the workload."""

    policy: str
    jobs: int
    decisions: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Jobs per CPU second."""
        return self.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Size:
    """One policy on the first jobs of a trace; ``exponent`` against the size before."""

    policy: str
    jobs: int
    seconds: float
    decisions: int
    queue: int
    avg_jct_h: float
    exponent: float | None


def paces(workload: str = WORKLOAD, repeat: int = _REPEAT) -> list[Pace]:
    """The policies on the same elastic jobs."""
    jobs = jobs_as_ours(workload)
    found = []
    for name, policy in (
        ("srtf", SrtfPolicy()),
        ("titan", TitanPolicy()),
        ("titan-grow", TitanPolicy(GROWING)),
    ):
        best, decisions = math.inf, 0
        for _ in range(repeat):
            begun = time.process_time()
            decisions = replay(jobs, HARDWARE, policy).decisions
            best = min(best, time.process_time() - begun)
        found.append(Pace(name, len(jobs), decisions, best))
    return found


def growth(trace: str, cluster: str, policy: str, sizes: Sequence[int]) -> list[Size]:
    """A policy on the first jobs of a trace, at its sizes in ascending order."""
    hardware = parse_cluster(cluster)
    rows = read_trace(trace).jobs
    found: list[Size] = []
    for size in sorted(sizes):
        built = build(rows[:size], hardware, {}, Costs())
        begun = time.process_time()
        schedule = replay(built.jobs, hardware, policy_named(policy))
        seconds = time.process_time() - begun
        before = found[-1] if found else None
        found.append(
            Size(
                policy=policy,
                jobs=len(built.jobs),
                seconds=seconds,
                decisions=schedule.decisions,
                queue=max(waits for _, waits in waiting(schedule.runs)),
                avg_jct_h=summarise(schedule).avg_jct_s / 3600,
                exponent=before
                and math.log(seconds / before.seconds) / math.log(len(built.jobs) / before.jobs),
            )
        )
        print(_line(found[-1]), flush=True)
    return found


def _line(row: Size) -> str:
    exponent = "" if row.exponent is None else f"{row.exponent:.2f}"
    return (
        f"{row.policy:16}{row.jobs:8}{row.seconds:10.2f}{row.jobs / row.seconds:9.0f}"
        f"{row.decisions:11}{row.queue:8}{row.avg_jct_h:11.3f}{exponent:>10}"
    )


def misses(found: Sequence[Pace], grown: Sequence[Size]) -> list[str]:
    """What must hold and does not."""
    base = found[0].seconds
    missed = [
        f"{pace.policy} takes {pace.seconds / base:.1f} times as long as srtf, more than "
        f"{MOST_TIMES_SRTF:g}"
        for pace in found
        if pace.policy == "titan" and pace.seconds > MOST_TIMES_SRTF * base
    ]
    last = {row.policy: row for row in grown}
    return missed + [
        f"{name}: time grows with the power {row.exponent:.2f} of the jobs"
        for name, row in last.items()
        if name in LINEAR and row.exponent is not None and row.exponent > MOST_EXPONENT
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--cluster", default="192x4")
    parser.add_argument(
        "--policy", nargs="+", default=["fifo", "backfill", "srtf", "titan"], choices=POLICIES
    )
    parser.add_argument("--jobs", nargs="+", type=int, default=list(SIZES), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    found = paces()
    print(f"{WORKLOAD} on 8x4 GPUs, CPU seconds, best of {_REPEAT}")
    print(f"{'policy':12}{'jobs/s':>8}{'decisions':>11}{'over srtf':>11}   the author's program")
    for pace in found:
        over = pace.seconds / found[0].seconds
        theirs = f"{THEIRS[pace.policy]} jobs/s" if pace.policy in THEIRS else ""
        print(f"{pace.policy:12}{pace.per_second:8.0f}{pace.decisions:11}{over:11.1f}   {theirs}")
    grown: list[Size] = []
    if args.trace:
        print(f"\n{args.trace} on {args.cluster} GPUs")
        print(
            f"{'policy':16}{'jobs':>8}{'seconds':>10}{'jobs/s':>9}{'decisions':>11}{'queue':>8}"
            f"{'avg JCT h':>11}{'exponent':>10}"
        )
        for name in args.policy:
            grown += growth(args.trace, args.cluster, name, args.jobs)
    if args.json:
        rows = {"paces": [asdict(p) for p in found], "growth": [asdict(g) for g in grown]}
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    missed = misses(found, grown)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

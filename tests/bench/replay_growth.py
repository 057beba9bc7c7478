"""How long a replay takes as a trace grows: real GPU jobs, 1,000, 10,000 and all of them.

    python -m tests.bench.replay_growth TRACE [--cluster 192x4] [--policy NAME ...] [--jobs N ...]

Prints seconds, jobs per second, decisions and the longest queue for each size, and the growth
exponent between neighbouring sizes: log(time ratio) / log(job ratio); 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

from slurm_ext.sim.build import build
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.gantt import waiting
from slurm_ext.sim.hardware import parse_cluster
from slurm_ext.sim.policies import POLICIES, policy_named
from slurm_ext.sim.summary import summarise
from slurm_ext.sim.trace import read_trace

SIZES = (1_000, 10_000, 54_688)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--cluster", default="192x4")
    parser.add_argument(
        "--policy", nargs="+", default=["fifo", "backfill", "srtf", "titan"], choices=POLICIES
    )
    parser.add_argument("--jobs", nargs="+", type=int, default=list(SIZES), metavar="N")
    args = parser.parse_args(argv)
    hardware = parse_cluster(args.cluster)
    rows = read_trace(args.trace).jobs
    print(
        f"{'policy':16}{'jobs':>8}{'seconds':>10}{'jobs/s':>9}{'decisions':>11}{'queue':>8}"
        f"{'avg JCT h':>11}{'exponent':>10}"
    )
    for name in args.policy:
        before: tuple[int, float] | None = None
        for size in sorted(args.jobs):
            built = build(rows[:size], hardware, {}, Costs())
            begun = time.perf_counter()
            schedule = replay(built.jobs, hardware, policy_named(name))
            seconds = time.perf_counter() - begun
            count = len(built.jobs)
            exponent = ""
            if before is not None:
                exponent = f"{math.log(seconds / before[1]) / math.log(count / before[0]):.2f}"
            before = count, seconds
            queue = max(waits for _, waits in waiting(schedule.runs))
            print(
                f"{name:16}{count:8}{seconds:10.2f}{count / seconds:9.0f}{schedule.decisions:11}"
                f"{queue:8}{summarise(schedule).avg_jct_s / 3600:11.3f}{exponent:>10}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

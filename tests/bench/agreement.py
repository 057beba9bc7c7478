"""What a session costs a training step: agreement, signals, progress and status.

    python -m tests.bench.agreement [--transport auto|gloo] [--pairs 120] [--ranks 4]
                                    [--step-ms 50] [--json FILE]

Real ranks whose step is emulated by sleeping, then an all-reduce as any data-parallel step ends
with. They share a node, so with ``auto`` they agree through memory; ``gloo`` makes them agree by
messages, as ranks of several nodes do (whose network is slower than the loopback used here).

Blocks of steps with ``ft.step`` and without take turns in one run, in an order drawn anew for each
pair, so that whatever else the machine does hits both alike. A block's time is the lower quartile
of its steps: what the session does is in every one of them, what else the machine does is in some
and only makes them longer. The cost is the Hodges-Lehmann estimate over the pairs of
(with - without) / without, the median of all means of two pairs: as robust against single pairs as
is needed here, and closer than a median. The mean over all steps and the processor time stand
beside it, since a quartile hides what is seldom and the wall clock hides what another core does.
Progress and status are written at their usual rate, the ranks' own seconds are gathered, nothing
is saved. Exits with 1 where the cost is above 0.5 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import slurm_ft
from slurm_ft import variables
from slurm_ft.session import comms
from slurm_ft.session.comms.shared_max import SharedMax
from tests.wrappers.ranks import run_ranks, values

WANTED_SHARE = 0.005
STEPS_A_BLOCK = 10
WARM_STEPS = 20
_RESAMPLES = 500
AUTO, GLOO = "auto", "gloo"

# Seconds of each step, and processor seconds a step.
Block = tuple[Sequence[float], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 only where the cost is within the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--transport",
        choices=(AUTO, GLOO),
        default=AUTO,
        help="how ranks agree: as they would by themselves, or by messages (%(default)s)",
    )
    parser.add_argument("--pairs", type=int, default=120, help="of blocks (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="(%(default)s)")
    parser.add_argument(
        "--extra-ms",
        type=float,
        default=0.0,
        help="make the session's steps this much longer, to see that it would be noticed",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.pairs < 2 or args.ranks < 1 or args.step_ms <= 0 or args.extra_ms < 0:
        parser.error("--pairs from 2, --ranks from 1, --step-ms above 0, --extra-ms from 0")
    step_s, extra_s = args.step_ms / 1000, args.extra_ms / 1000
    limit_s = 60 + 20 * step_s * STEPS_A_BLOCK * args.pairs
    with tempfile.TemporaryDirectory(prefix="slurm-ft-bench-") as place:
        replies = values(
            run_ranks(
                args.ranks,
                lambda rank: _rank(rank, args.pairs, step_s, extra_s, Path(place), args.transport),
                limit_s=limit_s,
            )
        )
    through = replies[0].pop("through")
    result = {
        "ranks": args.ranks,
        "step_ms": args.step_ms,
        "through": through,
        **summary(**replies[0]),
    }
    print(
        f"{args.ranks} ranks that agree through {through}, {args.step_ms:g} ms a step,"
        f" {args.pairs} pairs of blocks of {STEPS_A_BLOCK} steps\n"
        f"without the session  {result['without_ms']:.3f} ms a step\n"
        f"with it              {result['with_ms']:.3f} ms a step\n"
        f"cost                 {result['share']:+.3%} of a step"
        f" (95 %: {result['low']:+.3%} to {result['high']:+.3%};"
        f" half of the pairs: {result['quarter']:+.3%} to {result['three_quarters']:+.3%})\n"
        f"cost by the mean     {result['mean_share']:+.3%} of a step\n"
        f"processor time       {result['cpu_us']:+.0f} us a step on rank 0, all threads\n"
        f"ft.step itself       {result['call_us']:.0f} us (median), {result['call_p99_us']:.0f} us"
        " (99th percentile)"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["share"] > WANTED_SHARE:
        print(f"FAILED: more than {WANTED_SHARE:.1%} of a step")
        return 1
    return 0


def summary(
    pairs: Sequence[tuple[Block, Block]], calls_s: Sequence[float], seed: int = 1
) -> dict[str, float]:
    """From each pair of blocks (with, without), and the seconds of each call."""
    shares = [(block_s(one[0]) - block_s(other[0])) / block_s(other[0]) for one, other in pairs]
    rng = random.Random(seed)
    again = sorted(hodges_lehmann(rng.choices(shares, k=len(shares))) for _ in range(_RESAMPLES))
    quarter, _, three_quarters = statistics.quantiles(shares, n=4)
    ordered = sorted(calls_s)
    mean_with, mean_without = (
        statistics.fmean(step for pair in pairs for step in pair[side][0]) for side in (0, 1)
    )
    return {
        "share": hodges_lehmann(shares),
        "low": again[round(0.025 * _RESAMPLES)],
        "high": again[round(0.975 * _RESAMPLES) - 1],
        "quarter": quarter,
        "three_quarters": three_quarters,
        "mean_share": (mean_with - mean_without) / mean_without,
        "with_ms": 1000 * statistics.median(block_s(one[0]) for one, _ in pairs),
        "without_ms": 1000 * statistics.median(block_s(other[0]) for _, other in pairs),
        "cpu_us": 1e6 * statistics.median(one[1] - other[1] for one, other in pairs),
        "call_us": 1e6 * statistics.median(ordered),
        "call_p99_us": 1e6 * ordered[round(0.99 * (len(ordered) - 1))],
    }


def block_s(steps_s: Sequence[float]) -> float:
    """The time of a block's steps: their lower quartile."""
    return statistics.quantiles(steps_s, n=4, method="inclusive")[0]


def hodges_lehmann(values: Sequence[float]) -> float:
    """The median of the means of all pairs of values, each value with itself as well."""
    return statistics.median(
        (one + other) / 2 for at, one in enumerate(values) for other in values[at:]
    )


def _rank(
    rank: int, pairs: int, step_s: float, extra_s: float, place: Path, transport: str
) -> dict[str, Any]:
    if transport == GLOO:
        comms.share = lambda comm, limit_s: None  # type: ignore[assignment]
    os.environ.update(
        {
            variables.JOB: "1",
            variables.STATUS: str(place / f"status-{rank}.json"),
            variables.PROGRESS: str(place / "progress-1.json"),
        }
    )
    gradient = torch.zeros(1024)
    calls_s: list[float] = []
    measured: list[tuple[Block, Block]] = []
    # The same order on every rank.
    rng = random.Random(0)
    with slurm_ft.session() as ft:
        through = "memory" if isinstance(ft._agreement._maxima, SharedMax) else "messages"
        step = 0

        def block(steps: int, *, agree: bool) -> Block:
            nonlocal step
            steps_s = []
            for number in range(steps + 1):
                if number == 1:
                    # The first step ends what the other kind of block had under way.
                    cpu_s = time.process_time()
                began = time.perf_counter()
                time.sleep(step_s)
                dist.all_reduce(gradient)
                step += 1
                if agree:
                    called = time.perf_counter()
                    ft.step(step, samples=32, position={"index": step}, compute_s=step_s)
                    calls_s.append(time.perf_counter() - called)
                    if extra_s:
                        time.sleep(extra_s)
                steps_s.append(time.perf_counter() - began)
            return steps_s[1:], (time.process_time() - cpu_s) / steps

        block(WARM_STEPS, agree=True)
        calls_s.clear()
        for _ in range(pairs):
            if rng.random() < 0.5:
                with_it = block(STEPS_A_BLOCK, agree=True)
                without = block(STEPS_A_BLOCK, agree=False)
            else:
                without = block(STEPS_A_BLOCK, agree=False)
                with_it = block(STEPS_A_BLOCK, agree=True)
            measured.append((with_it, without))
    return {"through": through, "pairs": measured, "calls_s": calls_s}


if __name__ == "__main__":
    sys.exit(main())

"""Does the pause ever split, hang or lose a job that nothing else would have lost?

    python -m tests.bench.pause [--schedules 10000] [--seed N] [--json FILE]
    python -m tests.bench.pause --explore
    python -m tests.bench.pause --chaos 20 [--seed N]
    python -m tests.bench.pause --latency [--ranks 4]

The first form runs random schedules on a simulated transport (pause_schedules.py); ``--seed`` tells
the story of one of them. The second searches all behaviours of small jobs without a bound on the
faults (pause_explore.py; minutes). The third does it with real ranks over gloo (pause_chaos.py,
needs torch). The fourth asks four ranks for pauses and tells from the request to all paused
(pause_cost.py). Exits with 1 when anything is wrong, or when the schedules
were too tame to say anything.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from slurm_ft.pause.protocol import End, Rung
from tests.bench.pause_explore import Explorer
from tests.bench.pause_schedules import run_schedule

_CHUNK = 250
_RANKS = "2,3,4"
_LATENCY = ("ranks", "step_s", "pauses", "commits", "commit_bound_s", "commit_worst_s")
# A set of schedules in which a kind of end does not occur says nothing about it.
_WANTED = (End.RESUMED, End.ABORTED, End.SAVED, End.ABANDONED, End.UNDECIDED)
# Ranks, writes that travel at the same time, most faults, whether ranks are interrupted.
EXPLORED = ((2, 2, None, True), (3, 1, 1, False))


def run_many(first: int, count: int) -> tuple[list[tuple[int, str]], Counter[str], int]:
    """Wrong schedules, how many had each kind of end, and how many jobs survived."""
    logging.disable(logging.WARNING)
    wrong: list[tuple[int, str]] = []
    ends: Counter[str] = Counter()
    survived = 0
    for seed in range(first, first + count):
        story = run_schedule(seed)
        ends.update({str(end) for end in story.ends})
        survived += story.survived
        if story.wrong:
            wrong.append((seed, story.wrong))
    return wrong, ends, survived


def schedules(first: int, count: int) -> dict[str, Any]:
    """Run them on all processors."""
    began_s = time.monotonic()
    wrong: list[tuple[int, str]] = []
    ends: Counter[str] = Counter()
    survived = 0
    last = first + count
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        starts = range(first, last, _CHUNK)
        counts = [min(_CHUNK, last - start) for start in starts]
        for some, kinds, alive in pool.map(run_many, starts, counts):
            wrong.extend(some)
            ends.update(kinds)
            survived += alive
    return {
        "schedules": count,
        "seconds": round(time.monotonic() - began_s, 1),
        "wrong": wrong,
        "survived": survived,
        "ends": dict(sorted(ends.items())),
    }


def explore() -> list[dict[str, Any]]:
    """Search small jobs exhaustively."""
    rows: list[dict[str, Any]] = []
    for size, travelling, faults, interrupts in EXPLORED:
        for rung in (Rung.MEMORY, Rung.JOB):
            began_s = time.monotonic()
            found = Explorer(
                size, rung, faults=faults, travelling=travelling, interrupts=interrupts
            ).run()
            row = {
                "ranks": size,
                "rung": str(rung),
                "faults": "unbounded" if faults is None else faults,
                "states": found.states,
                "ends": sorted(found.ends),
                "violation": found.violation,
                "trace": found.trace,
                "seconds": round(time.monotonic() - began_s, 1),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _chaos(args: argparse.Namespace) -> int:
    """Real ranks; torch is needed for this alone."""
    from tests.bench.pause_chaos import chaos

    sizes = tuple(int(part) for part in args.ranks.split(","))
    first, count = (args.first, args.chaos) if args.seed is None else (args.seed, 1)
    result = chaos(first, count, sizes)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] else 0


def _latency(args: argparse.Namespace) -> int:
    """From the request until all ranks are paused; torch is needed."""
    from tests.bench.pause_cost import late, measure

    ranks = 4 if args.ranks == _RANKS else int(args.ranks)
    found = measure(ranks, pairs=2, steps=20, pauses=40)
    # So few steps say nothing about what being pausable costs: pause_cost.py measures that.
    result = {key: value for key, value in found.items() if key in _LATENCY or "median" in key}
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if late(result) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked; 0 only where nothing is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (%(default)s)")
    parser.add_argument("--seed", type=int, help="tell the story of this schedule")
    parser.add_argument("--chaos", type=int, default=0, metavar="N", help="runs of real ranks")
    parser.add_argument("--ranks", default=_RANKS, help="sizes for --chaos (%(default)s)")
    parser.add_argument("--latency", action="store_true", help="how soon four ranks are paused")
    parser.add_argument("--explore", action="store_true", help="search small jobs exhaustively")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.chaos:
        return _chaos(args)
    if args.latency:
        return _latency(args)
    if args.seed is not None:
        logging.disable(logging.WARNING)
        story = run_schedule(args.seed)
        print(f"{story.size} ranks; {', '.join(story.faults) or 'no faults'}")
        print("\n".join(story.log))
        print(story.wrong or ("survived" if story.survived else "left for the queue"))
        return 1 if story.wrong else 0
    if args.schedules < 1:
        parser.error("--schedules must be at least 1")
    result: dict[str, Any]
    if args.explore:
        rows = explore()
        result = {"explored": rows}
        bad = any(row["violation"] for row in rows)
    else:
        result = schedules(args.first, args.schedules)
        print(json.dumps(result))
        bad = bool(result["wrong"])
        for seed, what in result["wrong"][:10]:
            print(f"seed {seed}: {what}; replay with --seed {seed}", file=sys.stderr)
        missing = [end for end in _WANTED if end not in result["ends"]]
        if missing and args.schedules >= 1000:
            print(f"too tame: no schedule ended {', '.join(missing)}", file=sys.stderr)
            bad = True
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

"""What being pausable costs a training step, and how soon a job is paused.

    python -m tests.bench.pause_cost [--ranks 2] [--pairs 10] [--steps 40] [--json FILE]
    python -m tests.bench.pause --latency [--ranks 4]

Paired: the same ranks open a session that listens for pauses and one that does not, in turns, with
steps of 50 ms; the figure is the median over the pairs of the difference of the median steps. Then
it asks for short pauses and measures from the request until all ranks are paused, and how much of
it ranks needed to acknowledge: from the first one's acknowledgement to the commit, which needs the
last one's. Exits with 1 where pausability costs more than 0.5 % of a step, or the median pause
comes later than two steps (which the ranks need to agree) and the median time to acknowledge.
"""

from __future__ import annotations

import argparse
import json
import os
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
from slurm_ft.pause.client import NetStore
from tests.wrappers.pause_ranks import address, ended, served, wait_outcome
from tests.wrappers.ranks import run_ranks, values

STEP_S = 0.05
COLLECTIVE_S = 30.0
WANTED_SHARE = 0.005
# Until the ranks have agreed.
AGREED_STEPS = 2


def rank_main(rank: int, place: Path, pairs: int, steps: int) -> dict[str, Any]:
    """Both kinds of session in turns; the median step of each."""
    os.environ.update(
        {
            variables.JOB: "7",
            variables.CHECKPOINT_DIR: str(place / "ck"),
            variables.COLLECTIVE_TIMEOUT_S: f"{COLLECTIVE_S:g}",
        }
    )
    medians: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for pausable in (True, False) if pair % 2 else (False, True):
            os.environ.pop(variables.STATE_DIR, None)
            if pausable:
                os.environ[variables.STATE_DIR] = str(place)
            medians[pausable].append(_session(steps))
    os.environ[variables.STATE_DIR] = str(place)
    (place / f"ready-{rank}").touch()
    _session(10**6, place / "stop")
    return {"with": medians[True], "without": medians[False]}


def _session(steps: int, stop: Path | None = None) -> float:
    """One session; the median of its steps."""
    value = torch.ones(1024)
    took: list[float] = []
    with slurm_ft.session(state={"value": value}, checkpoint="none") as ft:
        ft.restore()
        for step in range(1, steps + 1):
            began_s = time.perf_counter()
            time.sleep(STEP_S)
            # The ranks end together: who saw the file decides for all.
            flag = torch.tensor([float(stop is not None and stop.exists())])
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                break
            ft.step(step)
            took.append(time.perf_counter() - began_s)
    return statistics.median(took)


def measure(ranks: int, pairs: int, steps: int, pauses: int = 10) -> dict[str, Any]:
    """The figures."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, served(Path(name), COLLECTIVE_S):
        place = Path(name)

        def beside(pids: list[int]) -> None:
            store = NetStore(address(place))
            while not all((place / f"ready-{rank}").exists() for rank in range(ranks)):
                time.sleep(0.1)
            time.sleep(1.0)
            for number in range(pauses):
                asked = store.pause(
                    "nothing", wait_s=10, hold_s=0.05, by="b", request_id=str(number)
                )
                if asked.get("end") is None:
                    rows.append(wait_outcome(store, str(number), ended, 20.0))
                # Requests come at any moment of a step.
                time.sleep(0.2 + STEP_S * number / pauses)
            (place / "stop").touch()

        outcomes = run_ranks(ranks, rank_main, place, pairs, steps, limit_s=600.0, meanwhile=beside)
    found = values(outcomes)[0]
    done = [row for row in rows if row["paused_s"] is not None]
    commits = [row["paused_s"] for row in done]
    acknowledged = [row["committed_s"] - row["bound_s"] for row in done]
    # As long as the ranks' steps really were, on this machine.
    step_s = statistics.median(found["with"])
    differences = [a - b for a, b in zip(found["with"], found["without"], strict=True)]
    cost_s = statistics.median(differences)
    return {
        "ranks": ranks,
        "step_s": round(step_s, 5),
        "pauses": len(rows),
        "commits": len(done),
        "pairs": pairs,
        "steps": steps,
        "cost_us": round(cost_s * 1e6, 1),
        "cost_share": round(cost_s / STEP_S, 5),
        "spread_us": [round(min(differences) * 1e6, 1), round(max(differences) * 1e6, 1)],
        "first_bound_median_s": round(statistics.median(row["bound_s"] for row in done), 4),
        "acknowledge_median_s": round(statistics.median(acknowledged), 4),
        "commit_bound_s": round(AGREED_STEPS * step_s + statistics.median(acknowledged), 4),
        "commit_median_s": round(statistics.median(commits), 4),
        "commit_worst_s": round(max(commits), 4),
    }


def late(result: dict[str, Any]) -> bool:
    """Whether pauses come later than they should."""
    return bool(result["commit_median_s"] > result["commit_bound_s"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 where both targets are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    result = measure(args.ranks, args.pairs, args.steps)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    bad = result["cost_share"] > WANTED_SHARE or late(result)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

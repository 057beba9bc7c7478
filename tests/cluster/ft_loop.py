"""A program without torch for tests on a real cluster: it counts steps and keeps its own files.

With ``--mpi`` its ranks are MPI's. State is one number per rank, the sum of the steps it has done,
so a step that was lost or done twice shows at the end. One JSON line per step from rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import slurm_ft

ATTEMPT = int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument(
        "--hurry", type=int, nargs="?", const=1, default=10**6, help="first attempt without sleep"
    )
    parser.add_argument("--log", required=True)
    parser.add_argument("--mpi", action="store_true")
    parser.add_argument("--fail-at", type=int, default=0, help="step at which to exit with 3")
    parser.add_argument("--checkpoint", default="sync")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.mpi:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, size = world.rank, world.size
    else:
        world, rank, size = None, 0, 1
    total = 0

    def save(directory: Path, step: int) -> None:
        (directory / f"sum-{rank}.json").write_text(json.dumps({"step": step, "sum": total}))

    def restore(directory: Path, step: int) -> None:
        nonlocal total
        kept = json.loads((directory / f"sum-{rank}.json").read_text())
        if kept["step"] != step:
            sys.exit(f"rank {rank}: files of step {kept['step']} in a checkpoint of step {step}")
        total = kept["sum"]

    with slurm_ft.session(
        save=save, restore=restore, total_steps=args.steps, checkpoint=args.checkpoint
    ) as ft:
        step = ft.restore()
        while step < args.steps:
            begin = time.monotonic()
            time.sleep(0 if args.hurry <= ATTEMPT else args.step_s)
            step += 1
            total += step
            if args.fail_at == step:
                sys.exit(3)
            if world is not None and world.allreduce(total) != size * step * (step + 1) // 2:
                sys.exit(f"rank {rank}: wrong sum at step {step}")
            if rank == 0:
                record(args.log, step, total, size)
            ft.step(step, samples=1, compute_s=time.monotonic() - begin)


def record(path: str, step: int, total: int, size: int) -> None:
    line = {
        "attempt": ATTEMPT,
        "step": step,
        "sum": total,
        "ranks": size,
        "at": time.time(),
    }
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

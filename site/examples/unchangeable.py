"""Stands for a program that cannot be changed, and knows neither Slurm nor slurm-ext.

It saves its state every so many steps, and when it gets SIGHUP; `--resume FILE` goes on from such
a file. Many programs are like that: hooks.sbatch shows what makes one come back.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--local-batch", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--save", type=Path, default=Path("state.json"))
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()

    step, total = 0, 0
    if args.resume is not None and args.resume.exists():
        saved = json.loads(args.resume.read_text())
        step, total = saved["step"], saved["total"]
        print(f"goes on after step {step}", flush=True)

    asked = False

    def ask(number, frame) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGHUP, ask)
    while step < args.steps:
        time.sleep(args.step_seconds)
        step += 1
        total += step * step
        print(f"step {step}", flush=True)
        if asked or step % 100 == 0:
            asked = False
            temporary = args.save.with_suffix(".new")
            temporary.write_text(json.dumps({"step": step, "total": total}))
            os.replace(temporary, args.save)
    print(f"trained {step} steps, weight {total}", flush=True)


if __name__ == "__main__":
    main()

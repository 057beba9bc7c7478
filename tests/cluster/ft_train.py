"""A small data-parallel program for tests on a real cluster, run by ft-run inside a job.

Its loss depends on everything that a resumed attempt must get back: parameters, both moments of
Adam, each rank's own random numbers, and the place in the data. One JSON line per step from
rank 0: attempt, step, loss as a hexadecimal float (so that equal means bit-equal), ranks, time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import slurm_ft

ATTEMPT = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
GLOBAL_BATCH = 24
FEATURES = 16


def samples(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same samples for the same indices, whoever asks."""
    index = torch.arange(first, first + count, dtype=torch.float64).unsqueeze(1)
    waves = torch.sin(index * torch.arange(1, FEATURES + 1, dtype=torch.float64) * 0.37)
    target = (waves[:, :1] * waves[:, 1:2]).to(torch.float32)
    return waves.to(torch.float32), target


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument(
        "--hurry", type=int, nargs="?", const=1, default=10**6, help="first attempt without sleep"
    )
    parser.add_argument("--log", required=True)
    parser.add_argument("--noise", action="store_true", help="random numbers in every step")
    parser.add_argument("--checkpoint", default="async")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # From here on every rank draws numbers of its own.
    torch.manual_seed(100 + rank)
    share = GLOBAL_BATCH // size
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with slurm_ft.session(state=state, total_steps=args.steps, checkpoint=args.checkpoint) as ft:
        step = ft.restore()
        first = int(ft.position["next"]) if ft.position else 0
        while step < args.steps:
            begin = time.monotonic()
            inputs, targets = samples(first + rank * share, share)
            if args.noise:
                inputs = inputs + 0.01 * torch.rand_like(inputs)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / size
            loss.backward()
            time.sleep(0 if args.hurry <= ATTEMPT else args.step_s)
            compute_s = time.monotonic() - begin
            total = loss.detach().clone()
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            step += 1
            first += GLOBAL_BATCH
            if rank == 0:
                record(args.log, step, total.item(), size)
            ft.step(step, samples=GLOBAL_BATCH, position={"next": first}, compute_s=compute_s)
    dist.destroy_process_group()


def record(path: str, step: int, loss: float, size: int) -> None:
    line = {
        "attempt": ATTEMPT,
        "step": step,
        "loss": loss.hex(),
        "ranks": size,
        "at": time.time(),
    }
    with open(path, "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

"""Plain PyTorch, one process per GPU: a loop as it is anywhere, and three lines of slurm-ext.

Started by `srun ft-run -- python train_plain.py` or by torchrun. The three lines are marked. Each
step takes the samples that belong to it whatever the number of ranks, so a job that comes back on
fewer GPUs goes on with the same work. Put your own model and data in the place of these.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import slurm_ft

SAMPLES = 512  # of the data set


def samples(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of some samples, made from their numbers."""
    pairs = []
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index % SAMPLES)
        x = torch.randn(32, generator=generator)
        pairs.append((x, (x[:4].argmax())))
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count() if on_gpu else 0
    device = torch.device("cuda", gpu) if on_gpu else torch.device("cpu")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = ranks * args.local_batch * args.accumulate
    steps = args.epochs * SAMPLES // batch

    state = {"model": model, "optimizer": optimizer}
    with slurm_ft.session(state=state, total_steps=steps) as ft:  # 1: safe points, checkpoints
        step = ft.restore()  # 2: where the job was stopped, 0 at first
        while step < steps:
            for part in range(args.accumulate):
                first = step * batch + (rank * args.accumulate + part) * args.local_batch
                x, y = samples(first, args.local_batch)
                last = part == args.accumulate - 1
                with nullcontext() if last else parallel.no_sync():
                    loss = nn.functional.cross_entropy(parallel(x.to(device)), y.to(device))
                    (loss / args.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
            ft.step(step, samples=batch)  # 3: may save; does not return when the job must go

    weight = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    if rank == 0:
        print(f"trained {step} steps, weight {weight:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

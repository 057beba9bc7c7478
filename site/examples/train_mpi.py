"""MPI without torch: ranks of `srun --mpi=pmix`, gradients summed by MPI, arrays of numpy.

The session speaks MPI where mpi4py is loaded and torch is not. The program's own functions write
and read the checkpoint; the session sees to it that it is complete or does not exist.
"""

import argparse
from pathlib import Path

import numpy as np
from mpi4py import MPI

import slurm_ft

SAMPLES = 512  # of the data set


def samples(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of some samples, made from their numbers."""
    numbers = [index % SAMPLES for index in range(first, first + count)]
    x = np.array([np.random.default_rng(number).standard_normal(16) for number in numbers])
    return x, x @ np.linspace(-1.0, 1.0, 16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-batch", type=int, default=16)
    args = parser.parse_args()

    world = MPI.COMM_WORLD
    batch = world.size * args.local_batch
    steps = args.epochs * SAMPLES // batch
    weights = np.zeros(16)

    def save(directory: Path, step: int) -> None:
        if world.rank == 0:
            np.save(directory / "weights.npy", weights)

    def restore(directory: Path, step: int) -> None:
        weights[:] = np.load(directory / "weights.npy")

    with slurm_ft.session(save=save, restore=restore, total_steps=steps) as ft:
        step = ft.restore()
        while step < steps:
            x, y = samples(step * batch + world.rank * args.local_batch, args.local_batch)
            error = x @ weights - y
            gradient = world.allreduce(x.T @ error) / batch
            weights -= 0.05 * gradient
            step += 1
            if world.rank == 0:
                print(f"step {step} loss {float((error**2).mean()):.6f}", flush=True)
            ft.step(step, samples=batch)

    if world.rank == 0:
        print(f"trained {step} steps, weight {float(np.abs(weights).sum()):.9f}", flush=True)


if __name__ == "__main__":
    main()

"""Two tasks one after the other in the same parameters, with the parts of slurm_ft.switch.

While the first task's weights and moments leave the device and are written, the second one's come
and its first step begins: it waits for each layer only when it needs it. Nothing here is the
reference trainer's; your own model, loop and files take the place of the small ones below.

    python two_tasks.py OUT              both tasks, the second by a switch
    python two_tasks.py OUT --only=2     the second one alone: the same file, bit for bit

The file is written by a thread of its own; a program with several ranks makes one switch on each,
and none of them waits for another.
"""

import argparse
import os
import threading
from pathlib import Path

import torch
from torch import nn

from slurm_ft.switch import (
    Block,
    CudaLink,
    EmulatedLink,
    HostBuffers,
    Recorder,
    StageSwitch,
    collect,
    mirror,
    plan_stage,
)

STEPS, WIDTH, DEPTH = 6, 64, 6


def first_weights(seed: int) -> nn.Sequential:
    """A task's model before its first step; yours would come from a checkpoint."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)),
        nn.Linear(WIDTH, 1),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, number: int) -> None:
    """One step of the task of this seed, on data that depends on seed and step alone."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1000 * seed + number)
    inputs = torch.randn(32, WIDTH, generator=generator).to(device)
    loss = (model(inputs).squeeze(-1) - inputs.sum(dim=-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def write(state: dict, path: Path) -> None:
    """Durable when this returns, and there as a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: range) -> None:
    for number in steps:
        step(model, optimizer, seed, number)


def main() -> None:
    parser = argparse.ArgumentParser(description="two tasks, one switch")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", type=int, choices=(1, 2))
    parser.add_argument("--spare-bytes", type=int, default=100_000, help="free device memory")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    seed = args.only or 1
    model = first_weights(seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.only:
        train(model, optimizer, seed, range(STEPS))
        write(state_of(model, optimizer), args.out / f"task-{seed}.pt")
        return

    link = CudaLink(device) if device.type == "cuda" else EmulatedLink()
    buffers = HostBuffers(link)
    # The layers in the order in which a forward uses them: they leave and come in this order.
    layers = list(model)
    switch: StageSwitch | None = None
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: switch and switch.ready(index))

    train(model, optimizer, 1, range(STEPS - 1))
    # The next task's first state, in host memory. A long task would make it in a thread.
    incoming = {entry.key: entry.bytes for entry in collect(list(first_weights(2)), None)}
    # Storages, not tensors: what is tied moves once. No moments in `incoming`: they begin at 0.
    held = collect(layers, optimizer)
    blocks = [Block(e.key, e.layer, e.nbytes, keep=True, fresh=e.key not in incoming) for e in held]
    plan = plan_stage(blocks, spare_bytes=args.spare_bytes)
    coming = StageSwitch(plan, held, incoming, link, buffers, Recorder(stage=0))
    coming.prefetch()  # into spare memory, beside the last step
    train(model, optimizer, 1, range(STEPS - 1, STEPS))

    leaving: dict = {}
    # Called before anything is overwritten: the old state over the host memory that it goes to.
    coming.drained(lambda twins: leaving.update(mirror(state_of(model, optimizer), twins)))
    failed: list[BaseException] = []

    def finish() -> None:
        try:
            coming.gone()  # all of the old task has arrived in host memory
            write(leaving, args.out / "task-1.pt")
            coming.released()  # durable: that memory may be used again
        except BaseException as exc:
            failed.append(exc)

    beside = threading.Thread(target=finish)
    beside.start()
    switch = coming  # from here on each layer's forward waits until the layer is there
    train(model, optimizer, 2, range(STEPS))
    switch.all_ready()
    beside.join()
    if failed:
        raise failed[0]
    write(state_of(model, optimizer), args.out / "task-2.pt")


if __name__ == "__main__":
    main()

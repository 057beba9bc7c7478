"""The process group of a training job, its device, and what its precision asks of that device.

Ranks come from the variables that ``ft-run`` or torchrun set. Without them the program is one
process and makes no group at all. A task of a Slurm step without them is refused: every task would
train for itself and overwrite the others' checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.train.layout import Layout


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who this process is. ``group`` tells whether there is a process group.

    ``parts`` are the groups of some of the ranks, by what they are for, as long as the ranks stay
    together: tasks that follow each other use them again. A group cannot be given back safely, and
    making one waits for every rank that it misses until the time-out.
    """

    rank: int
    world: int
    device: torch.device
    group: bool
    parts: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict, compare=False)


@contextmanager
def joined(environ: Mapping[str, str], wanted_device: str = "auto") -> Iterator[Ranks]:
    """Join the other ranks; leave them at the end, whatever happened."""
    rank, world, local = _identity(environ)
    device = _device(wanted_device, local)
    if world == 1:
        yield Ranks(0, 1, device, group=False)
        return
    timeout_s = float(environ.get(variables.COLLECTIVE_TIMEOUT_S) or 600)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield Ranks(rank, world, device, group=True)
    except BaseException:
        # Peers may sit in a collective that this rank will never enter: waiting for them here
        # would hide the error. They find the closed connections.
        raise
    else:
        dist.destroy_process_group()


def check_precision(layout: Layout, device: torch.device) -> None:
    """Refuse what the device cannot do, or does in another way than it says."""
    # Older GPUs emulate bf16, slower than fp32: a measurement there would mislead.
    on_gpu = device.type == "cuda"
    recent = on_gpu and torch.cuda.get_device_capability(device) >= (8, 0)
    fine = {"fp32": True, "tf32": recent, "bf16": recent or not on_gpu}
    if not fine[layout.precision]:
        raise ConfigError(
            f"precision={layout.precision!r}",
            f"{_named(device)} has no {layout.precision}",
            "write fp32, or use an Ampere or newer GPU",
        )


def prepare_device(layout: Layout, device: torch.device) -> None:
    """Process-wide settings: repeatable arithmetic, and tf32 only where it was asked for."""
    check_precision(layout, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = layout.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = layout.precision == "tf32"
    torch.use_deterministic_algorithms(True)


def _identity(environ: Mapping[str, str]) -> tuple[int, int, int]:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        tasks = environ.get("SLURM_NTASKS", "1")
        if "SLURM_STEP_ID" in environ and tasks != "1":
            raise ConfigError(
                "RANK and WORLD_SIZE",
                f"not set in a step of {tasks} tasks",
                "start it as: srun ft-run -- python -m slurm_ft.train; where ft-run took another"
                " command in front of it for a launcher: srun ft-run --launcher=no -- COMMAND",
            )
        return 0, 1, 0
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environ.get(name, "0")
        try:
            numbers.append(int(text))
        except ValueError as exc:
            raise ConfigError(f"{name}={text!r}", "not a whole number", "unset it") from exc
    return numbers[0], numbers[1], numbers[2]


def _device(wanted: str, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError("device=cuda", "torch sees no GPU", "write cpu or auto")
    # With --gpus-per-task each rank sees one GPU, which is its number 0.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


# cuBLAS repeats its sums only with a fixed workspace, read when CUDA begins.
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def fix_workspace() -> None:
    """Call before the first use of CUDA."""
    os.environ.setdefault(*CUBLAS_WORKSPACE)

"""What the checkpoint tests run inside a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.comm import Comm
from slurm_ft.session.comms.solo import SoloComm

LIMIT_S = 20.0


def open_store(root: Path | str, **options: Any) -> CheckpointStore:
    """A store of all ranks, with a group of its own."""
    torch.set_num_threads(1)  # threads of torch's own do not survive the forks of other tests
    if not dist.is_initialized():
        return CheckpointStore(Path(root), SoloComm(), **options)
    from slurm_ft.session.comms.torch_group import TorchComm

    return CheckpointStore(
        Path(root), TorchComm(LIMIT_S), group=dist.new_group(backend="gloo"), **options
    )


def comm_here() -> Comm:
    """All ranks, whatever there is."""
    if not dist.is_initialized():
        return SoloComm()
    from slurm_ft.session.comms.torch_group import TorchComm

    return TorchComm(LIMIT_S)


def small_model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a frozen backbone, after one step: the optimizer has its moments."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {"backbone": torch.nn.Linear(64, 32), "head": torch.nn.Linear(32, 4)}
    )
    for parameter in model["backbone"].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=0.01)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Steps on random data that every rank draws alike."""
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 64)
        loss = (model["head"](model["backbone"](x)) ** 2).mean()  # type: ignore[index, operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def sharded(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that is cut along its first dimension."""
    return distribute_tensor(value, mesh, [Shard(0)])


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks hold."""
    return distribute_tensor(value, mesh, [Replicate()])


def mesh_here() -> DeviceMesh:
    """All ranks in a row."""
    return DeviceMesh("cpu", list(range(dist.get_world_size())))

"""Memory that a pause gives back: really free, and bit by bit what it was."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_ft.pause.ladder import PartError
from slurm_ft.pause.memory import DeviceMemory

MIB = 1 << 20


def resident() -> int:
    """Bytes of private memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


def big_state() -> dict[str, Any]:
    """About 96 MiB: parameters, gradients, two moments, an alias and a view."""
    model = torch.nn.Linear(2048, 3072, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    weight = model.weight
    return {
        "model": model,
        "optimizer": optimizer,
        "extra": {"alias": weight.detach(), "view": weight.detach()[1:3], "step": 3},
    }


def bits(state: dict[str, Any]) -> list[bytes]:
    weight = state["model"].weight
    moments = state["optimizer"].state[weight]
    tensors = (weight, weight.grad, moments["exp_avg"], moments["exp_avg_sq"], moments["step"])
    # A storage that numpy has seen can never be resized again: only copies are shown to it.
    return [tensor.detach().clone().numpy().tobytes() for tensor in tensors]


def test_memory_is_free_while_paused_and_the_same_afterwards(tmp_path: Path) -> None:
    state = big_state()
    gc.collect()
    before, was = bits(state), resident()
    part = DeviceMemory(state, spill=tmp_path)
    assert part.missing() == ""
    released = part.release(float("inf"))
    now = resident()
    assert released >= 96 * MIB
    assert was - now > 90 * MIB, (was, now)
    assert state["model"].weight.untyped_storage().nbytes() == 0
    assert state["extra"]["view"].untyped_storage().nbytes() == 0
    part.restore(float("inf"))
    assert bits(state) == before
    # Whoever looked at the same memory still does.
    with torch.no_grad():
        state["model"].weight[1, 0] = 4711.0
    assert state["extra"]["view"][0, 0] == 4711.0
    assert state["extra"]["alias"].data_ptr() == state["model"].weight.data_ptr()
    state["optimizer"].step()
    assert list(tmp_path.iterdir()) == []


def test_a_passed_deadline_leaves_everything_as_it_was(tmp_path: Path) -> None:
    state = big_state()
    before = bits(state)
    part = DeviceMemory(state, spill=tmp_path)
    with pytest.raises(PartError, match="no time left"):
        part.release(0.0)
    assert bits(state) == before
    part.release(float("inf"))
    part.restore(float("inf"))
    assert bits(state) == before


def test_a_disk_that_fills_up_on_the_way_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = big_state()
    before = bits(state)
    from_file, calls = torch.from_file, []

    def full(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("unable to resize file: No space left on device")
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch, "from_file", full)
    with pytest.raises(PartError, match="2 moved tensors are back"):
        DeviceMemory(state, spill=tmp_path).release(float("inf"))
    assert bits(state) == before
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_refused_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    class Full:
        f_bavail = 1
        f_frsize = 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(PartError, match="4096"):
        DeviceMemory(big_state(), spill=tmp_path).release(float("inf"))


def test_memory_of_the_host_stays_without_a_directory() -> None:
    assert "given back" in DeviceMemory(big_state()).missing()


def test_shared_memory_stays(tmp_path: Path) -> None:
    shared = torch.ones(1024).share_memory_()
    part = DeviceMemory({"shared": shared, "own": torch.ones(1024)}, spill=tmp_path)
    assert part.release(float("inf")) == 4096
    assert shared.sum() == 1024
    part.restore(float("inf"))

"""Memory that a pause gives back: really free, and bit by bit what it was."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_ft.pause import memory
from slurm_ft.pause.ladder import Ladder, LostStateError, PartError
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


def test_tensors_that_share_refer_wrap_or_have_no_storage(tmp_path: Path) -> None:
    """Tied weights, views, sparse gradients and tensors, wrappers, what numpy has looked at."""
    from torch.testing._internal.two_tensor import TwoTensor

    embedding = torch.nn.Embedding(50, 8, sparse=True)
    head = torch.nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    embedding(torch.tensor([1, 2, 2])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    seen = torch.arange(64.0)
    seen.numpy()
    state: dict[str, Any] = {
        "model": torch.nn.ModuleList([embedding, head, torch.nn.LazyLinear(3)]),
        "buffers": torch.nn.BatchNorm1d(4),
        "csr": torch.eye(16).to_sparse_csr(),
        "coo": torch.eye(16).to_sparse(),
        "two": TwoTensor(torch.ones(32), torch.full((32,), 2.0)),
        "numpy": seen,
        "nested": [({"deep": (torch.ones(3),)},), "text", 3, None],
        "meta": torch.empty(5, device="meta"),
    }
    state["loop"] = state
    before = [
        embedding.weight.detach().clone(),
        embedding.weight.grad.to_dense(),
        state["csr"].to_dense(),
        state["coo"].to_dense(),
    ]
    part = DeviceMemory(state, spill=tmp_path)
    released = part.release(float("inf"))
    assert embedding.weight.untyped_storage().nbytes() == 0
    assert state["two"].a.untyped_storage().nbytes() == 0
    assert state["coo"]._values().untyped_storage().nbytes() == 0
    assert seen.untyped_storage().nbytes() == 64 * 4
    # Tied weights once.
    assert released < 2 * 50 * 8 * 4 + 8192
    part.restore(float("inf"))
    after = [
        embedding.weight.detach(),
        embedding.weight.grad.to_dense(),
        state["csr"].to_dense(),
        state["coo"].to_dense(),
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert head.weight is embedding.weight
    assert torch.equal(state["two"].b, torch.full((32,), 2.0))


def test_a_roll_back_that_fails_is_a_lost_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported as a clean failure, the rank would train on with empty tensors."""
    state = {"a": torch.ones(1000), "b": torch.ones(1000)}
    move, moved = DeviceMemory._move, []

    def once(self: DeviceMemory, module: Any, storage: Any) -> int:
        if moved:
            raise RuntimeError("out of memory")
        moved.append(storage)
        return move(self, module, storage)

    def never(module: Any, moved: Any) -> None:
        raise RuntimeError("still out of memory")

    monkeypatch.setattr(DeviceMemory, "_move", once)
    monkeypatch.setattr(DeviceMemory, "_move_back", staticmethod(never))
    monkeypatch.setattr(memory, "_BACK_S", 0.2)
    with pytest.raises(LostStateError, match="still out of memory"):
        Ladder([DeviceMemory(state, spill=tmp_path)]).release(5.0)


def test_a_restore_waits_for_memory_that_somebody_is_still_giving_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": torch.ones(1000)}
    part = DeviceMemory(state, spill=tmp_path)
    part.release(float("inf"))
    back, calls = DeviceMemory._move_back, []

    def later(module: Any, moved: Any) -> None:
        calls.append(moved)
        if len(calls) < 3:
            raise RuntimeError("CUDA out of memory")
        back(module, moved)

    monkeypatch.setattr(DeviceMemory, "_move_back", staticmethod(later))
    monkeypatch.setattr(memory, "_AGAIN_S", 0.01)
    part.restore(time.monotonic() + 5.0)
    assert state["a"].sum() == 1000
    assert len(calls) == 3


def test_a_part_that_breaks_in_its_own_way_is_rolled_back(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        def missing(self) -> str:
            return ""

        def release(self, deadline_s: float) -> int:
            raise ZeroDivisionError("not foreseen")

        def restore(self, deadline_s: float) -> None:
            """It had given nothing."""

    state = {"a": torch.ones(1000)}
    ladder = Ladder([DeviceMemory(state, spill=tmp_path), Broken()])
    with pytest.raises(PartError, match="broken: ZeroDivisionError"):
        ladder.release(5.0)
    assert state["a"].sum() == 1000

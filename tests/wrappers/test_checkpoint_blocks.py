"""Checkpoints whose frozen tensors lie in a block store that several jobs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_ft.checkpoint.blocks import BlockStore
from slurm_ft.checkpoint.collect import collect
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import examine
from tests.wrappers.checkpoint_ranks import mesh_here, open_store, replicated, sharded
from tests.wrappers.ranks import run_ranks, values

MIB = 1 << 20


def _model(seed: int) -> torch.nn.Module:
    """4 MiB that are frozen and the same for every seed, 2 MiB that are trained."""
    model = torch.nn.ModuleDict(
        {
            "backbone": torch.nn.Linear(1024, 1024, bias=False),
            "head": torch.nn.Linear(1024, 512, bias=False),
        }
    )
    model["backbone"].weight.requires_grad = False  # type: ignore[union-attr]
    with torch.no_grad():
        model["backbone"].weight.copy_(torch.arange(MIB).reshape(1024, 1024))  # type: ignore
        model["head"].weight.fill_(float(seed))  # type: ignore[operator, union-attr]
    return model


def _bytes_below(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def test_three_jobs_share_a_frozen_backbone(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    for job in (1, 2, 3):
        model = _model(job)
        optimizer = torch.optim.AdamW([model["head"].weight])  # type: ignore[index, union-attr]
        store = open_store(tmp_path / f"job{job}", blocks=blocks, keep=1)
        for step in (1, 2):
            store.save(step, {"model": model, "optimizer": optimizer})
    (one,) = examine(tmp_path / "job3").complete
    assert one.manifest.shared_bytes == 4 * MIB
    assert one.manifest.own_bytes < 2.1 * MIB
    trained = sum(
        c.manifest.own_bytes for j in (1, 2, 3) for c in examine(tmp_path / f"job{j}").complete
    )
    assert _bytes_below(tmp_path) <= 1.2 * 4 * MIB + trained
    fresh = _model(0)
    with torch.no_grad():
        fresh["backbone"].weight.zero_()  # type: ignore
    # The store is found without being named.
    assert open_store(tmp_path / "job2").load({"model": fresh}) is not None
    assert torch.equal(fresh["backbone"].weight, _model(0)["backbone"].weight)  # type: ignore
    assert fresh["head"].weight.detach()[0, 0].item() == 2.0  # type: ignore


def test_a_tensor_of_unknown_nature_moves_to_blocks_once_it_has_not_changed(
    tmp_path: Path,
) -> None:
    still, moving = torch.ones(MIB), torch.zeros(MIB)
    store = open_store(tmp_path / "a", blocks=tmp_path / "blocks", keep=9)
    for step in (1, 2, 3):
        moving += 1
        store.save(step, {"still": still, "moving": moving})
    shared = [c.manifest.shared_bytes for c in examine(tmp_path / "a").complete]
    assert shared == [4 * MIB, 4 * MIB, 0]  # newest first
    other = open_store(tmp_path / "b", blocks=tmp_path / "blocks")
    other.save(1, {"still": still, "moving": moving})
    assert examine(tmp_path / "b").complete[0].manifest.shared_bytes == 4 * MIB


def test_frozen_weights_that_change_behind_the_version_counter_are_saved_as_they_are(
    tmp_path: Path,
) -> None:
    model = _model(1)
    teacher = model["backbone"].weight  # type: ignore[index, union-attr]
    store = open_store(tmp_path / "a", blocks=tmp_path / "blocks", keep=3)
    store.save(1, {"model": model})
    counted = teacher._version
    teacher.data.mul_(3)  # type: ignore[operator, union-attr]
    assert teacher._version == counted
    store.save(2, {"model": model})
    fresh = _model(0)
    store.load({"model": fresh})
    assert torch.equal(fresh["backbone"].weight, teacher)  # type: ignore


def _save(rank: int, root: str, blocks: str) -> int:
    mesh = mesh_here()
    whole = torch.arange(2 * MIB, dtype=torch.float32).reshape(2048, 1024)
    state: dict[str, Any] = {
        "cut": sharded(whole.clone(), mesh),
        "alike": replicated(whole * 2, mesh),
        "half": (whole * 3).to(torch.bfloat16),
        "number": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0),
        "word": "x",
    }
    store = open_store(root, blocks=Path(blocks))
    for step in (1, 2):
        store.start(step, state)
        saved = store.finish()
    assert saved is not None
    return saved.bytes


def _load(rank: int, root: str) -> None:
    mesh = mesh_here()
    whole = torch.arange(2 * MIB, dtype=torch.float32).reshape(2048, 1024)
    state: dict[str, Any] = {
        "cut": sharded(torch.zeros_like(whole), mesh),
        "alike": replicated(torch.zeros_like(whole), mesh),
        "half": torch.zeros_like(whole, dtype=torch.bfloat16),
        "number": torch.tensor(0),
        "flags": torch.tensor([False, True]),
        "none": torch.empty(0),
        "word": "",
    }
    assert open_store(root).load(state) is not None
    assert torch.equal(state["cut"].full_tensor(), whole)
    assert torch.equal(state["alike"].to_local(), whole * 2)
    assert torch.equal(state["half"], (whole * 3).to(torch.bfloat16))
    assert int(state["number"]) == 7
    assert state["flags"].tolist() == [True, False]
    assert state["word"] == "x"


def test_blocks_of_sharded_tensors_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    (bytes_, *others) = values(run_ranks(2, _save, str(tmp_path / "a"), str(tmp_path / "b")))
    assert others == [bytes_]
    assert bytes_ < MIB / 4  # nothing large is left in the checkpoint's own files
    assert examine(tmp_path / "a").complete[0].manifest.shared_bytes == (8 + 8 + 4) * MIB
    for size in (3, 1):
        values(run_ranks(size, _load, str(tmp_path / "a")))


def test_a_damaged_block_is_passed_over_and_then_written_again(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    model = _model(1)
    store = open_store(tmp_path / "a", blocks=blocks)
    store.save(1, {"model": model})
    with torch.no_grad():
        model["backbone"].weight.mul_(2)  # type: ignore
    store.save(2, {"model": model})
    newest = examine(tmp_path / "a").complete[0]
    path = BlockStore(blocks).path(newest.manifest.blocks[0].key)
    content = bytearray(path.read_bytes())
    content[77] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    loaded = open_store(tmp_path / "a", blocks=blocks).load({"model": _model(0)})
    assert loaded is not None
    assert loaded.step == 1
    # Another process wants the same content: what lies there is not believed.
    open_store(tmp_path / "c", blocks=blocks).save(1, {"model": model})
    assert BlockStore(blocks).damage(path.parent.name + path.name, path.stat().st_size) is None
    with pytest.raises(CheckpointError, match="cannot be used"):
        BlockStore(tmp_path / "nowhere", create=False)


def test_collecting_after_a_job_is_gone_leaves_the_others_whole(tmp_path: Path) -> None:
    import os
    import shutil

    blocks = tmp_path / "blocks"
    for job, factor in ((1, 1.0), (2, 1.0), (3, 5.0)):
        model = _model(job)
        with torch.no_grad():
            model["backbone"].weight.mul_(factor)  # type: ignore
        open_store(tmp_path / f"job{job}", blocks=blocks).save(1, {"model": model})
    shutil.rmtree(tmp_path / "job1")
    shutil.rmtree(tmp_path / "job3")
    for path in blocks.rglob("*"):
        os.utime(path, (0, 0))
    done = collect(BlockStore(blocks))
    assert (done.freed, done.used) == (1, 1)
    assert open_store(tmp_path / "job2").load({"model": _model(0)}) is not None

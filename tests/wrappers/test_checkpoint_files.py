"""Checkpoints written by a function of the user: every rank writes, all commit together."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.files import FileStore
from slurm_ft.checkpoint.layout import examine
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.session.comms.solo import SoloComm
from tests.wrappers.checkpoint_ranks import comm_here, open_store
from tests.wrappers.ranks import run_ranks, values


def _write_and_read(rank: int, root: str) -> dict[str, object]:
    comm = comm_here()
    store = FileStore(Path(root), comm, keep=2)

    def write(directory: Path) -> None:
        inner = directory / "parts" / f"p{rank}"
        inner.mkdir(parents=True)
        (inner / "weights.bin").write_bytes(bytes([rank]) * 1000)
        if rank == 0:
            (directory / "config.json").write_text("{}")

    random.seed(rank)
    saved = store.save(7, write, Meta(position={"at": rank}))
    draw = random.random()
    found: dict[str, object] = {}

    def read(directory: Path) -> None:
        found["bytes"] = list((directory / "parts" / f"p{rank}" / "weights.bin").read_bytes()[:2])

    loaded = store.load(read)
    assert loaded is not None
    found |= {"step": loaded.step, "position": dict(loaded.position), "same": saved.step}
    found["random"] = random.random() == draw
    return found


def test_each_rank_writes_its_own_files(tmp_path: Path) -> None:
    for rank, found in enumerate(values(run_ranks(3, _write_and_read, str(tmp_path)))):
        assert found == {
            "bytes": [rank, rank],
            "step": 7,
            "position": {"at": rank},
            "same": 7,
            "random": True,
        }
    (complete,) = examine(tmp_path).complete
    names = [entry.name for entry in complete.manifest.files]
    assert "parts/p2/weights.bin" in names
    assert "config.json" in names
    assert complete.manifest.torch == ""


def _one_raises(rank: int, root: str) -> str:
    store = FileStore(Path(root), comm_here())

    def write(directory: Path) -> None:
        (directory / f"p{rank}").write_text("x")
        if rank == 1:
            raise RuntimeError("my model cannot be saved")

    try:
        store.save(1, write)
    except CheckpointError as exc:
        return str(exc)
    return ""


def test_a_function_that_raises_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    words = values(run_ranks(2, _one_raises, str(tmp_path)))
    assert words[0] == words[1]
    assert "rank 1: RuntimeError: my model cannot be saved" in words[0]
    assert os.listdir(tmp_path) == []


def test_a_link_is_no_content(tmp_path: Path) -> None:
    store = FileStore(tmp_path, SoloComm())
    with pytest.raises(CheckpointError, match="is not a regular file"):
        store.save(1, lambda d: (d / "link").symlink_to("/etc/passwd"))
    with pytest.raises(CheckpointError, match="is a name of ours"):
        store.save(1, lambda d: (d / "MANIFEST.json").write_text("{}") and None)
    assert examine(tmp_path).complete == ()


def test_the_two_kinds_of_checkpoint_are_told_apart(tmp_path: Path) -> None:
    FileStore(tmp_path / "a", SoloComm()).save(1, lambda d: None)
    with pytest.raises(CheckpointError, match="save= and restore="):
        open_store(tmp_path / "a").load({"x": torch.zeros(1)})
    open_store(tmp_path / "b").save(1, {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="state="):
        FileStore(tmp_path / "b", SoloComm()).load(lambda d: None)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path\n"
        "from slurm_ft.checkpoint.files import FileStore\n"
        "from slurm_ft.session.comms.solo import SoloComm\n"
        f"s = FileStore(Path({str(tmp_path)!r}), SoloComm())\n"
        "s.save(1, lambda d: (d / 'x').write_text('1') and None)\n"
        "assert s.load(lambda d: None).step == 1\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path}, timeout=30)

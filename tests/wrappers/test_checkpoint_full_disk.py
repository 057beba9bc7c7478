"""A file system that is really full, and a limit on file sizes: the old checkpoint stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import examine
from tests.wrappers.checkpoint_ranks import open_store
from tests.wrappers.ranks import run_ranks, values

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    made = subprocess.run(argv, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _grow(rank: int, root: str, mib: int, blocks: bool) -> list[str]:
    """Two saves that fit, one that does not, and one that fits again."""
    store = open_store(root, keep=1, blocks=Path(root) / "blocks" if blocks else None)
    told = []
    for step, size in enumerate((1, 1, mib, 1), 1):
        try:
            store.start(step, {f"part{rank}": torch.full((size * MIB // 4,), float(step))})
            store.finish()
            told.append("")
        except CheckpointError as exc:
            told.append(str(exc))
    part = torch.zeros(MIB // 4)
    store.load({f"part{rank}": part})
    assert torch.equal(part, torch.full_like(part, 4.0))
    return told


@pytest.mark.parametrize("blocks", [False, True])
def test_a_full_disk_is_told_to_all_ranks_and_the_job_goes_on(
    small_disk: Path, blocks: bool
) -> None:
    for told in values(run_ranks(2, _grow, str(small_disk / "c"), 9, blocks)):
        assert told[0] == told[1] == told[3] == ""
        assert "step 3 is not saved" in told[2]
        assert "No space left" in told[2] or "bytes free" in told[2]
    assert [c.step for c in examine(small_disk / "c").complete] == [4]
    assert examine(small_disk / "c").unfinished == ()


def _limited(rank: int, root: str) -> list[str]:
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
    return _grow(rank, root, 8, False)


def test_a_write_that_is_refused_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    for told in values(run_ranks(2, _limited, str(tmp_path / "c"))):
        assert told[0] == told[1] == told[3] == ""
        assert "rank 1" in told[2]
        assert "step 3 is not saved" in told[2]
    assert [c.step for c in examine(tmp_path / "c").complete] == [4]
    assert not [name for name in os.listdir(tmp_path / "c") if name.startswith(".tmp")]

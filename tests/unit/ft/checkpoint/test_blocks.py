"""Blocks: named by their content, written once, never believed unseen."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.checkpoint.blocks import MARK_AFTER_S, TEMPORARY, BlockStore, cut
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.manifest import BlockEntry

DATA = memoryview(b"some weights" * 1000)


@given(st.binary(max_size=300), st.integers(1, 64))
def test_cutting_loses_nothing(data: bytes, size: int) -> None:
    pieces = cut(memoryview(data), size)
    assert b"".join(pieces) == data
    assert all(piece.nbytes == size for piece in pieces[:-1])


def test_the_same_content_is_written_once(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    entry, written = store.put(DATA)
    assert written
    assert entry.key == hashlib.sha256(DATA).hexdigest()
    assert store.put(DATA) == (entry, False)
    assert BlockStore(tmp_path).put(DATA) == (entry, False)
    target = bytearray(entry.size)
    store.read_into(entry, memoryview(target))
    assert target == DATA
    assert [key for key, _ in store.contents()] == [entry.key]


def test_a_store_is_private_unless_it_was_made_for_a_group(tmp_path: Path) -> None:
    private = BlockStore(tmp_path / "mine")
    entry, _ = private.put(DATA)
    assert private.root.stat().st_mode & 0o7777 == 0o700
    assert private.path(entry.key).stat().st_mode & 0o777 == 0o400
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours").chmod(0o2770)
    shared = BlockStore(tmp_path / "ours")
    shared.put(DATA)
    assert shared.path(entry.key).stat().st_mode & 0o777 == 0o440
    assert shared.path(entry.key).parent.stat().st_mode & 0o7777 == 0o2770
    (tmp_path / "ours").chmod(0o777)
    with pytest.raises(CheckpointError, match="everybody may write"):
        BlockStore(tmp_path / "ours")


@pytest.mark.parametrize("content", [b"", bytes(DATA)[:-1], b"X" + bytes(DATA)[1:]])
def test_what_lies_there_is_looked_at_before_it_is_used(tmp_path: Path, content: bytes) -> None:
    entry, _ = BlockStore(tmp_path).put(DATA)
    path = BlockStore(tmp_path).path(entry.key)
    path.chmod(0o600)
    path.write_bytes(content)
    store = BlockStore(tmp_path)
    assert store.damage(entry.key, entry.size) is not None
    assert store.put(DATA) == (entry, True)
    assert path.read_bytes() == DATA


def test_wanting_a_block_marks_it_against_the_collector(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    entry, _ = store.put(DATA)
    old = time.time() - 2 * MARK_AFTER_S
    os.utime(store.path(entry.key), (old, old))
    assert store.claim(entry)
    assert time.time() - store.path(entry.key).stat().st_mtime < 60


def test_somebody_elses_old_block_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockStore(tmp_path)
    entry, _ = store.put(DATA)
    os.utime(store.path(entry.key), (0, 0))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert store.put(DATA) == (entry, True)
    assert time.time() - store.path(entry.key).stat().st_mtime < 60


def test_a_full_disk_leaves_no_half_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    store = BlockStore(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.put(DATA)
    monkeypatch.undo()
    assert list(store.contents()) == []
    assert not store.claim(BlockEntry(hashlib.sha256(DATA).hexdigest(), DATA.nbytes))
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(TEMPORARY)]


def test_a_block_that_went_meanwhile_fails_the_save_and_is_written_by_the_next(
    tmp_path: Path,
) -> None:
    store = BlockStore(tmp_path)
    entry, _ = store.put(DATA)
    store.path(entry.key).unlink()
    with pytest.raises(CheckpointError, match="collected while a save wanted it"):
        store.settle([entry])
    assert store.put(DATA) == (entry, True)
    store.settle([entry])


def test_a_store_that_is_missing_is_not_made_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        BlockStore(tmp_path / "gone", create=False)
    assert not (tmp_path / "gone").exists()

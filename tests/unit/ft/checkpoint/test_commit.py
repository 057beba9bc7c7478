"""Begin and commit: all ranks succeed together or are told the same, and the old one stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.checkpoint import commit as module
from slurm_ft.checkpoint.commit import Rules, newest
from slurm_ft.checkpoint.errors import CheckpointError, LostPeerError
from slurm_ft.checkpoint.files import FileStore
from slurm_ft.checkpoint.layout import LATEST, TEMPORARY, examine, step_name
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.comm import Comm, ExchangeLostError
from tests.unit.ft.checkpoint.written import save
from tests.unit.ft.session.fabric import on_all

RANKS = 3


def together(root: Path, step: int, write: Callable[[int, Path], Any], **options: Any) -> list[str]:
    """One save on all ranks; what each was told, empty where it worked."""

    def one(comm: Comm) -> str:
        store = FileStore(root, comm, limit_s=10, **options)
        try:
            store.save(step, lambda directory: write(comm.rank, directory) and None)
        except CheckpointError as exc:
            return str(exc)
        return ""

    return on_all(RANKS, one)


def own_file(rank: int, directory: Path) -> None:
    (directory / f"part{rank}").write_bytes(bytes(100))


def test_all_ranks_parts_are_in_one_checkpoint(tmp_path: Path) -> None:
    assert together(tmp_path, 5, own_file) == ["", "", ""]
    (complete,) = examine(tmp_path).complete
    assert {entry.name for entry in complete.manifest.files} == {
        *(f"part{rank}" for rank in range(RANKS)),
        *(f"rank-0000{rank}.json" for rank in range(RANKS)),
    }
    assert complete.manifest.world_size == RANKS
    assert [c.step for c in on_all(RANKS, lambda comm: newest(comm, tmp_path))] == [5, 5, 5]


@pytest.mark.parametrize("victim", range(RANKS))
def test_what_goes_wrong_on_one_rank_is_told_to_all(tmp_path: Path, victim: int) -> None:
    together(tmp_path, 1, own_file)

    def fails(rank: int, directory: Path) -> None:
        own_file(rank, directory)
        if rank == victim:
            raise OSError(errno.ENOSPC, "No space left on device")

    words = together(tmp_path, 2, fails)
    assert len(set(words)) == 1
    assert f"rank {victim}: OSError: [Errno 28] No space left" in words[0]
    assert [c.step for c in examine(tmp_path).complete] == [1]
    assert examine(tmp_path).unfinished == ()
    assert together(tmp_path, 3, own_file) == ["", "", ""]  # the job goes on


def test_the_same_trouble_everywhere_is_told_once(tmp_path: Path) -> None:
    def fails(rank: int, directory: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    (words, *_) = together(tmp_path, 1, fails)
    assert words.count("Disk quota exceeded") == 1


@pytest.mark.parametrize("call", ["write_new", "sync_directory", "_sync_tree"])
def test_a_disk_that_fails_rank_0_at_the_commit(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(tmp_path, 1, own_file)

    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(module, call, full)
    words = together(tmp_path, 2, own_file)
    monkeypatch.undo()
    assert len(set(words)) == 1
    assert "No space left on device" in words[0]
    # Not saved, or saved and not acknowledged: what is there is whole.
    listing = examine(tmp_path)
    assert listing.broken == ()
    assert listing.complete[-1].step == 1


def test_a_pointer_that_cannot_be_written_does_not_undo_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(module, "replace_durably", full)
    assert together(tmp_path, 1, own_file) == ["", "", ""]
    assert examine(tmp_path).complete[0].step == 1
    assert LATEST in caplog.text


def test_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data and manifest are forced to disk before the rename, and the pointer comes last."""
    calls: list[tuple[str, str]] = []

    def name_of(handle: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{handle}")).name.split("-")[0]

    def watched(function: str) -> None:
        real = getattr(os, function)

        def call(*args: Any) -> Any:
            last = args[-1]
            calls.append((function, name_of(last) if isinstance(last, int) else Path(last).name))
            return real(*args)

        monkeypatch.setattr(os, function, call)

    for function in ("fsync", "rename", "replace"):
        watched(function)
    (tmp_path / "ckpt").mkdir()
    save(tmp_path / "ckpt", 1)
    at = {call: number for number, call in reversed(list(enumerate(calls)))}
    renamed = at["rename", step_name(1)]
    assert (
        at["fsync", "data"] < at["fsync", "MANIFEST.json"] < at["fsync", TEMPORARY[:-1]] < renamed
    )
    assert renamed < at["fsync", "ckpt"] < at["replace", LATEST]
    last_sync = max(n for n, call in enumerate(calls) if call == ("fsync", "ckpt"))
    assert last_sync > at["replace", LATEST]


def test_leftovers_of_a_killed_attempt_go_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".tmp-000000000001-aa").mkdir()
    (tmp_path / ".tmp-000000000001-aa" / "half").write_bytes(b"x")
    (tmp_path / ".gone-step-000000000001-aa").mkdir()
    save(tmp_path, 2)
    assert examine(tmp_path).unfinished == ()


def test_a_rank_that_is_lost_is_told_as_such(tmp_path: Path) -> None:
    class Broken:
        rank, size = 0, 2

        def gather(self, *_: Any) -> None:
            raise ExchangeLostError("a peer is gone")

        broadcast = gather

    store = FileStore(tmp_path, Broken())  # type: ignore[arg-type]
    with pytest.raises(LostPeerError, match="a peer is gone") as caught:
        store.save(1, lambda d: None)
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, ExchangeLostError)


def test_a_quota_is_kept_and_the_last_one_too(tmp_path: Path) -> None:
    size = save(tmp_path, 1, bytes(10_000)).bytes
    save(tmp_path, 2, bytes(10_000), keep=9, quota_bytes=2 * size)
    save(tmp_path, 3, bytes(10_000), keep=9, quota_bytes=2 * size + 100)
    assert [c.step for c in examine(tmp_path).complete] == [3, 2]
    with pytest.raises(CheckpointError, match="quota of 15000 bytes lacks"):
        save(tmp_path, 4, bytes(10_000), keep=9, quota_bytes=15_000)
    with pytest.raises(CheckpointError, match="quota"):
        save(tmp_path, 5, bytes(90_000), keep=9, quota_bytes=4 * size)
    assert 3 in [c.step for c in examine(tmp_path).complete]
    assert examine(tmp_path).unfinished == ()


def test_a_position_belongs_to_its_rank_and_to_rank_0_on_another_number(tmp_path: Path) -> None:
    def saves(comm: Comm) -> None:
        FileStore(tmp_path, comm).save(1, lambda d: None, Meta(position={"at": 10 + comm.rank}))

    def loads(comm: Comm) -> Any:
        loaded = FileStore(tmp_path, comm).load(lambda d: None)
        assert loaded is not None
        return loaded.position

    on_all(RANKS, saves)
    assert on_all(RANKS, loads) == [{"at": 10}, {"at": 11}, {"at": 12}]
    assert on_all(2, loads) == [{"at": 10}, {"at": 10}]


def test_rules_have_defaults_that_keep_a_spare() -> None:
    assert Rules() == Rules(keep=2, quota_bytes=None)

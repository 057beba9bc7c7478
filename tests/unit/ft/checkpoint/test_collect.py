"""Collecting blocks: what any checkpoint uses stays, whatever happens around."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slurm_ft.checkpoint.blocks import KEYS, ROOTS, SHORTEST_GRACE_S, BlockStore
from slurm_ft.checkpoint.collect import LOCK, collect, is_there, leftovers
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.manifest import BlockEntry, Manifest

DAY_S = 86400.0


def age(root: Path, seconds: float) -> None:
    """Everything in the store becomes this much older."""
    for path in root.rglob("*"):
        if path.is_file():
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def commit(store: BlockStore, root: Path, name: str, contents: list[bytes]) -> list[BlockEntry]:
    """What a save does to the store, in its order."""
    entries = [store.put(memoryview(content))[0] for content in contents]
    store.settle(entries)
    store.record(root, name, Manifest(1, 1, 1, 0.0, "blocks", blocks=tuple(entries)))
    (root / name).mkdir(parents=True)
    return entries


class Store(RuleBasedStateMachine):
    """Saves, deletions, crashes, time and collections in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.blocks = self.folder / "blocks"
        BlockStore(self.blocks)
        self.live: dict[Path, list[BlockEntry]] = {}
        self.running: list[list[BlockEntry]] = []
        self.number = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(job=st.integers(0, 2), contents=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def save(self, job: int, contents: list[int]) -> None:
        self.number += 1
        root = self.folder / f"job{job}"
        data = [bytes([n]) * 50 for n in contents]
        # A new process for each: nothing is known from the save before.
        self.live[root / f"s{self.number}"] = commit(
            BlockStore(self.blocks), root, f"s{self.number}", data
        )

    @rule(contents=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def begin_a_save_that_is_still_running(self, contents: list[int]) -> None:
        store = BlockStore(self.blocks)
        self.running = [[store.put(memoryview(bytes([n]) * 50))[0] for n in contents]]

    @rule()
    def crash_between_the_note_and_the_rename(self) -> None:
        self.number += 1
        store = BlockStore(self.blocks)
        entry, _ = store.put(memoryview(b"crashed"))
        manifest = Manifest(1, 1, 1, 0.0, "blocks", blocks=(entry,))
        store.record(self.folder / "job0", f"s{self.number}", manifest)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.live:
            path = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[path]
            shutil.rmtree(path)
            if data.draw(st.booleans()):  # else a person deleted it
                BlockStore(self.blocks).forget(path.parent, path.name)

    @rule(hours=st.integers(1, 40))
    def wait(self, hours: int) -> None:
        age(self.blocks, hours * 3600.0)
        self.running = []  # no save takes that long

    @rule(dry_run=st.booleans())
    def collect(self, dry_run: bool) -> None:
        before = {path for _, path in BlockStore(self.blocks).contents()}
        done = collect(BlockStore(self.blocks), grace_s=DAY_S, dry_run=dry_run)
        after = {path for _, path in BlockStore(self.blocks).contents()}
        assert len(before) == done.used + done.young + done.freed
        assert len(before - after) == (0 if dry_run else done.freed)

    @rule()
    def a_day_later_nothing_unused_is_left(self) -> None:
        for _ in range(2):  # the second frees what notes dropped by the first have held
            age(self.blocks, 2 * DAY_S)
            self.running = []
            collect(BlockStore(self.blocks), grace_s=DAY_S)
        used = {entry.key for entries in self.live.values() for entry in entries}
        assert {key for key, _ in BlockStore(self.blocks).contents()} == used

    @invariant()
    def everything_wanted_is_there(self) -> None:
        store = BlockStore(self.blocks)
        for entries in (*self.live.values(), *self.running):
            for entry in entries:
                assert store.damage(entry.key, entry.size) is None


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_a_save_that_wants_a_block_just_now_gets_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlockStore(tmp_path)
    entry, _ = store.put(memoryview(b"x"))
    age(tmp_path, 2 * DAY_S)
    real = os.rename

    def wanted_meanwhile(source: Any, target: Any) -> None:
        os.utime(source)  # between the look at its age and the rename
        real(source, target)
        monkeypatch.undo()

    monkeypatch.setattr(os, "rename", wanted_meanwhile)
    done = collect(store, grace_s=DAY_S)
    assert (done.freed, done.young) == (0, 1)
    assert store.damage(entry.key, entry.size) is None


def test_what_cannot_be_known_stops_or_spares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, root = tmp_path / "blocks", tmp_path / "fs" / "job"
    commit(BlockStore(blocks), root, "s1", [b"x"])
    age(blocks, 9 * DAY_S)
    (note,) = (blocks / ROOTS).rglob(f"*{KEYS}")
    assert collect(BlockStore(blocks)).used == 1
    # Another member's directory, which we may not look into.
    real = os.listdir

    def refuse(path: Any) -> list[str]:
        if path == root:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    shutil.rmtree(root / "s1")
    done = collect(BlockStore(blocks))
    assert (done.used, done.freed, done.unsure) == (1, 0, [str(root / "s1")])
    monkeypatch.undo()
    # A file system that is not mounted: its mount point is there and empty.
    (tmp_path / "fs").rename(tmp_path / "away")
    (tmp_path / "fs").mkdir()
    assert is_there(root, "s1") is None
    done = collect(BlockStore(blocks))
    assert (done.used, done.freed, done.unsure) == (1, 0, [str(root / "s1")])
    # A note that is damaged.
    note.chmod(0o600)
    note.write_text("not a key\n")
    with pytest.raises(CheckpointError, match="nothing is collected"):
        collect(BlockStore(blocks))
    assert len(list(BlockStore(blocks).contents())) == 1


def test_there_is_one_collector(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    collect(store)
    with (tmp_path / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another collection"):
            collect(store)


def test_a_grace_that_saves_cannot_rely_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rely on"):
        collect(BlockStore(tmp_path), grace_s=SHORTEST_GRACE_S - 1)


def test_leftovers_go_when_nobody_writes_them_any_more(tmp_path: Path) -> None:
    for name in (".tmp-000000000001-a", ".tmp-000000000002-b", "step-000000000003", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("x")
    then = time.time() - 2 * DAY_S
    for path in tmp_path.rglob("*"):
        os.utime(path, (then, then))
    os.utime(tmp_path / ".tmp-000000000002-b" / "data")  # still being written
    os.utime(tmp_path / ".tmp-000000000002-b", (then, then))
    assert leftovers(tmp_path, DAY_S, dry_run=True) == (".tmp-000000000001-a",)
    assert (tmp_path / ".tmp-000000000001-a").exists()
    assert leftovers(tmp_path, DAY_S) == (".tmp-000000000001-a",)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".tmp-000000000002-b",
        "mine",
        "step-000000000003",
    ]

"""What counts as a checkpoint, and which one is the newest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import (
    LATEST,
    Complete,
    damage,
    examine,
    free_name,
    is_step_name,
    step_name,
)
from slurm_ft.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from tests.unit.ft.checkpoint.written import save
from tests.unit.powerless import shut


def test_nothing_is_no_error_and_holds_nothing(tmp_path: Path) -> None:
    listing = examine(tmp_path / "not-yet")
    assert (listing.complete, listing.broken, listing.unfinished) == ((), (), ())


def test_a_directory_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    with shut(tmp_path / "c"), pytest.raises(CheckpointError, match="cannot be listed"):
        examine(tmp_path / "c")


def test_complete_is_what_verifies(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, keep=9)
    name = {step: tmp_path / step_name(step) for step in range(1, 6)}
    (name[2] / "data").unlink()
    (name[3] / "data").write_bytes(b"longer")
    (name[4] / MANIFEST).write_text((name[4] / MANIFEST).read_text()[:-9])
    (tmp_path / ".tmp-000000000006-ab").mkdir()
    (tmp_path / "step-6").mkdir()  # not a name of ours
    (tmp_path / step_name(7)).mkdir()
    listing = examine(tmp_path)
    assert [c.step for c in listing.complete] == [5, 1]
    reasons = dict(listing.broken)
    assert "No such file" in reasons[step_name(2)]
    assert "6 bytes, the manifest says 1" in reasons[step_name(3)]
    assert "digest" in reasons[step_name(4)] or "not JSON" in reasons[step_name(4)]
    assert "No such file" in reasons[step_name(7)]
    assert listing.unfinished == (".tmp-000000000006-ab",)
    assert listing.pointer == step_name(5)


def test_the_newest_is_the_one_committed_last_whatever_its_step(tmp_path: Path) -> None:
    for step in (10, 20, 15, 15):
        save(tmp_path, step, keep=9)
    names = [c.path.name for c in examine(tmp_path).complete]
    assert names == [step_name(15, 1), step_name(15), step_name(20), step_name(10)]


def test_a_pointer_that_is_lost_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / LATEST).unlink()
    assert [c.step for c in examine(tmp_path).complete] == [1]


def test_same_size_and_other_content_is_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, b"abc")
    (complete,) = examine(tmp_path).complete
    assert list(damage(complete)) == []
    (complete.path / "data").write_bytes(b"abd")
    (found,) = damage(complete)
    assert "its content is not what was saved" in found
    assert list(damage(complete, deep=False)) == []
    shutil.rmtree(complete.path)
    assert all("No such file" in words for words in damage(complete))


@given(st.integers(0, 40), st.integers(1, 9))
def test_all_ranks_together_look_at_every_file_once(count: int, size: int) -> None:
    entries = tuple(FileEntry(f"f{n}", 1, "0" * 64) for n in range(count))
    complete = Complete(Path("/nowhere"), Manifest(1, 1, 1, 0.0, "dcp", files=entries))
    seen = [w for rank in range(size) for w in damage(complete, share=(rank, size))]
    assert len(seen) == count
    assert len(set(seen)) == count


@given(st.integers(0, 10**13), st.integers(0, 30))
def test_names_of_a_step_never_collide(step: int, saves: int) -> None:
    taken: list[str] = []
    for _ in range(saves):
        taken.append(free_name(step, taken))
    assert len(set(taken)) == saves
    assert all(is_step_name(name) for name in taken)
    assert step_name(step) not in map(step_name, (step + 1, step - 1 if step else 2))


def test_a_link_to_nowhere_is_broken_and_no_crash(tmp_path: Path) -> None:
    os.symlink("/nowhere/at/all", tmp_path / step_name(3))
    assert [name for name, _ in examine(tmp_path).broken] == [step_name(3)]

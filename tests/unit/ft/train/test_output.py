"""Whether a result can be written where it is to go: tried without leaving anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurm_ft.train.output import fault
from tests.unit.powerless import shut


def test_a_directory_that_can_be_made_is_not_made_yet(tmp_path: Path) -> None:
    assert fault(str(tmp_path / "a" / "b")) == ""
    assert list(tmp_path.iterdir()) == []
    assert fault("") == ""


@pytest.mark.parametrize("place", ["/proc/none", "/dev/null", "/dev/null/under"])
def test_where_nothing_can_be_written_is_named(place: str) -> None:
    assert "nothing can be written into" in fault(place)


def test_a_file_and_a_broken_link_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/under", "link", "link/under"):
        assert str(tmp_path) in fault(str(tmp_path / name)), name


def test_what_passes_by_itself_is_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    assert fault(str(tmp_path)) == ""


def test_a_directory_of_others_is_named(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with shut(theirs):
        assert "Permission denied" in fault(str(theirs / "deep" / "out"))

"""A checkpoint directory is tried before the first step: what lasts is refused, the rest is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_ft.session import trial


def test_a_directory_that_can_be_had_is_made_and_left_empty(tmp_path: Path):
    root = tmp_path / "a" / "b"
    assert trial.fault(root, writes=True) == ""
    assert os.listdir(root) == []


def test_to_read_only_nothing_is_made(tmp_path: Path):
    assert trial.fault(tmp_path / "a", writes=False) == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("below", ["", "checkpoints"])
@pytest.mark.parametrize("writes", [True, False])
def test_a_file_in_its_place_is_refused(tmp_path: Path, below: str, writes: bool):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / below
    words = trial.fault(root, writes=writes)
    assert words.startswith(f"{root}: ")
    assert "directory" in words


@pytest.mark.parametrize(
    ("number", "refused"),
    [
        (errno.EACCES, True),
        (errno.EROFS, True),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
        (errno.ESTALE, False),
        (errno.EIO, False),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "listdir"])
def test_only_what_somebody_has_to_mend_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    refused: bool,
    call: str,
):
    """A job that came back to a full disk trains on, and may well find room later."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "x")

    monkeypatch.setattr(os, call, fail)
    words = trial.fault(tmp_path / "ck", writes=True)
    assert bool(words) is refused
    assert ("saves are tried all the same" in caplog.text) is not refused
    if refused:
        assert str(tmp_path / "ck") in words
        assert os.strerror(number) in words

"""The status file: replaced whole, read leniently."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import status
from slurm_ft.status import MAX_STATUS_BYTES, Status, read, replace_text, shorten, write

FULL = Status(
    attempt=2,
    rank=3,
    pid=17,
    at_s=1e9,
    step=10,
    saved_step=8,
    restored_step=0,
    first_step_s=1e9 - 5,
    save_s=0.25,
    stall_s=1.5,
    leaving=status.SIGNALLED,
    failed="ValueError: x",
    heard="SIGUSR2",
    done=True,
    note="ü",
)


@pytest.mark.parametrize("present", [FULL, Status(attempt=0, rank=0, pid=1, at_s=0.0)])
def test_what_is_written_is_read(tmp_path: Path, present: Status) -> None:
    write(tmp_path / "s", present)
    assert read(tmp_path / "s") == present
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_no_file_is_no_status_and_no_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(tmp_path / "s") is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"x" * (MAX_STATUS_BYTES + 1),
        json.dumps({"attempt": 0, "rank": 0, "pid": 1}).encode(),
        FULL.to_json().replace('"version":1', '"version":2').encode(),
        FULL.to_json().replace('"rank":3', '"rank":"3"').encode(),
        FULL.to_json().replace('"rank"', '"rang"').encode(),
    ],
)
def test_what_cannot_be_used_is_as_good_as_none_and_is_told(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "status-0.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read(path) is None
    assert str(path) in caplog.text


def test_a_directory_in_its_place_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path) is None
    assert str(tmp_path) in caplog.text


def test_readers_see_an_old_one_or_a_new_one(tmp_path: Path) -> None:
    """Two writers in threads, as the guard's and the reporter's, and a reader in between."""
    path = tmp_path / "s"
    write(path, FULL)
    ended = threading.Event()

    def keep_writing() -> None:
        while not ended.is_set():
            write(path, FULL)

    threads = [threading.Thread(target=keep_writing) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        seen = [read(path) for _ in range(300)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert seen == [FULL] * 300
    assert os.listdir(tmp_path) == ["s"]


def test_a_failed_write_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    write(path, FULL)
    target = tmp_path / "d"
    (target / "x").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        replace_text(target, "text")
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]
    assert read(path) == FULL


def test_a_link_planted_under_the_temporary_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "s"
    planted = tmp_path / f".s.{os.getpid()}.{threading.get_ident()}"
    planted.symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic links|Too many"):
        write(path, FULL)
    assert victim.read_text() == "mine"


@given(st.text(max_size=5000))
def test_short_words_are_one_line(text: str) -> None:
    line = shorten(text)
    assert len(line) <= 1000
    assert "\n" not in line


def _full(number: int, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Whatever is written into ``directory`` fails with this error."""
    real = status.replace_text

    def write(path: Path, text: str, mode: int = 0o600) -> None:
        if path.parent == directory:
            raise OSError(number, os.strerror(number), str(path))
        real(path, text, mode)

    monkeypatch.setattr(status, "replace_text", write)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_directory_does_not_hide_what_the_session_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """A home directory at its quota lost the job though its checkpoint was saved elsewhere."""
    state = tmp_path / "state"
    state.mkdir()
    path = state / "status-77-0-0-0.json"
    monkeypatch.setattr(status, "_ON_NODE", tmp_path)
    said = Status(attempt=0, rank=0, pid=1, at_s=10.0)
    status.write(path, said)
    _full(number, monkeypatch, state)
    late = Status(attempt=0, rank=0, pid=1, at_s=20.0, leaving=status.SIGNALLED)
    status.write(path, late)
    assert status.read(path) == late
    assert status.exists(path)
    assert status.stead(path).parent.stat().st_mode & 0o777 == 0o700
    path.unlink()
    assert status.exists(path)
    status.forget_stead(path)
    assert status.read(path) is None
    assert not status.exists(path)


def test_a_directory_that_is_gone_does_not_hide_it_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Cleared away while the job ran: it had saved, and was taken for one that had not."""
    monkeypatch.setattr(status, "_ON_NODE", tmp_path)
    path = tmp_path / "state" / "status-77-0-0-0.json"
    said = Status(attempt=0, rank=0, pid=1, at_s=20.0, leaving=status.SIGNALLED)
    status.write(path, said)
    assert status.read(path) == said


def test_the_place_on_the_node_must_be_the_user_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Somebody else could have made it, and say that the job may be requeued for ever."""
    state = tmp_path / "state"
    state.mkdir()
    path = state / "status-77-0-0-0.json"
    monkeypatch.setattr(status, "_ON_NODE", tmp_path)
    other = status.stead(path)
    other.parent.mkdir()
    other.parent.chmod(0o777)
    other.write_text(Status(attempt=0, rank=0, pid=1, at_s=99.0, leaving="signalled").to_json())
    assert status.read(path) is None
    assert not status.exists(path)
    _full(errno.ENOSPC, monkeypatch, state)
    with pytest.raises(OSError, match="No space left"):
        status.write(path, Status(attempt=0, rank=0, pid=1, at_s=20.0))


def test_names_of_any_length_have_a_place_on_the_node():
    deep = Path("/" + "ü" * 200, "x" * 200, "status-77-0-0-0.json")
    name = status.stead(deep).name
    assert len(os.fsencode(name)) <= 200
    assert name.endswith("status-77-0-0-0.json")

"""Requests from outside the job: whose are obeyed, whose are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.domain.codec import dumps
from slurm_ext.domain.errors import ProtocolError, SourceMissingError
from slurm_ext.domain.pausing import PauseAnswer, PauseAsk, parse_ask
from slurm_ft.pause import requests
from slurm_ft.pause.protocol import Rung
from slurm_ft.pause.requests import (
    Letterbox,
    answer_path,
    ask_path,
    read_answer,
    vouched_by,
    write_private,
)

ASK = PauseAsk("0123456789abcdef", "pause", "7", 100.0, Rung.MEMORY)


def put(directory: Path, ask: PauseAsk) -> Path:
    path = ask_path(directory, ask)
    write_private(path, ask)
    return path


def nobody(credential: str, words: str) -> int:
    raise ProtocolError("credential: munge does not confirm it")


@pytest.fixture
def box(tmp_path: Path) -> tuple[Path, Path, list[str], Callable[..., Letterbox]]:
    state, plans = tmp_path / "state", tmp_path / "plans"
    state.mkdir(mode=0o700)
    plans.mkdir()
    told: list[str] = []

    def make(vouched: Callable[[str, str], int] = nobody) -> Letterbox:
        return Letterbox("7", state, plans, told.append, vouched)

    return state, plans, told, make


def test_the_users_own_request_is_taken_once(box: tuple[Path, Path, list[str], object]) -> None:
    state, _, told, make = box
    path = put(state, ASK)
    letters = make()  # type: ignore[operator]
    assert list(letters.take()) == [ASK]
    assert not path.exists()
    assert list(letters.take()) == []
    assert told == []


def test_a_request_that_cannot_be_removed_is_obeyed_once(
    box: tuple[Path, Path, list[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state directory that has become read-only must not end the store of paused ranks."""
    state, _, told, make = box
    put(state, ASK)

    def readonly(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    letters = make()  # type: ignore[operator]
    monkeypatch.setattr(Path, "unlink", readonly)
    assert list(letters.take()) == [ASK]
    assert list(letters.take()) == []
    assert told == [f"{ask_path(state, ASK)}: cannot be removed: Read-only file system"]


def test_what_a_dead_terminal_has_left_is_not_obeyed_by_a_later_attempt(
    box: tuple[Path, Path, list[str], object],
) -> None:
    state, plans, told, _ = box
    put(state, ASK)
    assert list(Letterbox("7", state, plans, told.append, nobody, since_s=1000.0).take()) == []
    assert "from before this attempt" in told[0]
    # Asked while the job starts.
    asked = replace(ASK, at_s=985.0)
    put(state, asked)
    assert list(Letterbox("7", state, plans, told.append, nobody, since_s=1000.0).take()) == [asked]


def test_the_daemons_request_needs_its_credential(
    box: tuple[Path, Path, list[str], object],
) -> None:
    _, plans, told, make = box
    put(plans, ASK)
    assert list(make().take()) == []  # type: ignore[operator]
    assert "munge does not confirm it" in told[0]

    def by(uid: int) -> Callable[[str, str], int]:
        def vouched(credential: str, words: str) -> int:
            assert words == ASK.words()
            return uid

        return vouched

    # Right file, but vouched for by a stranger.
    assert list(make(by(4711)).take()) == []  # type: ignore[operator]
    assert "4711" in told[1]
    letters = make(by(os.getuid()))  # type: ignore[operator]
    assert list(letters.take()) == [ASK]
    # Not ours to delete: it is obeyed once all the same.
    assert list(letters.take()) == []


def test_a_request_that_this_node_cannot_check_is_refused_and_not_only_passed_over(
    box: tuple[Path, Path, list[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """munge is dead on the job's node: who has asked waits, and the reason is known here alone."""
    _, plans, _, make = box

    def dead(argv: list[str], given: str = "") -> str:
        raise SourceMissingError("munge", "Failed to connect: is munged running?")

    monkeypatch.setattr(requests, "_munge", dead)
    put(plans, ASK)
    letters = make(vouched_by)  # type: ignore[operator]
    assert list(letters.take()) == []
    ((ask_id, why),) = letters.unchecked().items()
    assert ask_id == ASK.id
    assert "cannot check who asks" in why
    assert "is munged running?" in why
    assert letters.unchecked() == {}
    # A credential that says something else is no such case, and tells a forger nothing.
    letters = make()  # type: ignore[operator]
    assert list(letters.take()) == []
    assert letters.unchecked() == {}


def test_requests_about_other_jobs_and_links_are_not_obeyed(
    box: tuple[Path, Path, list[str], object], tmp_path: Path
) -> None:
    state, _, told, make = box
    outside = tmp_path / "outside.json"
    write_private(outside, ASK)
    ask_path(state, ASK).symlink_to(outside)
    assert list(make().take()) == []  # type: ignore[operator]
    other = replace(ASK, job_id="8")
    put(state, other).rename(ask_path(state, replace(ASK, id="f" * 16)))
    assert list(make().take()) == []  # type: ignore[operator]
    assert any("about job 8" in line for line in told)


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")
def test_a_file_of_another_user_is_not_obeyed(
    box: tuple[Path, Path, list[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, plans, told, make = box
    for directory in (state, plans):
        os.chown(put(directory, ASK), 4711, 4711)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert list(make(lambda credential, words: 0).take()) == []  # type: ignore[operator]
    assert all("4711" in line for line in told)
    assert len(told) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../etc"},
        {"verb": "kill"},
        {"hold_s": -1.0},
        {"wait_s": 1e9},
        {"version": 2},
    ],
)
def test_what_is_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        parse_ask(dumps(replace(ASK, **change)), "place")  # type: ignore[arg-type]


def test_the_credential_covers_every_word() -> None:
    for change in (
        {"verb": "resume"},
        {"job_id": "8"},
        {"rung": Rung.JOB},
        {"hold_s": 1.0},
        {"at_s": 1.0},
    ):
        assert replace(ASK, **change).words() != ASK.words()  # type: ignore[arg-type]


def _unmunge(answer: str) -> Callable[[list[str], str], str]:
    return lambda argv, given="": answer


def test_munge_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    # As 0.5.16 prints it with --numeric, and as earlier ones do.
    new = (
        "STATUS:          0\nENCODE_HOST:     192.168.112.2\nENCODE_TIME:     1795995165\n"
        "DECODE_TIME:     1795995165\nTTL:             300\nCIPHER:          4\n"
        "MAC:             5\nZIP:             0\nUID:             1007\n"
        f"GID:             2000\nLENGTH:          7\n\n{ASK.words()}"
    )
    good = f"STATUS:           Success (0)\nUID:              1007\nLENGTH: 9\n\n{ASK.words()}"
    for text in (new, good):
        monkeypatch.setattr(requests, "_munge", _unmunge(text))
        assert vouched_by("MUNGE:x", ASK.words()) == 1007
    monkeypatch.setattr(
        requests, "_munge", _unmunge(new.replace("STATUS:          0", "STATUS: 17"))
    )
    with pytest.raises(ProtocolError):
        vouched_by("MUNGE:x", ASK.words())
    monkeypatch.setattr(requests, "_munge", _unmunge(good))
    with pytest.raises(ProtocolError, match="another request"):
        vouched_by("MUNGE:x", replace(ASK, hold_s=9.0).words())
    monkeypatch.setattr(requests, "_munge", _unmunge(good.replace("UID:  ", "UID:  alice (")))
    for bad in (good.replace("Success", "Expired credential"), "", "nonsense\n\n" + ASK.words()):
        monkeypatch.setattr(requests, "_munge", _unmunge(bad))
        with pytest.raises(ProtocolError):
            vouched_by("MUNGE:x", ASK.words())


def test_a_payload_cannot_pose_as_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = "STATUS: Expired (15)\nUID: 1007\n\nSTATUS: Success (0)\nUID: 0\n\n" + ASK.words()
    monkeypatch.setattr(requests, "_munge", _unmunge(forged))
    with pytest.raises(ProtocolError):
        vouched_by("MUNGE:x", ASK.words())


def test_answers(tmp_path: Path) -> None:
    path = answer_path(tmp_path, ASK.id)
    assert read_answer(path) is None
    answer = PauseAnswer(ASK.id, "held", 3, paused_s=0.25)
    write_private(path, answer)
    assert read_answer(path) == answer

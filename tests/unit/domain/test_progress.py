"""A progress report comes from an ordinary user: nothing in it is trusted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.progress import Hold, Progress, parse_progress

GOOD = Progress("12", 0, 1e9, 10, 640, 55.5, 4, 8, 9e8, (0.1, 0.2))


def test_round_trip() -> None:
    assert parse_progress(GOOD.to_json(), "f") == GOOD


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", -1),
        ("step", 1e300),
        ("step", True),
        ("samples_per_s", "fast"),
        ("samples_per_s", float("nan")),
        ("job_id", "x" * 65),
        ("job_id", None),
        ("version", 2),
        ("rank_compute_s", [1e9]),
        ("rank_compute_s", [0] * 5000),
        ("at_s", None),
        ("save_error", "x" * 501),
        ("save_error", 3),
        ("hold", 5),
        ("hold", {"since_s": 1.0}),
        ("hold", {"since_s": 1.0, "until_s": float("inf")}),
        ("hold", {"since_s": 1.0, "until_s": 2.0, "by": "x" * 101}),
        ("hold", {"since_s": 1.0, "until_s": 2.0, "rung": []}),
        ("paused_s", -1),
    ],
)
def test_every_field_is_bounded(key: str, value: object) -> None:
    raw = json.loads(GOOD.to_json())
    raw[key] = value
    with pytest.raises(ProtocolError, match="spool/7"):
        parse_progress(json.dumps(raw), "spool/7")


def test_a_pause_is_read_back() -> None:
    held = replace(GOOD, hold=Hold(9e8, 9e8 + 600, "alice", "memory"), paused_s=3.5)
    assert parse_progress(held.to_json(), "f") == held
    raw = json.loads(held.to_json())
    raw["hold"]["by"] = "al\x1bice"
    found = parse_progress(json.dumps(raw), "f").hold
    assert found is not None
    assert found.by == "al ice"
    # Of an older release.
    del raw["hold"], raw["paused_s"]
    assert parse_progress(json.dumps(raw), "f") == GOOD


def test_words_of_a_job_cannot_draw_on_a_terminal() -> None:
    raw = {**json.loads(GOOD.to_json()), "save_error": "disk\n\x1b[2J full"}
    assert parse_progress(json.dumps(raw), "f").save_error == "disk  [2J full"
    del raw["save_error"]  # of an older release
    assert parse_progress(json.dumps(raw), "f").save_error == ""


@given(st.text(max_size=200))
def test_any_text_is_refused_or_read(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse_progress(text, "f")


def test_a_deep_document_is_refused() -> None:
    with pytest.raises(ProtocolError):
        parse_progress("[" * 8000 + "]" * 8000, "f")

"""A progress report comes from an ordinary user: nothing in it is trusted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.progress import Progress, parse_progress

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
    ],
)
def test_every_field_is_bounded(key: str, value: object) -> None:
    raw = json.loads(GOOD.to_json())
    raw[key] = value
    with pytest.raises(ProtocolError, match="spool/7"):
        parse_progress(json.dumps(raw), "spool/7")


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

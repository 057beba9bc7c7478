"""Slurm's time grammar, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.walltime import format_walltime, parse_slurm_limit, parse_walltime


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("0", 0),
        ("10:30", 630),
        ("90:00", 5400),
        ("1:30:00", 5400),
        ("100:00:00", 360000),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("0-00:00:01", 1),
    ],
)
def test_each_form(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "1:", ":1", "1:60", "1:60:00", "1-24", "1-1:60", "1-1:1:60", "-1", "1--1", "1-"),
        *("1:2:3:4", "+1", " 1", "1\n", "1h", "1.5", "١", "9" * 10, "1-1:2:3:4"),
    ],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError):
        parse_walltime(text)


@given(st.integers(0, 10**9))
def test_writing_and_reading_are_inverse(seconds: int) -> None:
    assert parse_walltime(format_walltime(seconds)) == seconds


def test_a_fraction_is_rounded_up_and_a_negative_time_refused() -> None:
    assert format_walltime(59.2) == "00:01:00"
    assert format_walltime(86400) == "1-00:00:00"
    with pytest.raises(ValueError):
        format_walltime(-1)


@pytest.mark.parametrize("word", ["UNLIMITED", "infinite", "N/A", "NOT_SET", "INVALID", ""])
def test_words_for_no_limit(word: str) -> None:
    assert parse_slurm_limit(word) is None


def test_a_limit_is_a_time_or_an_error() -> None:
    assert parse_slurm_limit(" 2-00:00:00 ") == 172800.0
    with pytest.raises(ValueError):
        parse_slurm_limit("soon")

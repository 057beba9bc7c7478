"""Amounts of bytes as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.amount import parse_bytes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("500000", 500_000),
        ("1k", 1024),
        ("200G", 200 << 30),
        ("200GiB", 200 << 30),
        ("200gb", 200 << 30),
        ("1.5T", 3 << 39),
        (" 7 ", 7),
    ],
)
def test_amounts(text: str, found: int) -> None:
    assert parse_bytes(text) == found


@pytest.mark.parametrize(
    "text", ["", "G", "0", "0.1", "-1", "1X", "1 G", "1e3", "1.2.3K", "nan", "9999P", "."]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


@given(st.integers(1, 1 << 20), st.sampled_from(["", "K", "M", "G"]))
def test_letters_are_powers_of_1024(number: int, letter: str) -> None:
    assert parse_bytes(f"{number}{letter}") == number << 10 * " KMG".find(letter or " ")


@given(st.text(max_size=8))
def test_nothing_else_is_raised(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_bytes(text) > 0

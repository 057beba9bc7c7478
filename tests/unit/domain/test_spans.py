"""Durations and moments in words."""

from __future__ import annotations

from datetime import UTC

import pytest

from slurm_ext.domain.spans import about, counted, moment, span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00:00"),
        (59.6, "00:01:00"),
        (90061, "1-01:01:01"),
        (-5, "-00:00:05"),
        (-0.2, "00:00:00"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.4, "4 s"),
        (59.7, "1 min"),
        (69, "1 min 9 s"),
        (599, "9 min 59 s"),
        (600, "10 min"),
        (1230, "20 min"),
        (3599, "1 h"),
        (4800, "1 h 20 min"),
        (86400, "24 h"),
        (180000, "2 d 2 h"),
        (172800, "2 d"),
    ],
)
def test_about(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_moment_names_the_day_only_when_it_is_another() -> None:
    assert moment(3661, 0, UTC) == "01:01:01"
    assert moment(90061, 0, UTC) == "1970-01-02T01:01:01"


def test_counted() -> None:
    assert [counted(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]

"""One grammar of times for every option of the product."""

from __future__ import annotations

import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.cli import pause
from slurm_ext.cli.main import build_parser
from slurm_ext.cli.manual import page, subcommands
from slurm_ext.domain.duration import parse_duration, seconds_text
from slurm_ext.domain.walltime import format_walltime
from slurm_ft.launch.options import OPTIONS, to_seconds
from slurm_ft.session.interval import parse_bounds
from slurm_ft.session.settings import read_settings

FORMS = {
    "300": 300,
    "1.5": 1.5,
    "0": 0,
    "1e6": 1e6,
    "90s": 90,
    "10m": 600,
    "5M": 300,
    "1.5h": 5400,
    "2d": 172800,
    "10:00": 600,
    "1:30:00": 5400,
    "1-12": 129600,
    "1-12:00:00": 129600,
}


@pytest.mark.parametrize(("text", "seconds"), FORMS.items())
def test_every_form(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "s",
        "m5",
        "5 m",
        "5x",
        "-5",
        "1e999",
        "e3",
        "1_0",
        "nan",
        "inf",
        "1.2.3s",
        "1:75:00",
        "२",
        "4000000d",
    ],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"time|minutes"):
        parse_duration(text)


@given(st.integers(0, 10**6))
def test_what_slurm_prints_is_read_to_the_second(seconds: int) -> None:
    text = format_walltime(seconds)
    assert parse_duration(text) == seconds
    assert parse_duration(seconds_text(float(seconds))) == seconds


@given(st.floats(0, 1e6))
def test_a_variable_loses_nothing(seconds: float) -> None:
    text = seconds_text(seconds)
    if "e" not in text:
        assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["300", "300s", "5m", "5:00", "0:05:00"])
def test_all_options_read_the_same_time(text: str) -> None:
    """--grace=5m was refused where --for=5m was taken, and --for=300 was 300 minutes."""
    assert to_seconds(text, "--grace") == 300
    assert pause.seconds("--for", text) == 300
    low = parse_bounds(f"{text}-30m")
    assert (low.low_s, low.high_s) == (300, 1800)
    settings = read_settings(
        {"FT_GRACE_S": text, "FT_MTBF_S": text, "FT_PROGRESS_INTERVAL_S": text}
    )
    assert (settings.grace_s, settings.mtbf_s, settings.progress_interval_s) == (300, 300, 300)


def _metavars(parser: argparse.ArgumentParser) -> list[str]:
    found = [str(action.metavar) for action in parser._actions if action.metavar]
    for inner in subcommands(parser).values():
        found += _metavars(inner)
    return found


def test_every_option_with_a_time_says_so_by_one_word_and_the_pages_tell_the_form() -> None:
    told = [*_metavars(build_parser()), *(option.metavar for option in OPTIONS)]
    assert not [word for word in told if re.search(r"SECONDS|MINUTES|HOURS|\bS\b", word)]
    assert sum("TIME" in word for word in told) >= 8
    for name in ("ft-run.1", "slurm-ext.1"):
        assert ".SH TIMES" in page(name)

"""MASTER_PORT: outside the ephemeral range, and another one for each attempt and neighbour."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.launch.ports import choose_port, ephemeral_range

USUAL = (32768, 60999)
JOBS = st.integers(1, 2**31)
RANGES = st.tuples(st.integers(1024, 65535), st.integers(1024, 65535)).map(
    lambda pair: (min(pair), max(pair))
)


@given(JOBS, st.integers(0, 100), st.integers(0, 1000), RANGES)
def test_a_port_is_usable_and_not_ephemeral(job, step, attempt, ephemeral):
    port = choose_port(job, step, attempt, ephemeral)
    assert 10_000 <= port <= 65_532
    low, high = ephemeral
    free = max(0, low - 10_000) + max(0, 65_535 - max(high, 9_999))
    if free >= 1024:
        # The three ports next to it are the job's, too.
        assert port + 3 < low or port > high


@given(JOBS, st.integers(0, 50), RANGES)
def test_no_two_attempts_of_a_step_share_a_port(job, step, ephemeral):
    ports = [choose_port(job, step, attempt, ephemeral) for attempt in range(64)]
    assert len(set(ports)) == len(ports)


@given(JOBS, st.integers(0, 200))
def test_neighbouring_jobs_do_not_meet(job, attempt):
    """Also while one of them is some attempts further."""
    first = [choose_port(job + n, 0, attempt, USUAL) for n in range(500)]
    assert len(set(first)) == 500
    assert min(abs(a - b) for a, b in pairwise(first)) >= 4


@pytest.mark.parametrize("text", ["", "one two", "60999 32768", "1"])
def test_a_range_that_cannot_be_read_is_the_usual_one(tmp_path: Path, text: str):
    path = tmp_path / "range"
    assert ephemeral_range(str(path)) == USUAL
    path.write_text(text)
    assert ephemeral_range(str(path)) == USUAL


def test_the_range_is_the_kernel_s(tmp_path: Path):
    (tmp_path / "range").write_text("1024\t40000\n")
    assert ephemeral_range(str(tmp_path / "range")) == (1024, 40000)

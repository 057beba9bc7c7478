"""The Standard Workload Format: unknown is -1, parts are not jobs, bad lines are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.readers.swf import COLUMNS, is_swf, read_swf
from slurm_ext.sim.readers.tracejob import TraceJob
from slurm_ext.sim.trace import read_trace

SMALL = Path(__file__).parents[2] / "data" / "traces" / "small.swf"
GOOD = "1 0 10 100 4 -1 -1 4 3600 -1 1 3 1 7 1 1 -1 -1"


def test_a_small_file() -> None:
    trace = read_trace(SMALL)
    assert trace.fmt == "swf"
    assert trace.jobs == (
        TraceJob(
            "1", 0.0, 100.0, 4, user="3", vc="1", state="COMPLETED", limit_s=3600.0, partition="1"
        ),
        # Allocation unknown: what was requested counts.
        TraceJob("2", 5.5, 50.0, 8, user="4", vc="1", state="FAILED", partition="2"),
        # The line of its part (status 2) is not a second job.
        TraceJob(
            "4", 30.0, 90.0, 2, user="4", vc="1", state="COMPLETED", limit_s=600.0, partition="1"
        ),
    )
    assert sorted(trace.notes) == [
        "1 left out: a part of a job that another line sums up",
        "1 left out: no processors recorded",
        "1 left out: no run time (cancelled before it started, or not recorded)",
    ]
    few, sixty = trace.skipped
    assert f"{SMALL}:12: " in few
    assert "16 fields, not 18" in few
    assert f"{SMALL}:13: run_time='sixty'" in sixty
    with pytest.raises(DataError, match=r"small\.swf:12: "):
        read_trace(SMALL, strict=True)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("job_number", "-1"),
        ("submit_time", "-1"),
        ("run_time", "-2"),
        ("run_time", "nan"),
        ("allocated_processors", "1.5"),
        ("requested_time", "x"),
    ],
)
def test_a_bad_field_is_named(column: str, value: str) -> None:
    cells = GOOD.split()
    cells[0] = "2"
    cells[COLUMNS.index(column)] = value
    trace = read_swf([GOOD, " ".join(cells)], "t.swf")
    assert len(trace.jobs) == 1
    assert f"t.swf:2: {column}='{value}'" in trace.skipped[0]


def test_nothing_to_replay_is_an_error() -> None:
    with pytest.raises(DataError, match="no job to replay, read as swf"):
        read_swf(["; only a header"], "t.swf")


def test_recognition() -> None:
    assert is_swf("; Version: 2")
    assert is_swf(GOOD)
    assert not is_swf(GOOD + " 1")
    assert not is_swf("job_id,submit_s")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**8),
            st.integers(1, 10**7),
            st.integers(1, 65536),
            st.sampled_from("015"),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_is_written_is_read_back(rows) -> None:
    lines = [
        f"{n} {submit} -1 {run} {gpus} -1 -1 -1 -1 -1 {status} -1 -1 -1 -1 -1 -1 -1"
        for n, (submit, run, gpus, status) in enumerate(rows)
    ]
    trace = read_swf(lines, "t.swf", strict=True)
    expected = sorted(enumerate(rows), key=lambda item: item[1][0])
    assert [(int(j.job_id), j.submit_s, j.duration_s, j.gpus) for j in trace.jobs] == [
        (n, submit, run, gpus) for n, (submit, run, gpus, _) in expected
    ]


@given(st.lists(st.text(max_size=60), max_size=6))
def test_any_text_gives_a_trace_or_an_error_of_ours(lines) -> None:
    try:
        trace = read_swf(lines, "t.swf")
    except DataError:
        return
    assert trace.jobs

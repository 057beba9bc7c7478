"""The benchmark beside the published results: it notices a miss, and its bound is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.titan_fm import Row, geometric, misses, run
from tests.bench.titan_fm_data import _fluid, ours, reproduced

WORKLOAD = "FM-1-roberta-base"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    cases = [reproduced(WORKLOAD)[0], ours(WORKLOAD)[-1]]
    return [run(WORKLOAD, "published", case, case.interval_s, None) for case in cases]


def test_what_holds_is_no_miss(rows: list[Row]) -> None:
    assert [row.name for row in rows] == ["srtf", "titan-grow"]
    assert misses(rows) == []


@pytest.mark.parametrize(
    ("index", "field", "factor", "said"),
    [
        (0, "avg_jct_s", 1.04, "srtf on FM-1-roberta-base is off"),
        (0, "makespan_s", 0.96, "srtf on FM-1-roberta-base is off"),
        (1, "avg_jct_s", 1.35, "average JCT is"),
        (1, "makespan_s", 1.03, "makespan is"),
    ],
)
def test_a_miss_is_told(rows: list[Row], index: int, field: str, factor: float, said: str) -> None:
    worse = replace(rows[index].found, **{field: getattr(rows[index].found, field) * factor})
    changed = [replace(row, found=worse) if i == index else row for i, row in enumerate(rows)]
    assert any(said in line for line in misses(changed))


def test_a_longer_tail_is_told(rows: list[Row]) -> None:
    changed = [rows[0], replace(rows[1], p99_s=rows[1].p99_s * 1.06)]
    assert any("p99 is" in line for line in misses(changed))


def test_the_mean_alone_is_judged_too(rows: list[Row]) -> None:
    found = replace(rows[1].found, avg_jct_s=rows[1].found.avg_jct_s / rows[1].avg * 0.95)
    lines = misses([rows[0], replace(rows[1], found=found)])
    assert [line for line in lines if "average" in line] == [
        "titan-grow: average JCT is 0.950 of the published, above 0.9"
    ]


def test_geometric_mean() -> None:
    assert geometric([0.5, 2.0]) == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=12))
def test_shortest_remaining_first_is_no_worse_than_first_come(jobs: list[tuple[int, int]]) -> None:
    submits, works = [float(s) for s, _ in jobs], [float(w) for _, w in jobs]
    found = _fluid(submits, works)
    clock, fifo = 0.0, 0.0
    for submit, work in sorted(zip(submits, works, strict=True)):
        clock = max(clock, submit) + work
        fifo += clock - submit
    assert sum(works) - 1e-9 <= sum(found) <= fifo + 1e-9
    assert all(jct >= work - 1e-9 for jct, work in zip(found, works, strict=True))

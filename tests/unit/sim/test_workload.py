"""The workload reader: good rows, and every bad cell named by file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.workload import COLUMNS, WorkloadJob, parse_workload, read_workload

HEADER = ",".join(COLUMNS)
GOOD = "job-0,45,app,vit-large,imagenette,1,48,4e-4,1,0.98,66283.0"


def with_cell(column: str, value: str) -> str:
    cells = GOOD.split(",")
    cells[COLUMNS.index(column)] = value
    return ",".join(cells)


def test_reads_a_row() -> None:
    assert parse_workload([HEADER, GOOD], "w.csv") == (
        WorkloadJob("job-0", 45.0, "vit-large", "imagenette", 1, 48, 66283.0),
    )


def test_column_order_does_not_matter_and_jobs_come_in_order_of_submission() -> None:
    columns = list(reversed(COLUMNS))
    rows = [",".join(reversed(row.split(","))) for row in (with_cell("job_id", "late"), GOOD)]
    rows[0] = rows[0].replace(",45,late", ",99,late")
    jobs = parse_workload([",".join(columns), *rows], "w.csv")
    assert [job.job_id for job in jobs] == ["job-0", "late"]


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("job_id", "", "empty"),
        ("submit_s", "-1", "outside"),
        ("submit_s", "nan", "outside"),
        ("gpus", "two", "not a number"),
        ("gpus", "1.5", "not whole"),
        ("gpus", "0", "outside"),
        ("target_batch_size", "1e9", "outside"),
        ("total_samples", "inf", "outside"),
        ("total_samples", "0", "outside"),
    ],
)
def test_bad_cell_is_named(column: str, value: str, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_workload([HEADER, GOOD, with_cell(column, value)], "dir/w.csv")
    assert "dir/w.csv, line 3" in str(caught.value)
    assert f"column {column}" in str(caught.value)
    assert reason in str(caught.value)
    assert caught.value.fix


def test_missing_column_is_named() -> None:
    with pytest.raises(DataError, match=r"line 1.*target_lr"):
        parse_workload([HEADER.replace(",target_lr", ""), GOOD], "w.csv")


def test_same_id_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(DataError, match=r"line 3, column job_id.*also on line 2"):
        parse_workload([HEADER, GOOD, GOOD], "w.csv")


def test_row_with_too_many_cells_is_refused() -> None:
    with pytest.raises(DataError, match="more cells than columns"):
        parse_workload([HEADER, GOOD + ",7"], "w.csv")


def test_file_without_jobs_is_refused() -> None:
    with pytest.raises(DataError, match="no jobs"):
        parse_workload([HEADER], "w.csv")


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_workload(tmp_path / "none.csv")


def test_limit_keeps_the_first_jobs_in_time(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    late = with_cell("job_id", "late").replace(",45,", ",99,")
    path.write_text("\n".join([HEADER, late, GOOD]) + "\n")
    assert [job.job_id for job in read_workload(path, limit=1)] == ["job-0"]

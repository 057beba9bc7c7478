"""The rule for the true run time, against numbers worked out by hand, and the hidden error."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.truth import (
    Curve,
    Truth,
    consolidated,
    hidden_error,
    read_table,
    read_truth,
    read_types,
)

# step = 1 s at local batch 10, 2 s at 20 and nothing above; sync 0.5 s.
CURVE = Curve((10.0, 20.0), (1.0, 2.0), (0.5, 0.5))
TRUTH = Truth({("m", (1,)): CURVE, ("m", (4, 4)): CURVE}, {"m": 6.0})


def test_one_micro_batch_between_two_points() -> None:
    # local 15 -> step 1.5; 1500 samples = 100 steps; 30 + 6 + 100 * 1.5
    assert TRUTH.run_s("m", 15, 1500, (1,)) == pytest.approx(186.0)


def test_batch_above_the_table_is_accumulated() -> None:
    # local 60 = 3 micro-batches of 20: 0.5 + 3 * 1.5 = 5 s a step, 10 steps
    assert TRUTH.run_s("m", 60, 600, (1,)) == pytest.approx(36 + 50)


def test_global_batch_is_shared_between_gpus() -> None:
    # 8 GPUs of 20: 160 a step, 10 steps of 2 s
    assert TRUTH.run_s("m", 160, 1600, (4, 4)) == pytest.approx(36 + 20)


def test_below_the_table_the_smallest_batch_counts() -> None:
    assert TRUTH.run_s("m", 8, 800, (4, 4)) == pytest.approx(36 + 100 * 1.0)


@pytest.mark.parametrize(("model", "placement"), [("other", (1,)), ("m", (2,))])
def test_what_nobody_measured_is_an_error(model: str, placement: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="nothing was measured"):
        TRUTH.run_s(model, 8, 100, placement)


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, (1,)), (4, (4,)), (6, (4, 2)), (16, (4, 4, 4, 4))]
)
def test_consolidated(gpus: int, expected: tuple[int, ...]) -> None:
    assert consolidated(gpus, 4) == expected


@given(st.text(min_size=1, max_size=20), st.integers())
def test_hidden_error_is_bounded_and_repeatable(job_id: str, seed: int) -> None:
    error = hidden_error(job_id, seed)
    assert 1 / 1.2 <= error <= 1.2
    assert error == hidden_error(job_id, seed)


def test_hidden_error_is_log_uniform() -> None:
    draws = [math.log(hidden_error(f"job-{i}", 7)) / math.log(1.2) for i in range(4000)]
    quarters = [sum(low <= d < low + 0.5 for d in draws) for low in (-1.0, -0.5, 0.0, 0.5)]
    assert all(900 < count < 1100 for count in quarters)
    assert draws != [math.log(hidden_error(f"job-{i}", 8)) / math.log(1.2) for i in range(4000)]


HEADER = "model,gpu_type,placement,local_batch,step_time_s,sync_time_s"


def write_tables(folder: Path, *rows: str) -> tuple[Path, Path]:
    table = folder / "t.csv.gz"
    with gzip.open(table, "wt") as handle:
        handle.write("\n".join([HEADER, *rows]) + "\n")
    costs = folder / "costs.csv"
    costs.write_text(
        "kind,model,gpu_type,seconds\ncheckpoint,,,99\ncold_start,m,V100,6\ncold_start,m,A100,60\n"
    )
    return table, costs


def test_reads_the_rows_of_one_gpu_type(tmp_path: Path) -> None:
    rows = ("m,V100,44,20,2,.5", "m,V100,44,10,1,.5", "m,A100,1,10,9,0")
    truth = read_truth(*write_tables(tmp_path, *rows))
    assert truth == Truth({("m", (4, 4)): CURVE}, {"m": 6.0})


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ("m,V100,1,10,fast,0", r"line 2, column step_time_s.*'fast'"),
        ("m,V100,1,10,-1,0", r"line 2, column step_time_s"),
        ("m,K80,1,10,1,0", "no row for GPU type V100"),
    ],
)
def test_bad_table_is_refused(tmp_path: Path, row: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_truth(*write_tables(tmp_path, row))


OWN = "model,gpu_type,gpus,nodes,placement,local_batch,accumulation,throughput,step_time_s"
OWN += ",sync_time_s,out_of_memory"


def read_own(
    folder: Path, *rows: str, header: str = OWN
) -> dict[tuple[str, tuple[int, ...]], Curve]:
    path = folder / "own.csv"
    path.write_text("# as slurm-ext table template prints it\n" + "\n".join([header, *rows]) + "\n")
    (curves,) = read_types(path, [""]).values()
    return dict(curves)


def test_a_table_of_ones_own_needs_no_optional_column(tmp_path: Path) -> None:
    header = "model,gpu_type,gpus,nodes,local_batch,throughput"
    curves = read_own(tmp_path, "m,V100,8,2,10,40", "m,V100,1,,10,20", header=header)
    assert curves == {
        ("m", (4, 4)): Curve((10,), (2.0,), (0.0,)),
        ("m", (1,)): Curve((10,), (0.5,), (0.0,)),
    }


@pytest.mark.parametrize(
    ("row", "step", "sync"),
    [
        ("m,V100,8,2,44,10,,40,,,", 2.0, 0.0),
        # Two micro-batches and one sync of 0.5 s take 4.5 s: one of them and its sync 2.5 s.
        ("m,V100,8,2,44,10,2,,4.5,.5,", 2.5, 0.5),
        ("m,V100,8,2,44,10,2,80,,,", 1.0, 0.0),
    ],
)
def test_step_time_from_what_a_row_tells(
    tmp_path: Path, row: str, step: float, sync: float
) -> None:
    assert read_own(tmp_path, row) == {("m", (4, 4)): Curve((10,), (step,), (sync,))}


def test_rows_that_tell_everything_are_not_mixed_with_others(tmp_path: Path) -> None:
    rows = ("m,V100,8,,44,10,,,2,.5,", "m,V100,8,,44,20,,1,,,", "m,V100,16,,16+,10,,16,,,")
    rows += ("m,V100,32,,16+16,10,,0,,,1", "m,V100,7,2,,10,,5,,,")
    assert read_own(tmp_path, *rows) == {
        ("m", (4, 4)): Curve((10,), (2.0,), (0.5,)),
        ("m", (16,)): Curve((10,), (10.0,), (0.0,)),
    }


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("model,gpu_type,local_batch", "m,V100,1", "no column placement or gpus and nodes, step"),
        (OWN, "m,V100,8,2,44,10,,,,,", "line 3: no speed; give throughput"),
        (OWN, "m,V100,8,2,44,10,,0,,,", "no usable row; give local_batch"),
        (OWN, "m,V100,8,2,44,10,,,,,1", "no usable row; give local_batch"),
        (OWN, "m,V100,8,,,10,,5,,,", "line 3, column nodes: empty, as placement is; write"),
        (OWN, "m,V100,two,1,,10,,5,,,", "line 3, column gpus: 'two'; write placement"),
        (OWN, ",V100,8,2,44,10,,5,,,", "line 3, column model: empty"),
        (OWN, "m,,8,2,44,10,,5,,,", "line 3, column gpu_type: empty"),
        (OWN, "m,V100,8", "line 3: not as many cells as columns"),
        (OWN, "m,V100,8,2,44,10,,5,,,,,", "line 3: not as many cells as columns"),
        (OWN, "m,V100,8,2,4x4,10,,5,,,", "line 3, column placement: '4x4'; write 44"),
        (OWN, "m,V100,8,2,44,10,,fast,,,", "line 3, column throughput: 'fast'"),
    ],
)
def test_what_a_table_lacks_is_named(tmp_path: Path, header: str, row: str, said: str) -> None:
    with pytest.raises(DataError) as caught:
        read_own(tmp_path, row, header=header)
    assert said in str(caught.value)


def test_what_is_no_csv_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read: Is a directory; name a readable CSV"):
        read_types(tmp_path, [])
    table = tmp_path / "table.sqlite"
    table.write_bytes(b"SQLite format 3\0\1\xff")
    with pytest.raises(DataError, match="slurm-ext table export"):
        read_types(table, [])


def test_truncated_table_is_refused(tmp_path: Path) -> None:
    table, costs = write_tables(tmp_path, "m,V100,1,10,1,0")
    table.write_bytes(table.read_bytes()[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        read_truth(table, costs)


def test_bad_rows_are_told_and_skipped_also_those_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = ("m,V100,44,10,2,", "m,T4,1,fast,2,", "m,A100,1,10,2,", "m,V100,8", "m,V100,1,10,no,")
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    table = read_table(path, ["V100", "H100"])
    assert dict(table.curves) == {"V100": {("m", (4, 4)): Curve((10,), (2.0,), (0.0,))}}
    assert table.types == ("V100", "T4", "A100")
    assert [line.split("own.csv, ")[1].split(":")[0] for line in table.skipped] == [
        "line 3, column local_batch",
        "line 5",
        "line 6, column step_time_s",
    ]
    with pytest.raises(DataError, match=r"line 3, column local_batch: 'fast'"):
        read_types(path, ["V100"])
    path.write_text("\n".join([HEADER, *rows[3:]]) + "\n")
    with pytest.raises(DataError, match=r"no usable row; 2 bad rows, first .*line 2: not as many"):
        read_table(path, [""])

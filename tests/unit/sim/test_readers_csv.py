"""CSV workloads: published files as they are, every bad cell named, and only bad rows lost."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.library import find_workload, workload_names
from slurm_ext.sim.readers.csvtrace import FORMS, STANDARD_COLUMNS, read_csv, recognise
from slurm_ext.sim.readers.tracejob import TraceJob
from slurm_ext.sim.trace import read_trace
from slurm_ext.sim.workload import read_workload

DATA = Path(__file__).parents[2] / "data" / "traces"
HEADER = ",".join(STANDARD_COLUMNS)
GOOD = "j1,ada,lab,5,60,2,COMPLETED"


def with_cell(column: str, value: str) -> str:
    cells = GOOD.split(",")
    cells[STANDARD_COLUMNS.index(column)] = value
    return ",".join(cells)


def test_philly_as_published() -> None:
    trace = read_trace(DATA / "philly_2017_part1.csv.gz")
    assert (len(trace.jobs), trace.skipped, trace.notes) == (54688, (), ())
    assert trace.jobs[0] == TraceJob("p000000", 0.0, 2240194.0, 8, vc="7f04ca")
    hours = sum(job.gpus * (job.duration_s or 0) for job in trace.jobs) / 3600
    assert hours == pytest.approx(668_621, abs=1)
    assert read_trace(DATA / "philly_2017_part1.csv.gz", "philly").jobs == trace.jobs


def test_muri_as_published() -> None:
    trace = read_trace(DATA / "muri_trace1.csv.gz")
    assert (trace.fmt, len(trace.jobs), trace.skipped) == ("muri", 1494, ())
    assert trace.jobs[1] == TraceJob("1", 201694.0, 4472936.0, 8, model="dqn", batch=128)
    mean_h = sum(job.duration_s or 0 for job in trace.jobs) / 3600 / 1494
    assert mean_h == pytest.approx(69.6, abs=0.05)


def test_pollux_holds_twenty_workloads_of_which_one_is_chosen() -> None:
    path = DATA / "pollux_workloads.csv.gz"
    with pytest.raises(DataError, match=r"holds 20 workloads.*FILE#workload=1,load=0\.5"):
        read_trace(path)
    # A chosen file is told apart before rows are judged, so strict says the same.
    with pytest.raises(DataError, match="holds 20 workloads"):
        read_trace(path, strict=True)
    trace = read_trace(f"{path}#workload=1,load=1.0", strict=True)
    assert (trace.fmt, len(trace.jobs)) == ("pollux", 160)
    assert trace.jobs[0] == TraceJob("cifar10-0", 107.0, None, 6, model="cifar10", batch=2048)
    assert read_trace(path, where={"workload": "1", "load": "1.0"}) == trace
    with pytest.raises(DataError, match="no row with workload=1, load=9"):
        read_trace(f"{path}#workload=1,load=9")
    with pytest.raises(DataError, match="no column nodes"):
        read_trace(f"{path}#nodes=1")


@pytest.mark.parametrize("name", workload_names())
def test_titan_fm_agrees_with_the_strict_reader_of_workloads(name: str) -> None:
    path = find_workload(name)
    trace = read_trace(path)
    assert (trace.fmt, trace.skipped) == ("titan_fm", ())
    assert [
        (j.job_id, j.submit_s, j.model, j.task, j.gpus, j.batch, j.samples) for j in trace.jobs
    ] == [
        (j.job_id, j.submit_s, j.model, j.task, j.gpus, j.batch_size, j.total_samples)
        for j in read_workload(path)
    ]


def test_standard_columns_and_the_optional_ones() -> None:
    lines = [
        "gpus,submit_s,job_id,model,batch_size,total_samples,limit_s,task,gpu_type,partition,x",
        "8.0,1e2,a,vit,64,5e4,7200,cats,a100,gpu,ignored",
    ]
    (job,) = read_csv(lines, "f", "standard").jobs
    assert job == TraceJob(
        "a",
        100.0,
        None,
        8,
        model="vit",
        batch=64,
        samples=5e4,
        limit_s=7200.0,
        task="cats",
        gpu_type="a100",
        partition="gpu",
    )


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("job_id", "", "empty"),
        ("job_id", "\ufffd", "not UTF-8"),
        ("job_id", "x" * 256, "too long"),
        ("submit_s", "", "empty"),
        ("submit_s", "-1", "not a number"),
        ("submit_s", "nan", "not a number"),
        ("submit_s", "1_0", "not a number"),
        ("submit_s", "٣", "not a number"),
        ("submit_s", "1700000000", "not a number from 0"),
        ("duration_s", "inf", "not a number"),
        ("duration_s", "1h", "not a number"),
        ("gpus", "", "empty"),
        ("gpus", "1.5", "not a whole number"),
        ("gpus", "-2", "not a number"),
        ("gpus", "1e9", "not a number"),
        ("user", "a\tb", "not printable"),
    ],
)
def test_a_bad_cell_is_named_and_only_its_row_is_lost(column: str, value: str, reason: str) -> None:
    lines = [HEADER, GOOD.replace("j1", "before"), with_cell(column, value), GOOD]
    trace = read_csv(lines, "dir/w.csv", "standard")
    assert [job.job_id for job in trace.jobs] == ["before", "j1"]
    (message,) = trace.skipped
    assert message.startswith(f"dir/w.csv:3: {column}=")
    assert reason in message
    assert "; " in message
    with pytest.raises(DataError, match=r"w\.csv:3: "):
        read_csv(lines, "dir/w.csv", "standard", strict=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a,b", "2 cells under 7 columns"),
        (GOOD + ",more", "8 cells under 7 columns"),
        ('"j2,ada,lab,5,60,2,COMPLETED', "not CSV"),
        (GOOD, "also on line 2"),
    ],
)
def test_a_row_that_is_no_row_is_named(line: str, reason: str) -> None:
    trace = read_csv([HEADER, GOOD, line], "w.csv", "standard")
    assert len(trace.jobs) == 1
    assert reason in trace.skipped[0]
    assert "w.csv:3: " in trace.skipped[0]


def test_sound_rows_with_nothing_to_replay_are_counted_and_not_refused() -> None:
    lines = [
        HEADER,
        GOOD,
        with_cell("gpus", "0").replace("j1", "j2"),
        with_cell("duration_s", "0").replace("j1", "j3"),
        with_cell("gpus", "0").replace("j1", "j4"),
    ]
    trace = read_csv(lines, "w.csv", "standard", strict=True)
    assert trace.notes == ("2 left out: no GPU", "1 left out: ran for 0 s")


def test_comments_and_blank_lines_keep_the_line_numbers_true() -> None:
    trace = read_csv(["# from", "", HEADER, "# one", GOOD, "bad"], "w.csv", "standard")
    assert "w.csv:6: " in trace.skipped[0]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "no header line"),
        (["# only a comment"], "no header line"),
        ([HEADER], "no job to replay"),
        ([HEADER, "bad"], r"no job to replay.*w\.csv:2"),
        (["job_id,gpus"], "no column submit_s"),
        ([HEADER + ",user", GOOD + ",x"], "user occurs twice"),
        (['"job_id,submit_s,gpus'], "not CSV"),
    ],
)
def test_an_unusable_file_is_refused_also_without_strict(lines: list[str], match: str) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_csv(lines, "w.csv", "standard")
    assert "w.csv" in str(caught.value)


@pytest.mark.parametrize("column", ["model", "target_batch_size", "total_samples"])
@pytest.mark.parametrize("value", ["", "0"])
def test_titan_fm_needs_its_work(column: str, value: str) -> None:
    names = ["job_id", "submit_s", "gpus", "model", "target_batch_size", "total_samples"]
    if column == "model" and value:
        value = " "
    cells = dict(zip(names, ["a", "1", "1", "vit", "32", "1000"], strict=True))
    lines = [",".join(names), ",".join(cells.values())]
    lines.append(",".join((cells | {"job_id": "b", column: value}).values()))
    trace = read_csv(lines, "w.csv", "titan_fm")
    assert [job.job_id for job in trace.jobs] == ["a"]
    assert f"w.csv:3: {column}=" in trace.skipped[0]


def test_every_format_is_recognised_by_the_columns_it_needs() -> None:
    for fmt, form in FORMS.items():
        header = ",".join({*form.known_by, *(form.fields[f][0] for f in form.needed)})
        expected = "standard" if fmt == "philly" else fmt
        assert recognise(header) == expected
    assert recognise("a,b,c") == ""
    assert recognise('"') == ""


# -- properties ----------------------------------------------------------------------------------

_WORD = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=8)
_JOB = st.tuples(
    _WORD,
    _WORD,
    st.integers(0, 10**8),
    st.none() | st.floats(0.5, 10**8),
    st.integers(1, 4096),
    st.sampled_from(["", "COMPLETED", "FAILED"]),
)
_DAMAGE = st.sampled_from(["", "x", '"', "a,b,c", ",,,,,,", "j,u,v,1,1,1e400,s", "\x00"])


def written(rows: list[list[str]]) -> list[str]:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().splitlines()


@given(st.lists(st.tuples(_JOB, st.booleans(), _DAMAGE), min_size=1, max_size=30))
def test_what_is_written_is_read_back_and_damage_costs_its_own_row_only(rows) -> None:
    lines, expected, damaged = [HEADER], [], []
    for index, ((user, vc, submit, duration, gpus, state), damage, junk) in enumerate(rows):
        if damage and junk:
            lines.append(junk)
            damaged.append(len(lines))
            continue
        name = f"job-{index}"
        cells = [name, user, vc, str(submit), "" if duration is None else repr(duration)]
        lines += written([[*cells, str(gpus), state]])
        expected.append(
            TraceJob(name, float(submit), duration, gpus, user=user, vc=vc, state=state)
        )
    if not expected:
        with pytest.raises(DataError):
            read_csv(lines, "f", "standard")
        return
    trace = read_csv(lines, "f", "standard")
    assert list(trace.jobs) == sorted(expected, key=lambda job: job.submit_s)
    assert [int(text.split(":")[1]) for text in trace.skipped] == damaged
    first = read_csv(lines, "f", "standard", limit=1)
    assert first.jobs == trace.jobs[:1]
    if damaged:
        with pytest.raises(DataError, match=f"f:{damaged[0]}: "):
            read_csv(lines, "f", "standard", strict=True)
    else:
        assert read_csv(lines, "f", "standard", strict=True) == trace


@given(st.sampled_from(sorted(FORMS)), st.booleans(), st.lists(st.text(max_size=60), max_size=6))
def test_any_text_gives_a_trace_or_an_error_of_ours(fmt, headed, lines) -> None:
    form = FORMS[fmt]
    if headed:
        lines = [",".join(form.fields[field][0] for field in form.needed), *lines]
    try:
        trace = read_csv(lines, "f", fmt)
    except DataError:
        return
    assert trace.jobs


def test_a_damaged_row_is_not_mixed_into_what_is_wrong_with_the_whole_file() -> None:
    rows = ["job_id,submit_s,gpus", "a,0,0", "b,0,0", "c,soon,1"]
    with pytest.raises(DataError) as caught:
        read_csv(rows, "w.csv", "standard")
    assert "2 left out: no GPU" in str(caught.value)
    assert "soon" not in str(caught.value)

"""CSV rows in both headers: what is read, what is refused and with which words."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.csvtext import (
    COST_TEMPLATE,
    TEMPLATE,
    RowError,
    format_costs,
    format_measurements,
    parse,
    parse_placement,
    placement_text,
)
from slurm_ext.estimate.measurement import Cost, CostKind, Key, Measurement, Settings

TRACE = (
    "model,gpu_type,gpus,nodes,global_batch,accum_steps,throughput,unit,source,placement,"
    "local_batch,step_time_s,sync_time_s"
)
GOOD = "vit,V100,8,2,64,1,640,samples/s,src,44,8,0.1,0.02"


def lines(*rows: str) -> list[str]:
    return [f"{row}\n" for row in rows]


def text(header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue().splitlines(keepends=True)


def test_published_header() -> None:
    (m,) = parse(lines(TRACE, GOOD), "f.csv").measurements
    assert m.key == Key("vit", "V100", 8, 2, (4, 4), 8)
    assert (m.throughput, m.step_time_s, m.sync_time_s, m.count) == (640.0, 0.1, 0.02, 1)
    assert m.key.settings == Settings()


def test_comments_blank_lines_and_byte_order_mark() -> None:
    parsed = parse(["# told\n", "\ufeff" + TRACE + "\n", "\n", "# more\n", GOOD + "\n"], "f")
    assert len(parsed.measurements) == 1


def test_line_numbers_count_comments() -> None:
    (error,) = parse(lines("# a", TRACE, "# b", GOOD.replace("640", "abc")), "f.csv").errors
    assert error.line == 4


@pytest.mark.parametrize(
    ("row", "column", "words"),
    [
        ("vit,V100,8,2,64,1,nan,samples/s,s,44,8,,", "throughput", "plain decimal"),
        ("vit,V100,8,2,64,1,-5,samples/s,s,44,8,,", "throughput", "at least 0"),
        ("vit,V100,8,2,64,1,,samples/s,s,44,8,,", "throughput", "give throughput or step_time_s"),
        ("vit,V100,8,2,64,1,640,samples/s,s,43,8,,", "placement", "holds 7 GPUs, not 8"),
        ("vit,V100,8,2,64,1,640,samples/s,s,4x4,8,,", "placement", "write 44 or 16+16"),
        ("vit,V100,8,3,64,1,640,samples/s,s,44,8,,", "nodes", "the placement has 2 nodes"),
        ("vit,V100,8,,64,1,640,samples/s,s,,8,,", "nodes", "neither nodes nor placement"),
        ("vit,V100,2,3,16,1,640,samples/s,s,,8,,", "nodes", "more nodes than the 2 GPUs"),
        ("vit,V100,8,2,65,1,640,samples/s,s,44,8,,", "global_batch", "is not local batch"),
        ("vit,V100,8,2,,1,640,samples/s,s,44,,,", "local_batch", "give local_batch or"),
        ("vit,V100,8,2,64,1,640,samples/s,s,44,8.5,,", "local_batch", "whole number"),
        ("vit,V100,8,2,64,1,640,samples/s,s,44,8,0.2,", "throughput", "320 samples/s"),
        ("vit,V100,8,2,64,1,640,samples/s,s,44,8,0.1,0.2", "sync_time_s", "longer than the step"),
        ("vit,V100,8,2,64,1,10,steps/s,s,44,8,,", "unit", "only samples/s"),
        (",V100,8,2,64,1,640,samples/s,s,44,8,,", "model", "needed in every row"),
        ("vit,V100,0,2,64,1,640,samples/s,s,44,8,,", "gpus", "from 1 to"),
        ("vit,V100,8", "row", "3 values under 13 columns"),
    ],
)
def test_bad_row_names_everything(row: str, column: str, words: str) -> None:
    parsed = parse(lines(TRACE, GOOD, row), "rows.csv")
    assert len(parsed.measurements) == 1
    (error,) = parsed.errors
    assert (error.file, error.line, error.column) == ("rows.csv", 3, column)
    assert str(error).startswith(f"rows.csv:3: {column}=")
    assert words in str(error)
    assert error.fix


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (TRACE + ",speed", "unknown column 'speed'"),
        (TRACE + ",accumulation", "occurs twice"),
        ("model,gpus,local_batch,throughput", "no column gpu_type"),
        ("kind,model", "no column seconds"),
    ],
)
def test_bad_header(header: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse(lines(header, GOOD), "f.csv")


def test_no_header() -> None:
    with pytest.raises(DataError, match="no header line"):
        parse(["# only a comment\n", "\n"], "f.csv")


def test_not_csv() -> None:
    with pytest.raises(DataError, match=r"f.csv:2.*not CSV"):
        parse([TRACE + "\n", 'vit,"V100,8\n'], "f.csv")
    with pytest.raises(DataError, match="NUL"):
        parse([TRACE + "\n", "vit\0\n"], "f.csv")


def test_zero_throughput_is_out_of_memory() -> None:
    (m,) = parse(lines(TRACE, "vit,V100,8,2,64,1,0,samples/s,s,44,8,,"), "f").measurements
    assert (m.count, m.out_of_memory) == (0, 1)


def test_step_time_alone_is_enough() -> None:
    (m,) = parse(lines(TRACE, "vit,V100,8,2,64,1,,samples/s,s,44,8,0.1,"), "f").measurements
    assert m.throughput == pytest.approx(640.0)


def test_one_node_needs_no_placement() -> None:
    (m,) = parse(lines(TRACE, "vit,V100,3,1,24,1,5,samples/s,s,,8,,"), "f").measurements
    assert m.key.placement == (3,)


def test_costs() -> None:
    parsed = parse(lines("kind,model,gpu_type,seconds", "cold_start,vit,,4.5", "x,,,1"), "c")
    assert parsed.costs == (Cost(CostKind.COLD_START, 4.5, "vit"),)
    assert parsed.errors[0].column == "kind"


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_placement_round_trip(gpus: list[int]) -> None:
    placement = tuple(sorted(gpus, reverse=True))
    assert parse_placement(placement_text(placement)) == placement


words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12)
named = words.filter(lambda w: w and not w.startswith("#"))
real = st.floats(1e-3, 1e9)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    placement = tuple(
        sorted(draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)), reverse=True)
    )
    gpus, nodes = sum(placement), len(placement)
    if draw(st.booleans()) and nodes > 1:
        placement = ()
    settings = Settings(
        draw(words),
        draw(words),
        draw(words),
        draw(words),
        draw(st.none() | st.booleans()),
        draw(st.integers(0, 8)),
        draw(st.integers(0, 8)),
        draw(words),
    )
    key = Key(
        draw(named), draw(named), gpus, nodes, placement, draw(st.integers(1, 999)),
        draw(st.integers(1, 9)), settings,
    )  # fmt: skip
    when = draw(st.none() | st.integers(0, 4 * 10**9).map(float))
    if draw(st.booleans()):
        return Measurement(key, count=0, out_of_memory=draw(st.integers(1, 9)), measured_s=when)
    throughput = draw(real)
    count = draw(st.integers(1, 99))
    step = draw(st.none() | st.just(key.global_batch / throughput))
    return Measurement(
        key,
        throughput,
        step,
        None if step is None else draw(st.none() | st.floats(0, step)),
        draw(st.none() | real),
        draw(real) if count > 1 else None,
        count,
        draw(st.integers(0, 9)),
        when,
        draw(words),
    )


@given(st.lists(measurements(), max_size=5))
def test_export_reads_back_the_same(ms: list[Measurement]) -> None:
    parsed = parse(text(TEMPLATE, list(format_measurements(ms))), "f")
    assert parsed.errors == ()
    assert list(parsed.measurements) == ms


def test_costs_read_back_the_same() -> None:
    costs = [Cost(CostKind.SWITCH, 0.25, "vit", "A100", 4, "s"), Cost(CostKind.CHECKPOINT, 30.0)]
    assert list(parse(text(COST_TEMPLATE, list(format_costs(costs))), "f").costs) == costs


@given(st.lists(st.text(max_size=80), max_size=6), st.booleans())
def test_any_text_is_read_or_refused_with_our_error(rows: list[str], headed: bool) -> None:
    try:
        parsed = parse(([TRACE + "\n"] if headed else []) + [r + "\n" for r in rows], "f")
    except DataError:
        return
    assert all("\n" not in str(error) for error in parsed.errors)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("日本", "'日本'"),
        ("a\x1bb", "'a\\x1bb'"),
        ("a\u202eb", "'a\\u202eb'"),
        ("a\\nb", "'a\\\\nb'"),
    ],
)
def test_a_value_is_shown_as_written_but_for_what_would_not_be_seen(value: str, shown: str) -> None:
    assert str(RowError("f", 1, "c", value, "r", "x")).startswith(f"f:1: c={shown}: ")

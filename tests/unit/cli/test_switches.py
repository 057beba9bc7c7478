"""The report on switches: what the table says, what is drawn, which costs come out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.estimate.csvtext import parse
from slurm_ext.estimate.measurement import CostKind
from slurm_ft.switch.timeline import Kind, Span, Timeline

LINE = Timeline(
    how="overlapped",
    stages=2,
    spans=(
        Span(0, Kind.COMPUTE, -1.0, 0.0, label="old step 9"),
        Span(1, Kind.COMPUTE, -1.0, -0.2, label="old step 9"),
        Span(0, Kind.OUT, 0.0, 0.5, 5_000_000),
        Span(1, Kind.OUT, -0.2, 0.3, 4_000_000),
        Span(0, Kind.IN, 0.1, 0.6, 3_000_000),
        Span(0, Kind.SAVE, 0.5, 2.5),
        Span(0, Kind.COMPUTE, 0.6, 1.6, label="new step 1"),
    ),
    last_step_s=0.0,
    durable_s=2.5,
    first_step_s=1.6,
    model="vit-large",
    gpus=2,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chain = tmp_path / "chain"
    chain.mkdir()
    (chain / "switch-0000.json").write_text(LINE.to_json())
    naive = replace(LINE, how="naive", durable_s=4.0, first_step_s=6.0)
    (chain / "switch-0001.json").write_text(naive.to_json())
    return tmp_path


def test_the_table_tells_seconds_and_bytes_of_each_stage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "switch", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("switch-0000: overlapped, 2 stages")
    heads = lines[2].replace("device to host", "d2h").replace("host to device", "h2d")
    heads = heads.replace("durable save", "save").replace("group rebuild", "group")
    names = heads.replace("MB out", "MBout").replace("MB in", "MBin").split()
    cells = dict(zip(names, lines[3].split(), strict=True))
    assert cells == {
        "stage": "0",
        "compute": "2.000",
        "d2h": "0.500",
        "h2d": "0.500",
        "save": "2.000",
        "group": "0.000",
        "idle": "0.000",
        "MBout": "5.0",
        "MBin": "3.0",
    }
    # Stage 1 did 0.8 + 0.5 s of the 3.5 s.
    assert lines[4].split()[-3] == "2.200"


def test_waiting_inside_a_step_is_not_computing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step waits for the new task's layers in the middle of its forward."""
    waits = (
        Span(0, Kind.WAIT, -5.0, -4.0),
        Span(0, Kind.WAIT, 0.5, 0.8),
        Span(0, Kind.WAIT, 1.0, 1.1),
        Span(0, Kind.WAIT, 1.5, 1.7),
    )
    file = tmp_path / "switch-0000.json"
    file.write_text(replace(LINE, spans=(*LINE.spans, *waits)).to_json())
    assert main(["report", "switch", str(file)]) == 0
    stage = capsys.readouterr().out.splitlines()[3].split()
    # 1 s of the old step, and 0.6 to 1.6 s without 0.2, 0.1 and 0.1 s.
    assert float(stage[1]) == pytest.approx(1.6)


def test_a_damaged_one_among_others_is_named_and_the_others_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = folder / "chain" / "switch-0002.json"
    broken.write_text(LINE.to_json()[:100])
    (folder / "chain" / "switch-0003.json").write_text(LINE.to_json())
    assert main(["report", "switch", str(folder)]) == 1
    said = capsys.readouterr()
    assert "switch-0002.json" in said.err
    shown = [line.split(":")[0] for line in said.out.splitlines() if line.startswith("switch-")]
    assert shown == ["switch-0000", "switch-0001", "switch-0003"]


def test_tasks_windows_and_little_bytes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = (*LINE.spans[:2], Span(0, Kind.OUT, 0.0, 0.5, 4_200), Span(0, Kind.START, 0.5, 1.5))
    line = replace(LINE, old="birds", new="cars", spans=spans)
    (tmp_path / "one.json").write_text(line.to_json())
    assert main(["report", "switch", str(tmp_path / "one.json")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("one birds -> cars: overlapped, 2 stages; ")
    assert "between -1.00 s and 2.50 s" in said[1]
    assert "cold start" in said[2]
    assert said[3].split()[-2:] == ["0.0042", "0.0"]


def test_a_picture_names_tasks_and_what_its_lines_mean(folder: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    line = replace(LINE, old="birds", new="cars")
    (folder / "chain" / "switch-0000.json").write_text(line.to_json())
    picture = folder / "both.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert main(["report", "switch", str(folder), "--plot", str(picture)]) == 0
    text = picture.read_text()
    for words in ("birds -&gt; cars: overlapped", "old task durable", "first step over"):
        assert words in text, words


def test_both_are_drawn_on_one_axis(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = folder / "both.svg"
    assert main(["report", "switch", str(folder), "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert text.count("stage 1") == 2 or text.count('<g id="axes_') == 2
    assert main(["report", "switch", str(folder), "--plot", str(folder / "x.bmp")]) == 1


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slurm_ext.cli.switches.find_spec", lambda name: None)
    assert main(["report", "switch", str(folder), "--plot", str(folder / "x.svg")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install '.[plots]'" in err


def test_measured_costs_are_rows_of_the_table(folder: Path) -> None:
    rows = folder / "costs.csv"
    args = ["report", "switch", str(folder), "--costs", str(rows), "--gpu-type", "V100"]
    assert main(args) == 0
    with rows.open(newline="") as file:
        read = parse(file, str(rows))
    found = {cost.kind: cost for cost in read.costs}
    # End minus last step minus one step of 1 s.
    assert found[CostKind.SWITCH].seconds == pytest.approx(1.5)
    assert found[CostKind.NAIVE_SWITCH].seconds == pytest.approx(5.0)
    assert {(cost.model, cost.gpu_type, cost.gpus) for cost in read.costs} == {
        ("vit-large", "V100", 2)
    }


def test_the_json_is_what_was_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "switch", str(folder / "chain" / "switch-0000.json"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row.pop("name") == "switch-0000"
    assert row == json.loads(LINE.to_json())


def test_a_place_without_switches_and_a_broken_file_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "switch", str(tmp_path)]) == 1
    assert "holds no switches" in capsys.readouterr().err
    broken = tmp_path / "switch-0000.json"
    text = LINE.to_json()
    for damaged in (
        text.replace('"stage":1', '"stage":7'),
        text[: len(text) // 2],
        "",
        "[]",
        "\0" * 100,
        text.replace('"stages":2', '"stages":2000000000'),
        text.replace('"durable_s":', '"durable_s":NaN,"x":'),
        text.replace('"durable_s":', '"durable_s":1e999,"x":'),
        "[" * 100_000,
    ):
        broken.write_text(damaged)
        assert main(["report", "switch", str(broken)]) == 1, damaged[:60]
        assert "switch-0000.json" in capsys.readouterr().err, damaged[:60]


def test_a_cost_that_cannot_be_told_from_nothing_is_no_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 0 would be read as a switch that is free."""
    short = replace(LINE, durable_s=0.4, first_step_s=0.9)
    (folder / "chain" / "switch-0000.json").write_text(short.to_json())
    rows = folder / "costs.csv"
    assert main(["report", "switch", str(folder), "--costs", str(rows)]) == 0
    told = capsys.readouterr()
    assert "switch of vit-large on 2 GPUs is left out of the costs: no longer than a step" in (
        told.err
    )
    assert f"1 cost in {rows}: slurm-ext table import" in told.out
    with rows.open(newline="") as file:
        assert [cost.kind for cost in parse(file, str(rows)).costs] == [CostKind.NAIVE_SWITCH]
    rows.unlink()
    (folder / "chain" / "switch-0001.json").unlink()
    assert main(["report", "switch", str(folder), "--costs", str(rows)]) == 1
    told = capsys.readouterr()
    assert f"{rows} is not written: it has no cost" in told.err
    assert "table import" not in told.out
    assert not rows.exists()

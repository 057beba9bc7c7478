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
    heads = lines[1].replace("device to host", "d2h").replace("host to device", "h2d")
    heads = heads.replace("durable save", "save").replace("group rebuild", "group")
    names = heads.replace("MB out", "MBout").replace("MB in", "MBin").split()
    cells = dict(zip(names, lines[2].split(), strict=True))
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
    assert lines[3].split()[-3] == "2.200"


def test_both_are_drawn_on_one_axis(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = folder / "both.svg"
    assert main(["report", "switch", str(folder), "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert text.count("stage 1") == 2 or text.count('<g id="axes_') == 2
    assert main(["report", "switch", str(folder), "--plot", str(folder / "x.bmp")]) == 1


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
    broken.write_text(LINE.to_json().replace('"stage":1', '"stage":7'))
    assert main(["report", "switch", str(broken)]) == 1
    assert "switch-0000.json" in capsys.readouterr().err

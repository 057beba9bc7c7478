"""``slurm-ext report fit`` as typed: text, JSON, bad rows, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.cli.report import ERRORS_SHOWN
from slurm_ext.domain.options import BY_NAME
from slurm_ext.sim.advice import advise
from slurm_ext.sim.fit import fit as fit_of
from slurm_ext.sim.readers.sacct import read_sacct
from slurm_ext.sim.readers.sacctfile import FORMAT

RECORDED = Path(__file__).parents[2] / "data" / "sacct" / "allocations_24.11.5.txt"


def fit(*words: str) -> int:
    return main(["report", "fit", *words])


def test_the_report_of_a_recorded_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--from-sacct", str(RECORDED)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "27 in 3 min 54 s, 0.1 GPU hours",
        "17 x 1, 5 x 2, 1 x 3, 3 x 4, 1 x 8",
        "2: vit-large (3), bert (2)",
        "20-21       27       31 %",
        "16 GPUs on 4 nodes",
        "27 jobs are too few to judge",
        "4 left out: still waiting",
    ):
        assert words in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_json_holds_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--from-sacct", str(RECORDED), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["jobs"] == 27
    assert document["bad_rows"] == 0
    assert document["hours"] == [
        {"hour": 20, "jobs": 27, "queue_share": pytest.approx(0.31, abs=0.001)}
    ]
    assert document["fragments"]["gpus"] == 16
    assert {one["verdict"] for one in document["advice"]} == {"cannot tell"}


def test_bad_rows_are_told_on_stderr_or_refuse_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.txt"
    path.write_text(RECORDED.read_text() + "damaged\n" * (ERRORS_SHOWN + 2))
    assert fit("--from-sacct", str(path)) == 0
    out, err = capsys.readouterr()
    assert "bad rows skipped             22" in out
    assert err.count("1 cells under 17 columns") == ERRORS_SHOWN
    assert "... and 2 more bad rows" in err
    assert fit("--from-sacct", str(path), "--strict") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}:41: " in err


def test_a_pattern_names_models_and_a_wrong_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert fit("--from-sacct", str(RECORDED), "--model-pattern", "ARRAY", "--json") == 0
    top = dict(json.loads(capsys.readouterr().out)["reuse"]["top"])
    assert top["array"] == 5
    assert fit("--from-sacct", str(RECORDED), "--model-pattern", "(") == 1
    assert "--model-pattern='(': not a regular expression" in capsys.readouterr().err


def test_a_file_without_heading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.txt"
    path.write_text(RECORDED.read_text().partition("\n")[2])
    assert fit("--from-sacct", str(path)) == 1
    assert "leave --noheader out" in capsys.readouterr().err
    assert fit("--from-sacct", str(path), "--columns", FORMAT, "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == 27


def test_without_nodes_fragments_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.txt"
    path.write_text(RECORDED.read_text().replace("NodeList", "Reserved", 1))
    assert fit("--from-sacct", str(path)) == 0
    assert "cannot tell: the file has no NodeList" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fit()
    assert caught.value.code == 2
    capsys.readouterr()
    assert fit("--from-sacct", str(RECORDED), "--gpus-per-node=0") == 1
    assert "--gpus-per-node=0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fit("--help")
    shown = capsys.readouterr().out
    assert FORMAT in shown


def test_settings_named_in_the_advice_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--from-sacct", str(RECORDED)) == 0
    out = capsys.readouterr().out
    named = {word.partition("=")[0].strip(",.") for word in out.split() if word.startswith("--ft-")}
    assert named == {"--ft-gpus", "--ft-merge", "--ft-switch", "--ft-max-pause"}
    assert {name.removeprefix("--ft-") for name in named} <= set(BY_NAME)


def test_what_nothing_carries_out_yet_is_not_recommended() -> None:
    """Beside options that are kept and have no effect, the advice says so."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    idle = readme.partition("## Not done yet")[2].partition("\n## ")[0]
    for one in advise(fit_of(read_sacct(RECORDED.read_text().splitlines(), "x"))):
        for option in re.findall(r"--ft-[a-z-]+", one.setting):
            assert (option in idle) == (f"{option} has no effect yet" in one.setting), option

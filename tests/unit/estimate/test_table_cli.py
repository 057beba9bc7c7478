"""``slurm-ext table``: import, list, show, export, template."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from slurm_ext.cli import table
from slurm_ext.domain.errors import DataError, SlurmExtError
from slurm_ext.estimate.table import read_table

HEADER = "model,gpu_type,gpus,nodes,placement,local_batch,throughput,source\n"
GOOD = "vit,V100,8,2,44,8,640,mine\nvit,V100,1,1,1,8,100,mine\nbert,T4,1,1,1,8,50,mine\n"


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    table.register(parser.add_subparsers())
    args = parser.parse_args(["table", *words])
    return int(args.run(args))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.sqlite"


@pytest.fixture
def filled(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = tmp_path / "good.csv"
    file.write_text(HEADER + GOOD)
    assert call("import", "--table", str(path), str(file)) == 0
    capsys.readouterr()
    return str(path)


def test_import_plain_and_gzip_once(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress((HEADER + GOOD).encode()))
    assert call("import", "--table", str(path), str(packed)) == 0
    assert call("import", "--table", str(path), str(packed)) == 0
    assert "imported before" in capsys.readouterr().out
    assert [m.count for m in read_table(path).measurements] == [1, 1, 1]
    assert call("import", "--table", str(path), "--again", str(packed)) == 0
    assert [m.count for m in read_table(path).measurements] == [2, 2, 2]


def test_bad_rows_are_skipped_and_named(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(HEADER + GOOD + "vit,V100,8,2,44,8,fast,mine\n")
    assert call("import", "--table", str(path), str(file)) == 0
    captured = capsys.readouterr()
    assert "1 bad row skipped" in captured.out
    assert f"{file}:5: throughput='fast'" in captured.err
    assert len(read_table(path).measurements) == 3


def test_strict_refuses_everything(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text(HEADER + GOOD)
    bad.write_text(HEADER + "vit,V100,8,2,44,8,fast,mine\n")
    assert call("import", "--strict", "--table", str(path), str(good), str(bad)) == 1
    assert "nothing imported" in capsys.readouterr().err
    assert not path.exists()


def test_many_bad_rows_are_counted(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(HEADER + "vit,V100,8,2,44,8,fast,mine\n" * 50)
    assert call("import", "--table", str(path), str(file)) == 1
    err = capsys.readouterr().err
    assert "and 30 more bad rows" in err
    assert "no usable row" in err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x1f\x8b\x08garbage", "damaged gzip"),
        (b"model,gpu_type\xff\xfe\n", "UTF-8"),
        (b"", "no header"),
        (b"a,b\n1,2\n", "unknown column"),
    ],
)
def test_unusable_file(path: Path, tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(data)
    with pytest.raises(DataError, match=words):
        call("import", "--table", str(path), str(file))
    assert not path.exists()


def test_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        call("import", "--table", str(path), "/nonexistent.csv")


def test_what_to_import_is_said_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("import", "--table", str(path)) == 2
    assert call("import", "--table", str(path), "--starter", "f.csv") == 2
    assert "--starter" in capsys.readouterr().err


def test_starter(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("import", "--starter", "--table", str(path)) == 0
    assert call("list", "--noheader", "-o", "%m|%g|%G", "--table", str(path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "vit-large|V100|1-64" in lines
    assert "bert|T4|1-64" in lines
    content = read_table(path)
    assert len(content.costs) == 7
    twice = [m for m in content.measurements if m.count > 1]
    assert twice
    assert all(m.variance is not None for m in twice)


def test_list(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("list", "--table", filled) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["MODEL", "GPU_TYPE", "ROWS"]
    assert out[2].split()[:4] == ["vit", "V100", "2", "1-8"]
    assert call("list", "--json", "--table", filled) == 0
    document = json.loads(capsys.readouterr().out)
    assert [d["model"] for d in document] == ["bert", "vit"]
    assert document[1]["gpus"] == [1, 8]


def test_show(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "vit", "-h", "-o", "%G %P %t", "--table", filled) == 0
    assert capsys.readouterr().out.splitlines() == ["1 1 100", "8 44 640"]
    assert call("show", "vit", "--gpus=8", "--gpu-type=v100", "--json", "--table", filled) == 0
    (document,) = json.loads(capsys.readouterr().out)
    assert document["placement"] == [4, 4]
    assert document["throughput"] == 640.0


def test_show_what_is_not_there(filled: str) -> None:
    with pytest.raises(DataError, match="no model nope"):
        call("show", "nope", "--table", filled)
    with pytest.raises(DataError, match="measured on V100"):
        call("show", "vit", "-g", "T4", "--table", filled)


def test_unknown_field(filled: str) -> None:
    with pytest.raises(SlurmExtError, match="is not a field"):
        call("list", "-o", "%Z", "--table", filled)


def test_export_can_be_imported(
    filled: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("export", "--table", filled) == 0
    file, other = tmp_path / "out.csv", tmp_path / "other.sqlite"
    file.write_text(capsys.readouterr().out)
    assert call("import", "--strict", "--table", str(other), str(file)) == 0
    assert read_table(other) == read_table(Path(filled))
    capsys.readouterr()
    assert call("export", "--model", "bert", "--table", filled) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_template_is_a_usable_header(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, row in (
        ([], "vit,,,V100,1,1,,8,,,,,,,,10,,,,,,,,\n"),
        (["--costs"], "switch,,,,2,\n"),
    ):
        assert call("template", *words) == 0
        file = tmp_path / "template.csv"
        file.write_text(capsys.readouterr().out + row)
        assert call("import", "--strict", "--table", str(path), str(file)) == 0
        capsys.readouterr()
    assert len(read_table(path).measurements) == len(read_table(path).costs) == 1


def test_table_of_the_configuration(
    path: Path, tmp_path: Path, filled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"table: {filled}\n")
    assert call("list", "--noheader", "-o", "%m", "--config", str(config)) == 0
    assert capsys.readouterr().out.split() == ["bert", "vit"]


def test_a_placement_tells_gpus_and_nodes(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The columns that suffice for a replay suffice here."""
    file = tmp_path / "own.csv"
    file.write_text(
        "model,gpu_type,placement,local_batch,throughput\nm,H100,44,8,640\nm,H100,,8,1\n"
    )
    assert call("import", "--table", str(path), str(file)) == 0
    assert "own.csv:3: gpus='': empty; give placement, or gpus and nodes" in capsys.readouterr().err
    (row,) = read_table(path).measurements
    assert (row.key.gpus, row.key.nodes, row.key.placement) == (8, 2, (4, 4))
    file.write_text("model,gpu_type,local_batch,throughput\nm,H100,8,640\n")
    with pytest.raises(DataError, match="no column gpus or placement"):
        call("import", "--table", str(path), str(file))

"""The table on disk: merging, atomic imports, reading as another user, damage."""

from __future__ import annotations

import os
import sqlite3
import stat
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.estimate.measurement import Cost, CostKind, Measurement
from slurm_ext.estimate.table import (
    DEFAULT_TABLE,
    Content,
    TableWriter,
    load_index,
    read_table,
    table_stamp,
)
from tests.unit.estimate.builders import row


def filled(path: Path, *measurements: Measurement) -> Path:
    with TableWriter(path) as table:
        table.add(measurements, [Cost(CostKind.CHECKPOINT, 30.0)])
    return path


def test_round_trip(tmp_path: Path) -> None:
    rows = (
        row(8, 10.0, 8, sync=0.01, memory_gb=3.5, measured_s=5.0),
        row(16, 0.0, 20, placement=(16, 4)),
        row(8, 9.0, accumulation=4),
    )
    content = read_table(filled(tmp_path / "t.sqlite", *rows))
    assert set(content.measurements) == set(rows)
    assert content.costs == (Cost(CostKind.CHECKPOINT, 30.0),)
    assert content.index().knows("m")


def test_default_is_the_one_of_the_configuration() -> None:
    config = pytest.importorskip("slurm_ext.control.config")
    assert config.Config().table == DEFAULT_TABLE


@given(st.lists(st.floats(1.0, 1e4), min_size=2, max_size=12))
def test_merging_is_mean_and_variance(values: list[float]) -> None:
    merged = row(8, values[0])
    for value in values[1:]:
        merged = merged.merged(row(8, value))
    assert merged.count == len(values)
    assert merged.throughput == pytest.approx(statistics.fmean(values))
    assert merged.variance == pytest.approx(statistics.variance(values), rel=1e-6, abs=1e-6)


def test_merging_keeps_the_latest_source_and_the_largest_memory() -> None:
    merged = row(8, 10.0, memory_gb=3.0, measured_s=9.0, source="new").merged(
        row(8, 20.0, memory_gb=4.0, measured_s=1.0, source="old")
    )
    assert (merged.memory_gb, merged.measured_s, merged.source) == (4.0, 9.0, "new")
    assert merged.merged(row(8, 0.0)).out_of_memory == 1
    assert merged.merged(row(8, 0.0)).throughput == 15.0


def test_measuring_again_merges_into_the_row(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", row(8, 10.0))
    filled(path, row(8, 20.0), row(16, 5.0))
    eight, sixteen = read_table(path).measurements
    assert (eight.throughput, eight.count, eight.variance) == (15.0, 2, 50.0)
    assert sixteen.count == 1


def test_the_same_file_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with TableWriter(path) as table:
        assert table.add([row(8, 10.0)], digest="d", name="f.csv", at_s=1.0)
        assert not table.add([row(8, 10.0)], digest="d", name="copy.csv", at_s=2.0)
    assert read_table(path).measurements[0].count == 1


def test_nothing_is_half_imported(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", row(8, 10.0))
    before = read_table(path)

    def failing() -> object:
        yield row(16, 5.0)
        raise RuntimeError("reader died")

    with TableWriter(path) as table, pytest.raises(RuntimeError):
        table.add(failing(), digest="d")  # type: ignore[arg-type]
    assert read_table(path) == before
    with TableWriter(path) as table:
        assert table.add([row(16, 5.0)], digest="d")


def test_stamp_changes_with_the_content(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", row(8, 10.0))
    before = table_stamp(path)
    assert table_stamp(path) == before
    filled(path, row(16, 5.0))
    assert table_stamp(path) != before
    assert table_stamp(tmp_path / "none") == (0,) * 6


def test_readable_for_everybody_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = filled(tmp_path / "t.sqlite", row(8, 10.0))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_reader_beside_an_open_writer(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with TableWriter(path) as table:
        table.add([row(8, 10.0)])
        assert len(read_table(path).measurements) == 1


def test_missing_is_not_empty(tmp_path: Path) -> None:
    with pytest.raises(SourceMissingError, match="slurm-ext table import"):
        load_index(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()
    with pytest.raises(DataError, match="mkdir -p"):
        TableWriter(tmp_path / "no" / "t.sqlite")


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(b"model,gpu_type\n" * 100)
    with pytest.raises(DataError, match=r"damaged.*move the file away"):
        load_index(path)
    with pytest.raises(DataError, match="damaged"):
        TableWriter(path)
    assert path.read_bytes().startswith(b"model")


def test_damaged_in_the_middle(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", *(row(b, 1.0 * b) for b in range(1, 3000)))
    data = bytearray(path.read_bytes())
    for page in range(4096, len(data), 4096):
        data[page : page + 200] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        load_index(path)


def test_cut_off(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", *(row(b, 1.0 * b) for b in range(1, 3000)))
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises((DataError, SourceMissingError), match="move the file away"):
        load_index(path)


def test_another_programs_database(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE x (y)")
    with pytest.raises(DataError, match="not a throughput table"):
        load_index(path)
    with pytest.raises(DataError, match="not a throughput table"):
        TableWriter(path)


def test_newer_schema(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(DataError, match=r"version 99, this release knows 1"):
        load_index(path)


def test_value_that_no_release_wrote(tmp_path: Path) -> None:
    path = filled(tmp_path / "t.sqlite", row(8, 1.0))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE costs SET kind = 'nonsense'")
    with pytest.raises(DataError, match="damaged"):
        load_index(path)


# Becomes the other user only after its imports: the interpreter may lie in a private directory.
READ = """
import os, sqlite3, sys
from pathlib import Path
from slurm_ext.estimate.table import read_table
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(len(read_table(Path(sys.argv[1])).measurements))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("writing", [False, True], ids=["alone", "beside a writer"])
def test_an_ordinary_user_reads(tmp_path: Path, writing: bool) -> None:
    directory = tmp_path / "lib"
    directory.mkdir(mode=0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & stat.S_IXOTH:
            os.chmod(parent, parent.stat().st_mode | stat.S_IXOTH)
    os.chmod(tmp_path, 0o755)
    path = directory / "t.sqlite"
    table = TableWriter(path)
    table.add([row(8, 10.0)])
    if not writing:
        table.close()
    try:
        done = subprocess.run(
            [sys.executable, "-c", READ, path],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]},
        )
    finally:
        table.close()
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
    assert path.stat().st_mode & 0o777 == 0o644


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_order_of_measuring_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("t")

    def content(name: str, order: list[int]) -> Content:
        return read_table(filled(directory / name, *(row(b, 10.0 + b) for b in order)))

    assert content("a", batches) == content("b", batches[::-1])

"""The one door: recognition by the first line, compressed files, standard input, refusals."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.trace import FORMATS, read_lines, read_trace

STANDARD = "job_id,user,vc,submit_s,duration_s,gpus,state\na,,,0,5,1,\nb,,,1,5,1,\n"
SWF = "1 0 -1 9 4 -1 -1 -1 -1 -1 1 -1 -1 -1 -1 -1 -1 -1\n"
SACCT = (
    "JobID|State|Submit|Start|End|AllocTRES\n"
    "7|COMPLETED|2025-03-01T10:00:00|2025-03-01T10:00:00|2025-03-01T11:00:00|gres/gpu=2\n"
)


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        (STANDARD, "standard"),
        ("\ufeff" + STANDARD, "standard"),
        ("# comment\n\n" + STANDARD, "standard"),
        (STANDARD.replace("\n", "\r\n"), "standard"),
        (SWF, "swf"),
        ("; header\n" + SWF, "swf"),
        (SACCT, "sacct"),
        (SACCT.replace("|", ","), "sacct"),
        ("\n" + SACCT, "sacct"),
    ],
)
def test_the_first_line_tells_the_format(tmp_path: Path, text: str, fmt: str) -> None:
    path = tmp_path / "any.name"
    path.write_text(text, newline="")
    trace = read_trace(path)
    assert (trace.fmt, trace.skipped) == (fmt, ())
    assert read_trace(path, fmt) == trace


def test_a_compressed_file_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "w.csv"
    plain.write_text(STANDARD)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(STANDARD.encode()))
    assert read_trace(packed).jobs == read_trace(plain).jobs
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(STANDARD.encode())))
    )
    assert read_trace("-").jobs == read_trace(plain).jobs


def test_limit_and_where(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    path.write_text(STANDARD)
    assert [job.job_id for job in read_trace(path, limit=1).jobs] == ["a"]
    assert [job.job_id for job in read_trace(path, where={"job_id": "b"}).jobs] == ["b"]
    assert [job.job_id for job in read_trace(f"{path}#job_id=b").jobs] == ["b"]
    with pytest.raises(DataError, match="keeps no job"):
        read_trace(path, limit=0)
    with pytest.raises(DataError, match="'b' is not COLUMN=VALUE"):
        read_trace(f"{path}#b")
    with pytest.raises(DataError, match="no row with job_id=c; choose values"):
        read_trace(f"{path}#job_id=c")
    odd = tmp_path / "w#b.csv"
    odd.write_text(STANDARD)
    assert len(read_trace(odd).jobs) == 2


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes("a\x1eb\u2028c\r\nd\x0be".encode())
    assert read_lines(str(path)) == ["a\x1eb\u2028c", "d\x0be"]


def test_a_byte_that_is_not_utf8_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(STANDARD.encode() + b"c\xff,,,1,5,1,\n")
    trace = read_trace(path)
    assert len(trace.jobs) == 2
    assert "w:4: job_id=" in trace.skipped[0]


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")
    damaged = tmp_path / "w.gz"
    damaged.write_bytes(gzip.compress(STANDARD.encode() * 99)[:-9])
    with pytest.raises(DataError, match="damaged gzip"):
        read_trace(damaged)
    unknown = tmp_path / "w.txt"
    unknown.write_text("hello\n")
    with pytest.raises(DataError, match=r"w\.txt: not a workload.*standard"):
        read_trace(unknown)
    with pytest.raises(DataError, match="format 'xml': is not known"):
        read_trace(unknown, "xml")
    swf = tmp_path / "w.swf"
    swf.write_text(SWF)
    with pytest.raises(DataError, match="rows of swf cannot be chosen"):
        read_trace(f"{swf}#x=1")
    monkeypatch.setattr("slurm_ext.sim.trace.MAX_BYTES", 10)
    with pytest.raises(DataError, match="larger than"):
        read_trace(swf)
    bomb = tmp_path / "bomb"
    bomb.write_bytes(gzip.compress(b"\0" * 1000, 9))
    monkeypatch.setattr("slurm_ext.sim.trace.MAX_BYTES", 100)
    with pytest.raises(DataError, match="larger than"):
        read_trace(bomb)


def test_every_format_can_be_named() -> None:
    assert set(FORMATS) == {
        "auto",
        "standard",
        "titan_fm",
        "philly",
        "pollux",
        "muri",
        "swf",
        "sacct",
    }

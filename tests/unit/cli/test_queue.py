"""``slurm-ext queue``: one line per job, in the manner of squeue."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.cli.queue import LETTERS
from slurm_ext.domain.document import ENDED
from slurm_ext.domain.plan import Verdict
from tests.unit.cli.spooled import MADE_S, Site, decision, document, whole


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.write(
        document(3, decision(Verdict.START, rank=0), state="RUNNING", present_gpus=8),
        document(8, decision(rank=1, waits_for="at least 1 GPU"), place=2, places=2),
        document(7, decision(Verdict.START, rank=0, nodes=("n1", "n2")), place=1, places=2),
        document(9, decision(Verdict.LEAVE, rank=2), user="bob", partition="high", place=None),
        document(5, decision(rank=3), state=ENDED),
    )
    return site


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_usual_table(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("queue") == 0
    rows = lines(capsys)
    heading = " ".join(rows[0].split())
    assert heading == "JOBID PARTITION USER ST GPUS PLAN PLACE VERDICT WORK START REASON"
    assert [row.split()[0] for row in rows[1:]] == ["9", "7", "8", "3"]
    assert rows[3].split()[:8] == ["8", "main", "alice", "PD", "4", "~2", "2", "wait"]
    assert "waits for at least 1 GPU" in rows[3]
    assert rows[4].split()[3:6] == ["R", "8", "2"]


def test_a_format_of_ones_own_without_a_heading(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.run("queue", "-h", "-o", "%i|%.4G|%N", "-p", "main") == 0
    assert lines(capsys) == ["7|   2|n[1-2]", "8|  ~2|-", "3|   2|-"]
    site.run("queue", "--noheader", "--format=%i %G %t", "-j", "9")
    assert lines(capsys) == ["9 - PD"]


def test_every_field_prints_for_every_job(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    text = "|".join(f"%{letter}" for letter in LETTERS)
    assert site.run("queue", "-o", text) == 0
    rows = lines(capsys)
    assert len(rows) == 5
    assert {row.count("|") for row in rows} == {len(LETTERS) - 1}


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (("-u", "bob"), ["9"]),
        (("-u", "bob,alice", "-p", "main"), ["7", "8", "3"]),
        (("--user", "nobody"), []),
        (("-j", "8,9_1"), ["9", "8"]),
        (("-j", "5"), ["5"]),  # ended: only when named
        (("-j", "12345"), []),
    ],
)
def test_filters(
    site: Site, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], ids: list[str]
) -> None:
    assert site.run("queue", "-h", "-o", "%i", *words) == 0
    assert lines(capsys) == ids


def test_json_is_a_list_of_documents(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("queue", "--json", "-u", "alice") == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["job_id"] for d in found] == ["7", "8", "3"]
    assert found[1]["decision"]["waits_for"] == "at least 1 GPU"


def test_an_empty_queue_is_an_empty_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path)
    site.write()
    assert site.run("queue", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_an_unknown_field_is_an_error(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("queue", "-o", "%i %Z") == 1
    assert "'%Z' is not a field; there are %i" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "jobs"])
def test_a_format_without_a_field_is_an_error(
    site: Site, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert site.run("queue", "-o", text) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"-o {text!r}: names no field; write e.g. %i" in told.err


def test_a_user_that_does_not_exist_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("queue", "-h", "-u", "nosuch,bob,root", "-o", "%i") == 0
    told = capsys.readouterr()
    assert told.out == "9\n"
    # bob is known from his jobs, root to the system
    assert told.err == "slurm-ext: warning: -u nosuch: there is no such user\n"


def test_an_id_that_is_none_is_an_error(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("queue", "-j", "7,seven") == 1
    assert "'seven'" in capsys.readouterr().err


def test_no_spool_is_an_error_and_not_an_empty_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Site(tmp_path, spool=str(tmp_path / "none")).run("queue") == 1
    assert "is the daemon set up?" in capsys.readouterr().err


def test_a_silent_daemon_is_a_warning_beside_the_table(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write(daemon=whole(MADE_S - 1000))
    assert site.run("queue") == 0
    assert "warning: the daemon has been silent for" in capsys.readouterr().err


def test_a_damaged_document_hides_no_other(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.spool.root / "plans" / "8.json").write_text("{")
    assert site.run("queue", "-h", "-o", "%i", "-u", "alice") == 0
    assert lines(capsys) == ["7", "3"]


def test_names_of_users_cannot_draw_lines(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write(replace(document(11), user="eve\n12 x", partition="zz"))
    site.run("queue", "-h", "-o", "%i %u")
    assert "11 eve?12 x" in lines(capsys)

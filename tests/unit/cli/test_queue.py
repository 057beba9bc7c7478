"""``slurm-ext queue``: one line per job, in the manner of squeue."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.cli.queue import LETTERS
from slurm_ext.domain.attempt import Attempt, Cause, StepRecord
from slurm_ext.domain.document import ENDED, Correction, StaleRow, Truth
from slurm_ext.domain.estimate import Source
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.progress import Hold
from slurm_ext.domain.spans import moment
from tests.unit.cli.spooled import MADE_S, Site, decision, document, estimate, whole


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


def told(**values: object) -> Truth:
    made = Truth(
        at_s=MADE_S - 5,
        attempt=2,
        step=1200,
        samples=307_200,
        samples_per_s=351.25,
        total_steps=4000,
        checkpoint_step=1100,
        checkpoint_s=MADE_S - 90,
        ends_s=estimate(MADE_S + 3600, Source.PROGRESS),
    )
    return replace(made, **values)


PAST = (
    Attempt(
        0,
        MADE_S - 9000,
        4,
        ("n1",),
        first_step_s=MADE_S - 8990,
        ended_s=MADE_S - 5400,
        cause=Cause.PREEMPTED,
        exit_code=85,
        restored_step=0,
        last_step=700,
        saved_step=700,
        requeued=True,
        reason="Slurm requeues it by itself",
    ),
    Attempt(
        1,
        MADE_S - 5380,
        8,
        ("n1", "n2"),
        first_step_s=MADE_S - 5370,
        ended_s=MADE_S - 2000,
        cause=Cause.NODE_FAIL,
        restored_step=700,
        last_step=1000,
        saved_step=900,
    ),
    Attempt(2, MADE_S - 1900, 8, ("n3", "n4"), restored_step=900),
)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(time, "time", lambda: MADE_S)
    site = Site(tmp_path)
    site.write(
        document(3, state="RUNNING", present_gpus=8, starts=3, truth=told(), attempts=PAST),
        document(8, decision(rank=1)),
    )
    return site


def test_the_truth_beside_the_estimate(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("queue", "-h", "-o", "%i|%T|%n|%f|%A|%L|%c", "-j", "3,8") == 0
    waiting, row = lines(capsys)
    assert waiting == "8|-|-|-|0|-|-"
    assert row.split("|")[:6] == ["3", "351.2", "1200/4000", "progress", "3", "node failure"]
    assert row.split("|")[6] == "1100 00:01:30 ago"
    running.run("queue", "-h", "-o", "%F", "-j", "3")
    (end,) = lines(capsys)
    assert end == moment(MADE_S + 3600, MADE_S)


def test_the_long_form_has_every_truth(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("queue", "--long") == 0
    heading, *rows = lines(capsys)
    assert " ".join(heading.split()) == (
        "JOBID PARTITION USER ST GPUS WORK SAMPLES/S STEP END STARTS LASTEND CHECKPOINT REASON"
    )
    assert "351.2" in rows[1]


def test_a_job_that_tells_no_total_shows_its_step(
    running: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    running.write(document(3, state="RUNNING", truth=told(total_steps=None, checkpoint_s=None)))
    running.run("queue", "-h", "-o", "%n|%c", "-j", "3")
    assert lines(capsys) == ["1200|1100"]


def test_a_save_that_fails_is_seen_in_the_queue(
    running: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    running.write(
        document(3, state="RUNNING", truth=told(save_error="disk full")),
        document(4, state="RUNNING", truth=told(save_error="disk full", checkpoint_step=None)),
    )
    running.run("queue", "-h", "-o", "%c", "-j", "3,4")
    assert lines(capsys) == ["save fails (1100)", "save fails (none)"]


def test_a_pause_is_seen_wherever_one_looks(
    running: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while a report of the attempt before still lies there: what waits is not paused."""
    hold = Hold(MADE_S - 60, MADE_S + 10**9, "alice", "memory")
    running.write(
        document(3, state="RUNNING", truth=told(hold=hold)),
        document(4, truth=told(hold=hold)),
    )
    since, until = moment(hold.since_s, time.time()), moment(hold.until_s, time.time())
    words = f"by alice since {since}, until {until} (release=memory)"
    running.run("queue", "-h", "-o", "%H|%R", "-j", "3,4")
    paused, waiting = sorted(lines(capsys), key=lambda line: "paused" not in line)
    assert paused == f"{until}|paused {words}"
    assert waiting.startswith("-|")
    assert running.run("explain", "3") == 0
    assert f"  Paused  {words}" in capsys.readouterr().out.splitlines()
    running.run("queue", "--json", "-j", "3")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["truth"]["hold"]["by"] == "alice"


def test_one_line_per_attempt(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        running.run("queue", "--attempts", "-h", "-o", "%i %n %e %g %N %b %l %c %w %x %q|%C|%R")
        == 0
    )
    first, second, third = lines(capsys)
    assert first == ("3 0 01:00:00 4 n1 0 700 700 - 85 yes|preempted|Slurm requeues it by itself")
    assert second == "3 1 00:56:20 8 n[1-2] 700 1000 900 00:00:30 - no|node failure|-"
    assert third == "3 2 00:31:40 8 n[3-4] 900 1200 1100 - - no|-|-"


def test_each_step_of_an_attempt_has_a_line(
    running: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script with two steps lost the one that ended first."""
    refused = StepRecord(
        1,
        MADE_S - 50,
        1,
        ended_s=MADE_S - 48,
        cause=Cause.USER_ERROR,
        exit_code=1,
        reason="refused",
    )
    killed = StepRecord(2, MADE_S - 40, 1)
    runs = Attempt(0, MADE_S - 60, 1, steps=(refused, killed))
    over = replace(runs, ended_s=MADE_S, cause=Cause.COMPLETED, exit_code=0)
    running.write(
        document(4, state="RUNNING", attempts=(runs,)), document(5, state=ENDED, attempts=(over,))
    )
    running.run("queue", "--attempts", "-j", "4,5", "-h", "-o", "%i %n %e|%x|%C|%R")
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        "4 0.0 00:01:00|-|-|-",
        "4 0.1 00:00:02|1|user error|refused",
        "4 0.2 00:00:40|-|-|-",
        "5 0.0 00:01:00|0|completed|-",
        "5 0.1 00:00:02|1|user error|refused",
        "5 0.2 -|-|unknown|-",
    ]
    running.run("explain", "4")
    assert "its step 1 ended: user error: refused" in capsys.readouterr().out


def test_attempts_have_fields_of_their_own(
    running: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert running.run("queue", "--attempts") == 0
    assert len(lines(capsys)) == 4
    running.run("queue", "--attempts", "-o", "%T")
    assert "'%T' is not a field" in capsys.readouterr().err


def test_json_has_truth_and_attempts(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("queue", "--json", "-j", "3") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["truth"]["ends_s"]["source"] == "progress"
    assert [a["cause"] for a in found["attempts"]] == ["preempted", "node failure", None]


def test_explain_tells_the_truth_too(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert running.run("explain", "3") == 0
    text = capsys.readouterr().out
    assert "Reports step 1200 of 4000, 351.2 samples/s" in text
    assert "checkpoint of step 1100" in text
    assert "extrapolated from what the job itself reports" in text
    assert "Starts  3; slurm-ext queue --attempts -j 3 lists them" in text
    assert "the last one to end: node failure" in text
    assert "save failed" not in text


def test_explain_tells_that_saving_fails(running: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """All work since the last checkpoint is lost at the next end, and nobody said it."""
    words = "step 1200 is not saved: rank 0: OSError: full"
    running.write(replace(document(3), state="RUNNING", truth=told(save_error=words)))
    assert running.run("explain", "3") == 0
    assert f"its last save failed: {words}" in capsys.readouterr().out


def test_stale_rows_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path)
    site.write(
        daemon=whole(
            stale=(StaleRow("vit", "v100", (4, 4), 32, 1, 0.5, 3),),
            corrections=(Correction("vit", "v100", 0.71, 3),),
        )
    )
    assert site.run("table", "stale", "-h") == 0
    assert lines(capsys)[0].split() == ["vit", "v100", "8", "44", "32", "1", "0.50", "3"]
    assert site.run("table", "stale", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["corrections"] == [{"model": "vit", "gpu_type": "v100", "factor": 0.71, "jobs": 3}]
    site.write(daemon=whole())
    assert site.run("table", "stale") == 0
    assert len(lines(capsys)) == 1

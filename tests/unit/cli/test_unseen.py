"""Jobs of which there is no document but a record of their own, and jobs that run or have ended."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.cli import explain, queue
from slurm_ext.cli.unseen import UNPLANNED, UNSEEN
from slurm_ext.control.ledger import KEEP_S
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.document import ENDED
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.progress import Hold, Progress
from slurm_ext.domain.request import attempts_path, progress_path, user_dir
from slurm_ext.domain.spans import moment
from slurm_ext.slurm.process import Answer
from slurm_ext.slurm.rows import SEPARATOR
from tests.unit.cli.spooled import MADE_S, Site, decision, document

UID = os.getuid()
ME = pwd.getpwuid(UID).pw_name
AT_ONCE = Attempt(
    0,
    MADE_S - 60,
    2,
    ("n1",),
    ended_s=MADE_S - 58,
    cause=Cause.USER_ERROR,
    exit_code=1,
    reason="the program ended with 1",
)


ENDED_AT = moment(MADE_S - 58, MADE_S)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(time, "time", lambda: MADE_S)
    site = Site(tmp_path)
    site.write(document(3, state="RUNNING"), document(5, state=ENDED, attempts=(AT_ONCE,)))
    return site


def record(site: Site, job: str, *attempts: Attempt, uid: int = UID) -> None:
    Path(str(user_dir(site.spool.root, uid))).mkdir(exist_ok=True)
    path = Path(str(attempts_path(site.spool.root, uid, job)))
    path.write_text(Attempts(job, attempts or (AT_ONCE,)).to_json())


def rows(site: Site, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert site.run("queue", "-h", *words) == 0
    return capsys.readouterr().out.splitlines()


# -- records without a document ------------------------------------------------------------------


def test_a_job_that_no_cycle_saw_is_shown_when_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1")
    assert rows(site, capsys, "-j", "1", "-o", "%i|%u|%t|%A|%L|%R") == [
        f"1|{ME}|ED|1|user error|has ended: user error"
    ]
    assert rows(site, capsys, "-j", "1", "--attempts", "-o", "%i|%C|%x") == ["1|user error|1"]
    assert rows(site, capsys, "-o", "%i") == ["3"]  # what has ended is not in the queue


def test_attempts_list_what_has_ended_for_a_while_with_and_without_a_document(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1")
    record(site, "2", replace(AT_ONCE, started_s=1.0, ended_s=MADE_S - KEEP_S - 1))
    record(site, "4")
    os.utime(attempts_path(site.spool.root, UID, "4"), (1.0, MADE_S - KEEP_S - 1))
    assert rows(site, capsys, "--attempts", "-o", "%i") == ["1", "5"]


def test_a_record_beside_a_document_is_not_shown_twice(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "5")
    assert rows(site, capsys, "-j", "5", "-o", "%i") == ["5"]
    assert rows(site, capsys, "--attempts", "-o", "%i") == ["5"]


def test_tasks_of_an_array_are_told_from_their_own_records(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "3_4", replace(AT_ONCE, cause=Cause.PREEMPTED))
    record(site, "8_1")
    record(site, "8_2")
    assert rows(site, capsys, "-j", "3_4", "--attempts", "-o", "%i|%C") == ["3_4|preempted"]
    assert sorted(rows(site, capsys, "-j", "8", "-o", "%i")) == ["8_1", "8_2"]
    assert rows(site, capsys, "-j", "8_2", "-o", "%i") == ["8_2"]


@pytest.mark.parametrize(
    ("job_id", "named", "told"),
    [
        ("8_2", "8", True),
        ("8_2", "8_2", True),
        ("8_2", "8_3", False),
        ("8", "8_3", True),
        ("8_[0-2,5]", "8_1", True),
        ("8_[0-2,5]", "8_5", True),
        ("8_[0-2,5]", "8_3", False),
    ],
)
def test_whom_the_document_of_an_array_tells_of(job_id: str, named: str, told: bool) -> None:
    assert replace(document(8), job_id=job_id).tells_of(named) is told


def test_only_the_owner_tells_of_the_tasks_of_an_array(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write(replace(document(3, state="RUNNING"), uid=UID + 1))
    record(site, "3_4")
    assert rows(site, capsys, "-j", "3_4", "--attempts", "-o", "%i") == []


def test_a_user_is_asked_for_by_name(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    record(site, "1")
    assert rows(site, capsys, "--attempts", "-u", ME, "-o", "%i") == ["1"]
    other = next(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid != UID)
    assert rows(site, capsys, "--attempts", "-u", other, "-o", "%i") == []


def test_explain_tells_what_the_job_itself_recorded(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1")
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert (
        f"Job 1 of {ME}: has left the queue; its ft-run ended at {ENDED_AT}; sacct -j 1 may" in text
    )
    assert UNSEEN in text
    assert "the last one to end: user error: the program ended with 1" in text
    assert "planned last" not in text


def test_explain_tells_of_the_task_that_is_named(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "8_1")
    record(site, "8_2")
    assert site.run("explain", "8_2") == 0
    assert "Job 8_2 of" in capsys.readouterr().out
    assert site.run("explain", "8") == 1
    assert "is an array, and the daemon knows nothing of it; name one of its tasks, as in 8_" in (
        capsys.readouterr().err
    )


def test_a_recorded_start_without_an_end_is_not_called_ended(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1", replace(AT_ONCE, ended_s=None, cause=None))
    assert rows(site, capsys, "-j", "1", "-o", "%i|%t") == ["1|UN"]
    assert site.run("explain", "1") == 0
    assert "has left the queue" not in capsys.readouterr().out


# -- what Slurm tells of them ---------------------------------------------------------------------

WAITS = replace(
    AT_ONCE, cause=Cause.OPERATOR, requeued=True, reason="paused by alice for 600 s: saved"
)
RUNS = replace(AT_ONCE, number=1, ended_s=None, cause=None, exit_code=None, reason="")


class Slurm:
    """squeue with one row, and sacct; what was asked is kept."""

    def __init__(
        self,
        state: str,
        *,
        uid: int = UID,
        begin: float = 0.0,
        comment: str = "",
        accounting: str | None = "",
        job: str = "1",
        reason: str = "BeginTime",
    ) -> None:
        tres = "cpu=4,gres/gpu=3"
        self.job = job
        self.cells = [str(uid), state, "main", "normal", reason, f"{begin:.0f}", tres, comment]
        self.accounting = accounting
        self.asked: list[Sequence[str]] = []

    def run(self, argv: Sequence[str], **_: object) -> Answer:
        self.asked.append(argv)
        if argv[0] == "sacct":
            if self.accounting is None:
                raise SlurmCommandError(list(argv), 1, "no slurmdbd")
            return Answer(self.accounting, "", 0)
        if not self.cells[1]:
            return Answer("", "slurm_load_jobs error: Invalid job id specified", 1)
        mark = str(argv[-1]).rpartition(SEPARATOR)[2]
        return Answer(SEPARATOR.join([self.job, *self.cells, mark]) + "\n", "", 0)


@pytest.fixture
def squeue(monkeypatch: pytest.MonkeyPatch) -> Callable[[Slurm], Slurm]:
    def answers(slurm: Slurm) -> Slurm:
        for command in (explain, queue):
            monkeypatch.setattr(command, "CommandRunner", lambda: slurm)
        return slurm

    return answers


def test_a_waiting_job_without_an_option_is_told_with_its_pause_and_begin(
    site: Site, squeue: Callable[[Slurm], Slurm], capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1", WAITS)
    slurm = squeue(Slurm("PENDING", begin=MADE_S + 600))
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert f"Job 1 of {ME}, partition main, QOS normal: pending (Slurm says: BeginTime)" in text
    assert UNPLANNED in text
    assert UNSEEN not in text
    assert "Waits   for the end of its pause (paused by alice for 600 s)" in text
    assert "Start   not before " in text
    assert "by policy" not in text
    assert len(slurm.asked) == 1
    assert rows(site, capsys, "-j", "1", "-o", "%i|%t|%P")[0] == "1|PD|main"


def test_a_running_job_without_an_option_tells_its_step_and_its_pause(
    site: Site, squeue: Callable[[Slurm], Slurm], capsys: pytest.CaptureFixture[str]
) -> None:
    record(site, "1", RUNS)
    hold = Hold(MADE_S - 10, MADE_S + 600, "alice", "memory")
    report = Progress("1", 1, MADE_S, 40, 400, 2.5, 2, restored_step=20, hold=hold)
    Path(str(progress_path(site.spool.root, UID, "1"))).write_text(report.to_json())
    squeue(Slurm("RUNNING"))
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert "Reports step 40" in text
    assert "Paused  by alice since" in text
    assert rows(site, capsys, "-j", "1", "-o", "%n|%R")[0].startswith("40|paused by alice")
    # Of the attempt that runs, what it has reported stands in its row.
    assert rows(site, capsys, "--attempts", "-j", "1", "-o", "%n|%b|%l|%c") == ["1|20|40|-"]


@pytest.mark.parametrize(
    "slurm", [Slurm("RUNNING", uid=UID + 1), Slurm("UNKNOWN", comment="ft:{}")]
)
def test_what_slurm_shows_of_another_job_or_of_one_with_an_option_is_not_unplanned(
    site: Site,
    slurm: Slurm,
    squeue: Callable[[Slurm], Slurm],
    capsys: pytest.CaptureFixture[str],
) -> None:
    record(site, "1", RUNS)
    squeue(slurm)
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert UNSEEN in text
    assert UNPLANNED not in text


# -- jobs of which nothing is recorded, and what the accounting tells ----------------------------

ENDS = f"{MADE_S - 100:.0f}|{MADE_S - 50:.0f}|cpu=4,gres/gpu=3\n"


def test_a_task_is_not_explained_by_the_document_of_another(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    squeue: Callable[[Slurm], Slurm],
) -> None:
    site.write(replace(document(8), job_id="8_2", uid=UID))
    squeue(Slurm("PENDING", job="8_3", reason="JobHeldUser", comment="ft:{}"))
    assert site.run("explain", "8_3") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("Job 8_3 ")
    assert "JobHeldUser" in said
    assert "one document for all tasks of an array, which is about 8_2 now" in said
    assert rows(site, capsys, "-j", "8_3", "-o", "%i|%t") == ["8_3|PD"]
    assert rows(site, capsys, "-j", "8", "-o", "%i") == ["8_2"]
    squeue(Slurm(""))
    assert site.run("explain", "8_9") == 1
    assert "job 8_9: there is no such job" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("comment", "words"), [("", "it has no --ft-* option"), ("ft:{}", "has not planned it yet")]
)
def test_a_job_in_the_queue_of_which_nothing_is_recorded_is_told_by_slurm(
    site: Site,
    squeue: Callable[[Slurm], Slurm],
    capsys: pytest.CaptureFixture[str],
    comment: str,
    words: str,
) -> None:
    squeue(Slurm("RUNNING", comment=comment))
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert f"Job 1 of {ME}, partition main, QOS normal: running" in text
    assert "GPUs    3 by Slurm's books; " in text
    assert words in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("COMPLETED|0:0|", "has ended: COMPLETED at "),
        ("FAILED|3:0|", "has ended: FAILED with exit code 3 at "),
        ("OUT_OF_MEMORY|0:9|", "has ended: OUT_OF_MEMORY by signal 9 at "),
        (f"CANCELLED by {UID}|0:0|", f"has ended: CANCELLED by {ME} at "),
        ("RUNNING|0:0|", "has left the queue; Slurm's accounting does not have its end yet"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_how_a_job_ended_is_told_by_the_accounting(
    site: Site,
    squeue: Callable[[Slurm], Slurm],
    capsys: pytest.CaptureFixture[str],
    row: str,
    words: str,
    recorded: bool,
) -> None:
    """ "partition unknown" stood there, and that no cycle of the daemon had seen it."""
    if recorded:
        record(site, "1")
    squeue(Slurm("", accounting=f"1|{ME}|high|small|{row}{ENDS}"))
    assert site.run("explain", "1") == 0
    text = capsys.readouterr().out
    assert f"Job 1 of {ME}, partition high, QOS small: {words}" in text
    assert ("50 s after its last start" in text) == ("has ended" in words)
    assert ("recorded" in text) == recorded
    assert ("GPUs    3 at the end; not planned: nothing of it is kept" in text) != recorded


def test_the_end_of_a_planned_job_is_told_as_well(
    site: Site, squeue: Callable[[Slurm], Slurm], capsys: pytest.CaptureFixture[str]
) -> None:
    squeue(Slurm("", accounting=f"5|alice|main|normal|COMPLETED|0:0|{ENDS}"))
    assert site.run("explain", "5") == 0
    text = capsys.readouterr().out
    assert "has ended: COMPLETED at " in text
    assert "this is what was planned last" in text


@pytest.mark.parametrize(
    ("accounting", "words"),
    [
        (
            "",
            "job 1: there is no such job: neither the queue nor Slurm's accounting has it; squeue",
        ),
        (None, "job 1: the daemon knows nothing of it; it may have ended long ago"),
        (f"1_1|{ME}|a|b|FAILED|0:0|{ENDS}1_2|{ME}|a|b|FAILED|0:0|{ENDS}", "name one of its tasks"),
    ],
)
def test_a_job_that_nobody_knows(
    site: Site,
    squeue: Callable[[Slurm], Slurm],
    capsys: pytest.CaptureFixture[str],
    accounting: str | None,
    words: str,
) -> None:
    squeue(Slurm("", accounting=accounting))
    assert site.run("explain", "1") == 1
    assert words in capsys.readouterr().err


# -- running and ended ---------------------------------------------------------------------------


def test_what_runs_waits_for_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    made = decision(Verdict.WAIT, waits_for="a seat")
    site.write(document(3, made, state="RUNNING"), document(4, made))
    assert rows(site, capsys, "-j", "3,4", "-o", "%t|%R") == [
        "PD|waits for a seat",
        f"R|{made.reason}",
    ]


def test_what_has_ended_says_how(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    done = replace(AT_ONCE, cause=Cause.COMPLETED, reason="")
    made = decision(waits_for="a seat")
    site.write(document(6, made, state=ENDED, attempts=(done,)), document(7, made, state=ENDED))
    assert rows(site, capsys, "-j", "6,7", "-o", "%i|%R") == [
        "6|has ended: completed",
        "7|has left the queue",
    ]
    assert site.run("explain", "6") == 0
    assert "the last one to end: completed\n" in capsys.readouterr().out


def test_a_reason_that_begins_with_its_cause_is_told_once(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = replace(AT_ONCE, cause=Cause.LOST_PEER, reason="lost peer: RuntimeError: gone")
    site.write(document(6, state=ENDED, attempts=(lost,)))
    assert site.run("explain", "6") == 0
    assert "the last one to end: lost peer: RuntimeError: gone\n" in capsys.readouterr().out

"""Rows of squeue to jobs: what a row may hold, and what it must not be taken for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.job import Job, JobState
from slurm_ext.slurm.parse_jobs import COLUMNS, JobParser, columns, eligible_at, observed
from slurm_ext.slurm.rows import SEPARATOR, RowFormat

FORM = RowFormat(COLUMNS, "end0")
DATA = Path(__file__).parents[2] / "data" / "slurm"
PENDING = {
    "JobID": "7",
    "JobArrayID": "7",
    "State": "PENDING",
    "Reason": "Priority",
    "UserName": "alice",
    "UserID": "2001",
    "Partition": "main",
    "QOS": "normal",
    "SubmitTime": "1795979283",
    "EligibleTime": "1795979283",
    "StartTime": "N/A",
    "EndTime": "N/A",
    "TimeLimit": "1:00:00",
    "PriorityLong": "11100",
    "Nice": "0",
    "NumNodes": "1",
    "NumTasks": "1",
    "NumCPUs": "1",
    "tres-per-job": "N/A",
    "tres-per-node": "N/A",
    "tres-per-task": "N/A",
    "tres-per-socket": "N/A",
    "tres-alloc": "cpu=1,mem=1000M,node=1,billing=1",
    "ReqNodes": "",
    "ExcNodes": "",
    "NodeList": "",
    "Feature": "(null)",
    "Licenses": "(null)",
    "Dependency": "(null)",
    "Reservation": "(null)",
    "OverSubscribe": "OK",
    "HetJobID": "N/A",
    "RestartCnt": "0",
    "BatchFlag": "1",
    "Account": "vision",
}


def parse_row(form: RowFormat, text: str) -> Job | None:
    found = JobParser().parse([text], form)
    return found[0] if found else None


def row(**changes: str) -> str:
    names = {name.lower().replace("-", "_"): name for name in COLUMNS}
    fields = {**PENDING, **{names[key.lower()]: value for key, value in changes.items()}}
    return SEPARATOR.join(fields[name] for name in COLUMNS)


def parsed(**changes: str) -> Job:
    job = parse_row(FORM, row(**changes))
    assert job is not None
    return job


def test_the_fixture_names_every_column_once() -> None:
    assert set(PENDING) == set(COLUMNS)
    assert len(COLUMNS) == len(set(COLUMNS))


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({"tres_per_job": "gres/gpu:4"}, 4),
        ({"tres_per_node": "gres/gpu:1"}, 1),
        ({"tres_per_node": "gres/gpu:v100:4", "tres_alloc": "cpu=2,mem=2000M,node=2"}, 8),
        ({"tres_per_task": "gres/gpu=1", "NumTasks": "8"}, 8),
        ({"tres_per_task": "cpu=2,gres/gpu:1", "NumTasks": "3"}, 3),
        ({"tres_per_socket": "gres/gpu:2"}, 2),
        ({"tres_alloc": "cpu=1,mem=1G,node=1,gres/gpu=4,gres/gpu:v100=4"}, 4),
        ({"tres_alloc": "N/A", "tres_per_node": "gres/gpu:2", "NumNodes": "3-5"}, 6),
        ({}, 0),
    ],
)
def test_gpus_not_in_percent_b(changes: dict[str, str], gpus: int) -> None:
    """Case gpus-not-in-%b: a request per job, node, task or socket, tracked by the site or not."""
    assert parsed(**changes).gpus == gpus


def test_a_list_cut_at_twenty_characters_is_not_read_as_fewer_gpus() -> None:
    """``-O tres-alloc`` without a colon ends at 20 characters, in the middle of a name."""
    assert RowFormat(COLUMNS, "m").argument.count(":") == len(COLUMNS)


def test_badconstraints_exclusive_is_no_hold() -> None:
    """Case badconstraints-exclusive: Slurm zeroed the priority; no person holds the job."""
    job = parsed(PriorityLong="0", Reason="BadConstraints", EligibleTime="N/A")
    assert not job.held
    assert not job.eligible


@pytest.mark.parametrize(
    ("changes", "user", "admin"),
    [
        ({"PriorityLong": "0", "Reason": "JobHeldUser"}, True, False),
        ({"PriorityLong": "0", "Reason": "JobHeldAdmin"}, False, True),
        ({"PriorityLong": "0", "Reason": "launch_failed_requeued_held"}, False, True),
        ({"State": "REQUEUE_HOLD", "PriorityLong": "0", "Reason": "None"}, False, True),
        ({"State": "SPECIAL_EXIT", "PriorityLong": "0", "Reason": "JobHeldUser"}, True, True),
        ({}, False, False),
        ({"State": "RUNNING", "NodeList": "n1", "PriorityLong": "0"}, False, False),
    ],
)
def test_holds(changes: dict[str, str], user: bool, admin: bool) -> None:
    job = parsed(**changes)
    assert (job.held_by_user, job.held_by_admin) == (user, admin)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30:00", 1800.0),
        ("1:00:00", 3600.0),
        ("2-12:30:00", 217800.0),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("INVALID", None),
    ],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    assert parsed(TimeLimit=text).time_limit_s == seconds


def test_features_may_hold_the_signs_of_other_formats() -> None:
    assert parsed(Feature="a100|h100&nvlink").features == "a100|h100&nvlink"


def test_multi_qos_reload() -> None:
    """Case multi-qos reload: of a job with several QOS none is taken for the only one.

    After a restart slurmctld charges such a job to the first of them; whoever counts use must see
    that there are two. (Use itself is counted from running jobs, never from Slurm's counters.)
    """
    assert parsed(QOS="high,normal").qos == "high,normal"


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED"])
def test_a_finished_job_is_no_job(state: str) -> None:
    assert parse_row(FORM, row(State=state)) is None


def test_a_state_of_the_future_is_kept_and_touched_by_nobody() -> None:
    job = parsed(State="TELEPORTED")
    assert job.state is JobState.UNKNOWN
    assert (job.pending, job.running, job.eligible) == (False, False, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"SubmitTime": "N/A"},
        {"JobArrayID": "7_[1,3...]"},
        {"JobArrayID": "x"},
        {"PriorityLong": "much"},
        {"UserID": ""},
        {"TimeLimit": "soon"},
        {"tres_alloc": "cpu=1,mem=lots"},
        {"NodeList": "n[1-"},
    ],
)
def test_a_row_that_cannot_be_read_is_missing_not_dropped(changes: dict[str, str]) -> None:
    with pytest.raises(SourceMissingError, match="cannot be read"):
        parsed(**changes)


def test_whether_a_lease_has_passed_is_decided_by_the_clock() -> None:
    job = parsed(EligibleTime="1795979583")
    assert not eligible_at(job, 1795979582.9)
    assert eligible_at(job, 1795979583.0)
    assert observed(job, False, 7, True) == dataclasses.replace(
        job, eligible=False, site_factor=7, priority_set=True
    )
    assert observed(job, True, 0, False) is job
    unset = parsed(EligibleTime="N/A", Reason="Dependency", Dependency="afterok:3(unfulfilled)")
    assert not eligible_at(unset, 2e9)
    assert not eligible_at(parsed(PriorityLong="0", Reason="JobHeldUser"), 2e9)


def test_the_cache_gives_equal_jobs_and_stays_bounded() -> None:
    parser = JobParser()
    for cycle in range(40):
        rows = [
            row(JobID=str(i), JobArrayID=str(i), PriorityLong=str(cycle)) for i in range(1, 200)
        ]
        first = parser.parse(rows, FORM)
        assert parser.parse(rows, FORM) == first == [parse_row(FORM, text) for text in rows]
        parser.forget(rows)
        assert parser.size <= 1000 + 4 * 200 + 200
    assert parser.parsed == 40 * 199


def test_a_row_whose_priority_changed_is_the_job_with_another_priority() -> None:
    """Every PriorityCalcPeriod all rows change a little: what lasts is not read again."""
    parser = JobParser()
    texts = [row(PriorityLong=str(p), tres_per_node="gres/gpu:2") for p in (10, 20)]
    [first] = parser.parse(texts[:1], FORM)
    [second] = parser.parse(texts[1:], FORM)
    assert dataclasses.replace(first, priority=20) == second
    [started] = parser.parse(
        [row(State="RUNNING", Reason="None", StartTime="1795979300", tres_per_node="gres/gpu:2")],
        FORM,
    )
    assert (started.state, started.start_s, started.eligible) == (
        JobState.RUNNING,
        1795979300.0,
        False,
    )
    [elsewhere] = parser.parse([row(tres_per_node="gres/gpu:3")], FORM)
    assert elsewhere.gpus == 3


@given(st.text(max_size=40))
def test_no_account_changes_another_field(account: str) -> None:
    job = parse_row(FORM, row(Account=account))
    assert job is not None
    assert (job.job_id, job.user, job.batch, job.restarts) == ("7", "alice", True, 0)
    assert job.account in {account, ""}


@pytest.mark.parametrize(
    ("release", "column"), [("24.11", "OverSubscribe"), ("26.05", "Exclusive")]
)
def test_whole_nodes_are_read_where_the_release_tells_of_them(release: str, column: str) -> None:
    known = (DATA / release / "squeue_help_format.txt").read_text()
    asked = columns(known)
    assert column in asked
    assert [name for name in asked if name != column] == [
        name for name in COLUMNS if name != "OverSubscribe"
    ]
    assert columns("") == COLUMNS  # a squeue that does not tell


@pytest.mark.parametrize(
    ("column", "word", "whole"),
    [
        ("OverSubscribe", "OK", False),
        ("OverSubscribe", "YES", False),
        ("OverSubscribe", "NO", True),
        ("OverSubscribe", "USER", True),
        ("Exclusive", "NO", False),
        ("Exclusive", "NODE", True),
        ("Exclusive", "USER", True),
    ],
)
def test_the_same_word_means_different_things_in_the_two_columns(
    column: str, word: str, whole: bool
) -> None:
    form = RowFormat(tuple(column if c == "OverSubscribe" else c for c in COLUMNS), "end0")
    (job,) = JobParser().parse([row(oversubscribe=word)], form)
    assert job.exclusive is whole

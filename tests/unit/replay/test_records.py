"""Every job accounted for: stamps against Slurm's records, and each way to differ."""

from __future__ import annotations

import pytest

from ci.replay.jobs import ReplayJob
from ci.replay.records import (
    ReplayFailedError,
    account,
    parse_sacct,
    parse_stamps,
)
from slurm_ext.sim.workload import WorkloadJob

STAMPS = "start 1000.5 41 0 6 n[1-2] 4,2\nend 1010.75 41 0\n"
SACCT = "41|ft-0|COMPLETED|1000|1011|billing=6,cpu=6,gres/gpu:v100=6,gres/gpu=6,node=2\n"


def job(name: str = "ft-0", **sleep_s: float) -> ReplayJob:
    work = WorkloadJob(f"work-{name}", 0.0, "m", "t", 8, 192, 1.0)
    return ReplayJob(name, work, 0.0, 2, 1, {6: sleep_s.get("six", 10.2)}, 100.0)


def records(stamps: str = STAMPS, sacct: str = SACCT, **sleep_s: float) -> object:
    return account([job(**sleep_s)], {"ft-0": 990.0}, {"ft-0": stamps}, parse_sacct(sacct), 60, 4)


def test_a_finished_job_in_workload_seconds() -> None:
    (record,) = account(
        [job()], {"ft-0": 990.0}, {"ft-0": STAMPS}, parse_sacct(SACCT), scale=60, gpus_per_node=4
    )
    run = record.run
    assert (run.submit_s, run.start_s, run.end_s) == pytest.approx((0, 630, 1245))
    assert (run.gpus, run.seats, run.error_free_s) == (6, {"n1": 4, "n2": 2}, 100.0)
    assert (record.requested_gpus, record.scattered) == (8, False)


def test_submissions_count_from_the_first() -> None:
    both = [job(), job("ft-1")]
    stamps = {"ft-0": STAMPS, "ft-1": STAMPS.replace("41", "42")}
    sacct = parse_sacct(SACCT + SACCT.replace("41|ft-0", "42|ft-1"))
    found = account(both, {"ft-0": 991.0, "ft-1": 990.0}, stamps, sacct, 60, 4)
    assert [record.run.submit_s for record in found] == [60, 0]


def test_more_nodes_than_needed_is_told() -> None:
    text = STAMPS.replace("n[1-2] 4,2", "n[1-3] 2(x3)")
    (record,) = account([job()], {"ft-0": 990.0}, {"ft-0": text}, parse_sacct(SACCT), 60, 4)
    assert record.scattered


@pytest.mark.parametrize(
    ("stamps", "sacct", "reason"),
    [
        ("", SACCT, "never started"),
        (STAMPS.splitlines()[0], SACCT, "did not finish"),
        (STAMPS + STAMPS, SACCT, "was started 2 times"),
        (STAMPS, "", "unknown to sacct"),
        (STAMPS, SACCT.replace("COMPLETED", "TIMEOUT"), "is TIMEOUT for Slurm"),
        (STAMPS, SACCT.replace("41|", "44|"), "is job 41 for itself and 44 for Slurm"),
        (STAMPS, SACCT.replace("gres/gpu=6", "gres/gpu=8"), "counted 6 GPUs, Slurm accounts 8"),
        (STAMPS, SACCT.replace("|1000|", "|900|"), "started at"),
        (STAMPS, SACCT.replace("|1011|", "|1100|"), "ended at"),
        (STAMPS, SACCT.replace("|1011|", "|Unknown|"), "ended at"),
    ],
)
def test_a_job_that_is_not_accounted_for_is_named(stamps: str, sacct: str, reason: str) -> None:
    with pytest.raises(ReplayFailedError) as caught:
        records(stamps, sacct)
    assert "ft-0 (work-ft-0)" in str(caught.value)
    assert reason in str(caught.value)


def test_a_job_that_ran_too_short_is_named() -> None:
    with pytest.raises(ReplayFailedError, match=r"ran 0.35 s less than 6 GPUs take"):
        records(six=10.6)


def test_a_job_that_was_never_submitted_is_named() -> None:
    with pytest.raises(ReplayFailedError, match="ft-1 was never submitted"):
        account([job(), job("ft-1")], {"ft-0": 990.0}, {"ft-0": STAMPS}, parse_sacct(SACCT), 60, 4)


@pytest.mark.parametrize(
    "line",
    [
        "start 1 41 0 8 n[1-2] 4,2",  # the GPUs do not add up
        "start 1 41 0 6 n[1-2] 6",  # one count for two nodes
        "start soon 41 0 4 n1 4",
        "end 1 41 0",  # nothing has started
        "unfit 1 SLURM_NTASKS=3",
        "begin",
    ],
)
def test_a_stamp_that_makes_no_sense_is_shown(line: str) -> None:
    with pytest.raises(ReplayFailedError, match="stamps of job ft-0"):
        parse_stamps(line, "ft-0")


def test_end_of_another_attempt_is_refused() -> None:
    with pytest.raises(ReplayFailedError, match="an end without its start"):
        parse_stamps("start 1 41 0 4 n1 4\nend 2 41 1\n", "ft-0")


def test_sacct_line_with_other_columns_is_refused() -> None:
    with pytest.raises(ReplayFailedError, match="sacct answered"):
        parse_sacct("41|ft-0|COMPLETED\n")

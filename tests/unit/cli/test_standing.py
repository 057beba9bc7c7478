"""What Slurm says of a job before it is asked to pause: one row of squeue."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_ext.cli.pause import silence
from slurm_ext.cli.standing import look, over
from slurm_ext.slurm.process import Answer


class Squeue:
    """One row, whatever is asked."""

    def __init__(self, row: str) -> None:
        self.row = row

    def run(self, argv: Sequence[str], **_: object) -> Answer:
        return Answer(f"{self.row.split()[0] if argv[-1] == '%T' else self.row}\n", "", 0)


@pytest.mark.parametrize(
    ("row", "state", "reason", "begin_s"),
    [
        ("PENDING BeginTime 1700000010 77", "PENDING", "BeginTime", 1_700_000_010.0),
        # A forecast is no begin time, and a reason may have several words.
        ("PENDING Resources 1700000010 77", "PENDING", "Resources", None),
        ("PENDING BeginTime N/A 77", "PENDING", "BeginTime", None),
        ("PENDING Nodes required are DOWN N/A 77", "PENDING", "Nodes", None),
        ("RUNNING None 1700000000 77", "RUNNING", "None", None),
    ],
)
def test_a_begin_time_is_the_one_that_the_job_waits_for(
    row: str, state: str, reason: str, begin_s: float | None
) -> None:
    found = look("77", Squeue(row))  # type: ignore[arg-type]
    assert (found.state, found.reason, found.begin_s) == (state, reason, begin_s)


@pytest.mark.parametrize(
    ("row", "gone"),
    [
        ("RUNNING None 1700000000 77", False),
        # Its signal waits for a node that does not answer; the job itself may.
        ("SIGNALING None 1700000000 77", False),
        ("SUSPENDED None 1700000000 77", False),
        ("COMPLETED None 1700000000 77", True),
        ("COMPLETING None 1700000000 77", True),
        ("PENDING BeginTime 1700000010 77", True),
    ],
)
def test_who_is_not_there_any_more_answers_nothing(row: str, gone: bool) -> None:
    assert over("77", Squeue(row)) is gone  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_a_job_that_runs_and_does_not_answer_is_told_as_such(state: str) -> None:
    assert "Does it run under ft-run?" in silence("77", Squeue(state))  # type: ignore[arg-type]

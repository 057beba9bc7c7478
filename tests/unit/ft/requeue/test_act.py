"""Slurm's commands as executables on PATH: what is asked again, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.domain.errors import SlurmCommandError
from slurm_ft.requeue import act

PASSING = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "Slurm temporarily unable to accept job, sleeping and retrying: Socket timed out on send/recv",
    "slurm_requeue error: Slurm backup controller in standby mode",
]
FINAL = [
    "slurm_requeue error: Invalid job id specified",
    "Access/permission denied for job 77",
    "Requested operation is presently disabled for job 77",
]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that fails as often as the file `fails` says, with the words in `says`."""
    path = tmp_path / "scontrol"
    path.write_text(
        "#!/bin/sh\n"
        f"cd {tmp_path}\n"
        'echo "$SLURM_TIME_FORMAT $*" >> calls\n'
        "n=$(cat fails)\n"
        'if [ "$n" -gt 0 ]; then echo $((n - 1)) > fails; cat says >&2; exit 1; fi\n'
        "cat answer\n"
    )
    path.chmod(0o755)
    (tmp_path / "fails").write_text("0")
    (tmp_path / "answer").write_text("fine\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


class Clock:
    """Time that passes only while somebody pauses."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def ask(until: float) -> tuple[str, float]:
    clock = Clock()
    return act.ask_again(["scontrol", "show", "x"], until, clock, clock.pause), clock.now


def fail(calls: Path, times: int, words: str) -> None:
    (calls.parent / "fails").write_text(str(times))
    (calls.parent / "says").write_text(words)


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


@pytest.mark.parametrize("words", PASSING)
def test_a_controller_that_is_away_is_asked_again(calls: Path, words: str):
    fail(calls, 3, words)
    answer, waited = ask(300.0)
    assert answer == "fine\n"
    assert waited == 1 + 2 + 4
    assert count(calls) == 4


def test_and_not_for_ever(calls: Path):
    fail(calls, 1000, PASSING[0])
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        ask(60.0)
    assert count(calls) == 7


@pytest.mark.parametrize("words", FINAL)
def test_an_answer_that_will_not_change_is_not_asked_for_again(calls: Path, words: str):
    fail(calls, 1, words)
    with pytest.raises(SlurmCommandError):
        ask(300.0)
    assert count(calls) == 1


def test_a_job_that_is_pending_already_has_been_requeued(calls: Path):
    fail(calls, 1, "Job is pending execution for job 77")
    act.requeue("77", 0.0)
    fail(calls, 1, FINAL[0])
    with pytest.raises(SlurmCommandError):
        act.requeue("77", 0.0)


def test_times_come_in_one_form_whatever_the_user_has_set(
    calls: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    act.ask(act.show_job("77"))
    assert calls.read_text() == "standard -o show job 77\n"


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("PreemptType = preempt/partition_prio\nPreemptMode=REQUEUE\n", "REQUEUE"),
        ("PreemptType = preempt/partition_prio\nPreemptMode=GANG,SUSPEND\n", "GANG"),
        # The QOS decides, which the controller does not tell.
        ("PreemptType = preempt/qos\nPreemptMode=REQUEUE\n", ""),
        ("", ""),
    ],
)
def test_preemption_modes(calls: Path, text: str, mode: str):
    (calls.parent / "answer").write_text(text)
    assert act.preempt_mode("main", 0.0) == mode


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("MaxArraySize            = 1001\nMaxBatchRequeue         = 1000\n", 1000),
        # It is no word of these, where Slurm takes it without a complaint and goes by its own.
        ("SchedulerParameters     = max_batch_requeue=1000\n", act.MAX_BATCH_REQUEUE),
        ("", act.MAX_BATCH_REQUEUE),
    ],
)
def test_how_often_slurm_requeues_before_it_holds(calls: Path, text: str, most: int):
    (calls.parent / "answer").write_text(text)
    assert act.most_own_requeues(0.0) == most


def test_slurm_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmCommandError, match="No such file"):
        act.ask(["scontrol", "ping"])

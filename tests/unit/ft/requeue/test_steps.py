"""Several steps of one attempt: each keeps its own, and together they make the attempt."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.attempt import MAX_STEPS, Attempt, Attempts, Cause
from slurm_ft import status
from slurm_ft.requeue import attempts, steps
from slurm_ft.status import Status

JOB = "7"
LONG = Attempt(0, 100.0, 2, step=0)
REFUSED = Attempt(
    0, 110.0, 1, step=1, ended_s=112.0, cause=Cause.USER_ERROR, exit_code=1, reason="refused"
)


def write(directory: Path, attempt: Attempt, *earlier: Attempt) -> Attempts:
    path = directory / attempts.file_name(JOB)
    whole = attempts.begin(Attempts(JOB, earlier), attempt)
    steps.store(directory, whole, lambda ledger: attempts.store(path, ledger))
    return attempts.load(path, JOB)


def say(directory: Path, step: int, at_s: float, **more: object) -> None:
    status.write(
        directory / f"status-{JOB}-0-{step}-0.json",
        replace(Status(attempt=0, rank=0, pid=1, at_s=at_s), **more),
    )


def test_a_refused_step_is_kept_beside_the_one_that_runs(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    say(tmp_path, 0, time.time())
    write(tmp_path, replace(REFUSED, ended_s=None, cause=None, exit_code=None, reason=""))
    (running,) = write(tmp_path, REFUSED).attempts
    assert (running.step, running.ended_s) == (0, None), "the attempt is not over: step 0 runs"
    (other,) = running.steps
    assert (other.step, other.cause, other.exit_code) == (1, Cause.USER_ERROR, 1)

    (ended,) = write(tmp_path, replace(LONG, ended_s=150.0, cause=Cause.COMPLETED)).attempts
    assert (ended.step, ended.cause, ended.ended_s) == (0, Cause.COMPLETED, 150.0)
    assert [step.reason for step in ended.steps] == ["refused"], "nothing is lost"


@pytest.mark.parametrize("more", [{"at_s": 0.0}, {"done": True}, {"failed": "ValueError"}])
def test_a_step_that_was_killed_does_not_keep_an_attempt_open(
    tmp_path: Path, more: dict[str, object]
) -> None:
    write(tmp_path, LONG)
    say(tmp_path, 0, **{"at_s": time.time(), **more})
    (whole,) = write(tmp_path, REFUSED).attempts
    assert whole.ended_s == REFUSED.ended_s
    assert [(step.step, step.cause) for step in whole.steps] == [(0, None)]


def test_the_attempt_begins_with_its_first_step_and_the_last_to_end_tells(tmp_path: Path) -> None:
    write(tmp_path, replace(LONG, ended_s=105.0, cause=Cause.COMPLETED))
    (whole,) = write(tmp_path, replace(LONG, step=1, started_s=106.0)).attempts
    assert (whole.started_s, whole.step, whole.ended_s) == (100.0, 1, None)
    (whole,) = write(tmp_path, replace(LONG, step=1, started_s=106.0, ended_s=120.0)).attempts
    assert (whole.started_s, whole.step, whole.ended_s) == (100.0, 1, 120.0)


def test_the_step_that_sent_the_job_back_tells_whoever_writes_last(tmp_path: Path) -> None:
    write(tmp_path, replace(LONG, ended_s=105.0, cause=Cause.PREEMPTED, requeued=True))
    (whole,) = write(tmp_path, REFUSED).attempts
    assert (whole.step, whole.requeued) == (0, True)


def test_earlier_attempts_stay_as_they_are(tmp_path: Path) -> None:
    before = Attempt(0, 1.0, 1, ended_s=2.0, cause=Cause.PREEMPTED, requeued=True)
    ledger = write(tmp_path, replace(LONG, number=1), before)
    assert ledger.attempts[0] == before
    assert ledger.attempts[1].steps == ()


def test_one_that_writes_meanwhile_is_seen(tmp_path: Path) -> None:
    """Between a look at the others' files and the writing of the ledger another step ends."""
    path = tmp_path / attempts.file_name(JOB)
    meanwhile = [REFUSED]

    def late(ledger: Attempts) -> None:
        if meanwhile:
            write(tmp_path, meanwhile.pop())
        attempts.store(path, ledger)  # of before

    steps.store(tmp_path, Attempts(JOB, (LONG,)), late)
    (whole,) = attempts.load(path, JOB).attempts
    assert [step.step for step in whole.steps] == [1]


@given(st.permutations(range(MAX_STEPS + 5)), st.integers(1, MAX_STEPS))
def test_of_too_many_steps_those_that_failed_are_kept(order: list[int], bad: int) -> None:
    made = [
        Attempt(
            0,
            float(step),
            1,
            step=step,
            ended_s=step + 0.5,
            cause=Cause.USER_ERROR if step < bad else Cause.COMPLETED,
        )
        for step in order
    ]
    whole = steps.join(made[0], made[1:], ())
    kept = {step.step for step in whole.steps} | {whole.step}
    assert set(range(bad)) <= kept
    assert len(whole.steps) == MAX_STEPS
    assert [step.step for step in whole.steps] == sorted(step.step for step in whole.steps)


def test_many_steps_of_many_nodes_still_fit(tmp_path: Path) -> None:
    nodes = tuple(f"a-long-name-of-a-node-{n}" for n in range(200))
    for step in range(MAX_STEPS):
        ledger = write(
            tmp_path, replace(REFUSED, step=step, nodes=nodes, reason="why " * 200), LONG
        )
    (whole,) = ledger.attempts
    assert len(whole.steps) == MAX_STEPS - 1


def test_a_full_disk_still_lets_the_copy_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(attempts, "store", full)
    seen: list[Attempts] = []
    with pytest.raises(OSError, match="No space"):
        steps.store(tmp_path, Attempts(JOB, (LONG,)), seen.append)
    assert [ledger.attempts for ledger in seen] == [(LONG,)]

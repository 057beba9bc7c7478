"""Causes and decisions: tables of what is known and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ft import exits
from slurm_ft import status as words
from slurm_ft.launch.errors import UsageError
from slurm_ft.requeue.causes import Evidence, classify
from slurm_ft.requeue.decide import By, Case, decide
from slurm_ft.requeue.limits import DEFAULT_LIMITS, parse_limits
from slurm_ft.requeue.record import JobRecord
from slurm_ft.status import Status

RECORD = JobRecord(1, "RUNNING", "None", 0, True, True, "main", start_s=1000.0, end_s=None)
SESSION = Status(attempt=0, rank=0, pid=1, at_s=0.0, saved_step=5, restored_step=0)
LEFT = replace(SESSION, leaving=words.SIGNALLED)
PAUSED = {"leaving": words.ASKED, "note": "pause: paused by alice for 600 s"}


def evidence(**more: Any) -> Evidence:
    return replace(Evidence(attempt=0, code=exits.REQUEUE, now_s=5000.0, record=RECORD), **more)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (evidence(code=0), Cause.COMPLETED),
        # It ended in the middle of being preempted: it has ended all the same.
        (evidence(code=0, asked=True, record=replace(RECORD, preempt_s=4990.0)), Cause.COMPLETED),
        (evidence(code=1), Cause.USER_ERROR),
        # A session's code without a session that says so.
        (evidence(), Cause.USER_ERROR),
        (evidence(status=SESSION), Cause.USER_ERROR),
        # An error while a preemption goes on elsewhere is still an error.
        (evidence(code=1, record=replace(RECORD, preempt_s=500.0)), Cause.USER_ERROR),
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, preempt_s=4990.0)),
            Cause.PREEMPTED,
        ),
        # Of the attempt before.
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, preempt_s=900.0)),
            Cause.OPERATOR,
        ),
        # Another rank heard the signal; rank 0's session knows it from the agreement.
        (evidence(status=LEFT, record=replace(RECORD, end_s=90_000.0)), Cause.OPERATOR),
        (evidence(status=LEFT, record=replace(RECORD, preempt_s=4990.0)), Cause.PREEMPTED),
        # TERM of the preemption, where only USR2 means "save and come back".
        (
            evidence(code=143, status=SESSION, record=replace(RECORD, preempt_s=4990.0)),
            Cause.PREEMPTED,
        ),
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, end_s=5100.0)),
            Cause.TIME_LIMIT,
        ),
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, end_s=90_000.0)),
            Cause.OPERATOR,
        ),
        # The lead is known, and this is not it.
        (
            evidence(asked=True, status=LEFT, lead_s=60.0, record=replace(RECORD, end_s=6000.0)),
            Cause.OPERATOR,
        ),
        (
            evidence(
                asked=True,
                code=137,
                forced=True,
                status=LEFT,
                record=replace(RECORD, state="COMPLETING", reason="TimeLimit"),
            ),
            Cause.TIME_LIMIT,
        ),
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, state="COMPLETING")),
            Cause.CANCELLED,
        ),
        (
            evidence(asked=True, status=LEFT, record=replace(RECORD, state="PENDING", restarts=1)),
            Cause.OPERATOR,
        ),
        (
            evidence(code=143, asked=True, record=replace(RECORD, state="NODE_FAIL")),
            Cause.NODE_FAIL,
        ),
        (evidence(asked=True, status=LEFT, record=None), Cause.UNKNOWN),
        (
            evidence(code=exits.ABANDONED, status=replace(LEFT, leaving=words.LOST_PEER)),
            Cause.LOST_PEER,
        ),
        (
            evidence(
                code=exits.ABANDONED,
                status=replace(LEFT, leaving=words.LOST_PEER),
                peers={3: 1, 4: 137},
            ),
            Cause.USER_ERROR,
        ),
        # The others of a rank that was killed lost a peer, too.
        (
            evidence(
                code=exits.ABANDONED,
                status=replace(LEFT, leaving=words.LOST_PEER),
                peers={3: 137},
            ),
            Cause.LOST_PEER,
        ),
        (evidence(code=exits.REQUEUE, status=replace(LEFT, leaving=words.ASKED)), Cause.DAEMON),
        (evidence(code=exits.REQUEUE, status=replace(LEFT, **PAUSED)), Cause.OPERATOR),
        (
            evidence(code=exits.ABANDONED, status=replace(LEFT, leaving=words.STUCK)),
            Cause.NO_PROGRESS,
        ),
        (evidence(code=137, status=SESSION), Cause.LOST_PEER),
        (evidence(code=134, status=SESSION), Cause.LOST_PEER),
        (evidence(code=139, status=SESSION), Cause.USER_ERROR),
        (evidence(code=137), Cause.USER_ERROR),
        # A launcher has a code of its own.
        (
            evidence(
                code=1,
                asked=True,
                launcher=True,
                status=LEFT,
                record=replace(RECORD, end_s=5100.0),
            ),
            Cause.TIME_LIMIT,
        ),
        (
            evidence(code=137, asked=True, stopped=True, record=replace(RECORD, end_s=5100.0)),
            Cause.TIME_LIMIT,
        ),
    ],
)
def test_causes(found: Evidence, cause: Cause):
    assert classify(found)[0] is cause


def attempts(*causes: Cause, saved: bool = True) -> list[Attempt]:
    """Attempts of a thousand seconds each; the last one is the one that has just ended."""
    return [
        Attempt(
            number=n,
            started_s=2000.0 * n,
            ended_s=2000.0 * n + 1000,
            gpus=1,
            cause=cause,
            requeued=n < len(causes) - 1,
            restored_step=10 * n,
            saved_step=10 * n + (10 if saved else 0),
        )
        for n, cause in enumerate(causes)
    ]


# Attempts that tell nothing of steps: one of seconds, and a long one.
BRIEF = Attempt(number=0, started_s=0.0, ended_s=9.0, gpus=1, cause=Cause.TIME_LIMIT)
MUTE = Attempt(number=1, started_s=5000.0, ended_s=9000.0, gpus=1, cause=Cause.TIME_LIMIT)


def case(cause: Cause, **more: Any) -> Case:
    fields: dict[str, Any] = {
        "words": "why",
        "attempts": attempts(cause),
        "limits": DEFAULT_LIMITS,
        "saved": True,
        "record": RECORD,
        **more,
    }
    return Case(cause, **fields)


@pytest.mark.parametrize(
    ("found", "by", "reason"),
    [
        (case(Cause.COMPLETED), By.NOBODY, "why"),
        (case(Cause.CANCELLED), By.NOBODY, "why"),
        (case(Cause.TIME_LIMIT), By.FT_RUN, "why"),
        (case(Cause.OPERATOR), By.FT_RUN, "why"),
        (case(Cause.DAEMON), By.FT_RUN, "why"),
        (case(Cause.LOST_PEER), By.FT_RUN, "why"),
        (case(Cause.NODE_FAIL), By.SLURM, "Slurm requeues"),
        (case(Cause.PREEMPTED, preempt_mode="REQUEUE"), By.SLURM, "requeues it"),
        (case(Cause.PREEMPTED, preempt_mode="CANCEL"), By.FT_RUN, "why"),
        # Where it is not certain that Slurm does it, it is done: twice is better than not at all.
        (case(Cause.PREEMPTED), By.FT_RUN, "why"),
        # Slurm would hold it (launch failure limit exceeded requeued held).
        (
            case(Cause.PREEMPTED, preempt_mode="REQUEUE", slurm_holds=True),
            By.FT_RUN,
            "MaxBatchRequeue",
        ),
        (
            case(Cause.PREEMPTED, preempt_mode="REQUEUE", slurm_holds=True, mode="never"),
            By.SLURM,
            "requeues it",
        ),
        # Within the grace Slurm requeues whatever ends.
        (
            case(
                Cause.USER_ERROR,
                preempt_mode="REQUEUE",
                record=replace(RECORD, preempt_s=4990.0),
            ),
            By.SLURM,
            "preempting",
        ),
        (case(Cause.USER_ERROR), By.NOBODY, "--max-requeues=user-error=N"),
        (case(Cause.USER_ERROR, mode="always"), By.NOBODY, "--max-requeues=user-error=N"),
        (
            case(Cause.USER_ERROR, limits={**DEFAULT_LIMITS, Cause.USER_ERROR: 1}),
            By.FT_RUN,
            "why",
        ),
        (case(Cause.TIME_LIMIT, mode="never"), By.NOBODY, "--requeue=never"),
        (case(Cause.TIME_LIMIT, saved=False, attempts=[MUTE]), By.NOBODY, "--requeue=always"),
        (case(Cause.TIME_LIMIT, saved=False, mode="always"), By.FT_RUN, "why"),
        # The signal came before the program could open a session: so soon after its start, or in a
        # program that had one before.
        (case(Cause.TIME_LIMIT, saved=False, attempts=[BRIEF]), By.FT_RUN, "why"),
        (
            case(Cause.TIME_LIMIT, saved=False, attempts=[*attempts(Cause.PREEMPTED), MUTE]),
            By.FT_RUN,
            "why",
        ),
        (
            case(Cause.TIME_LIMIT, record=replace(RECORD, requeue=False)),
            By.NOBODY,
            "--requeue",
        ),
        (
            case(Cause.PREEMPTED, preempt_mode="REQUEUE", record=replace(RECORD, requeue=False)),
            By.NOBODY,
            "--requeue",
        ),
        (case(Cause.TIME_LIMIT, record=replace(RECORD, batch=False)), By.NOBODY, "sbatch"),
        (
            case(Cause.OPERATOR, record=replace(RECORD, state="PENDING")),
            By.SOMEBODY,
            "in the queue again",
        ),
        (
            case(Cause.OPERATOR, record=replace(RECORD, restarts=1)),
            By.SOMEBODY,
            "in the queue again",
        ),
        (
            case(Cause.TIME_LIMIT, saved=False, framework="Lightning"),
            By.PROGRAM,
            "Lightning requeues by itself",
        ),
        (
            case(Cause.TIME_LIMIT, framework="Lightning", mode="always"),
            By.FT_RUN,
            "why",
        ),
        (case(Cause.USER_ERROR, framework="Lightning"), By.NOBODY, "user-error"),
    ],
)
def test_decisions(found: Case, by: By, reason: str):
    answer = decide(found)
    assert answer.by is by
    assert reason in answer.reason
    assert answer.requeued == (by is not By.NOBODY)


@pytest.mark.parametrize(
    ("cause", "most"),
    [
        (Cause.TIME_LIMIT, 100),
        (Cause.LOST_PEER, 5),
        (Cause.OPERATOR, 100),
        (Cause.UNKNOWN, 5),
    ],
)
def test_requeue_storm_each_cause_has_its_own_bound(cause: Cause, most: int):
    within = case(cause, attempts=attempts(*[cause] * most), restarts=most - 1)
    assert decide(replace(within, record=replace(RECORD, restarts=most - 1))).by is By.FT_RUN
    over = case(cause, attempts=attempts(*[cause] * (most + 1)), restarts=most)
    answer = decide(replace(over, record=replace(RECORD, restarts=most)))
    assert answer.by is By.NOBODY
    assert f"{most} of {most}" in answer.reason
    # What others used up does not count.
    mixed = [*[Cause.PREEMPTED] * 50, cause]
    other = case(cause, attempts=attempts(*mixed), restarts=50)
    assert decide(replace(other, record=replace(RECORD, restarts=50))).by is By.FT_RUN


PREEMPTION = {"preempt_mode": "REQUEUE", "record": replace(RECORD, preempt_s=4990.0)}


@pytest.mark.parametrize(
    ("found", "warned"),
    [
        (case(Cause.PREEMPTED, saved=False, attempts=[MUTE], **PREEMPTION), True),
        (case(Cause.NODE_FAIL, saved=False, attempts=[MUTE]), True),
        (case(Cause.USER_ERROR, saved=False, attempts=[MUTE], **PREEMPTION), True),
        (case(Cause.PREEMPTED, attempts=[MUTE], **PREEMPTION), False),
        # It had a session before, and was ended before it could open it again.
        (
            case(
                Cause.PREEMPTED,
                saved=False,
                attempts=[*attempts(Cause.PREEMPTED), MUTE],
                **PREEMPTION,
            ),
            False,
        ),
        # Who says so knows that it saves by itself.
        (case(Cause.PREEMPTED, saved=False, attempts=[MUTE], mode="always", **PREEMPTION), False),
        (
            case(
                Cause.PREEMPTED, saved=False, attempts=[MUTE], framework="Lightning", **PREEMPTION
            ),
            False,
        ),
    ],
)
def test_what_slurm_brings_back_without_a_checkpoint_is_told(found: Case, warned: bool):
    answer = decide(found)
    assert answer.by is By.SLURM
    assert ("nothing says that the program saved anything" in answer.reason) is warned


@pytest.mark.parametrize(
    ("failed", "told"),
    [
        (None, "the program ended with 1"),
        ("SystemExit: 1", "the program ended with 1"),
        ("ValueError: no such layer", "the program ended with 1: ValueError: no such layer"),
    ],
)
def test_an_error_is_told_in_the_session_s_words(failed: str | None, told: str):
    assert classify(evidence(code=1, status=replace(SESSION, failed=failed)))[1] == told


def test_preemption_and_the_daemon_are_not_bounded():
    for cause in (Cause.PREEMPTED, Cause.DAEMON):
        found = case(cause, attempts=attempts(*[cause] * 64), restarts=63)
        assert decide(replace(found, record=replace(RECORD, restarts=63))).requeued


def test_without_a_ledger_slurm_s_count_bounds():
    found = case(Cause.LOST_PEER, restarts=5, record=replace(RECORD, restarts=5))
    assert "5 of 5" in decide(found).reason


def test_attempts_that_saved_nothing_new_end_the_job():
    for count in (1, 2):
        found = case(Cause.TIME_LIMIT, attempts=attempts(*[Cause.TIME_LIMIT] * count, saved=False))
        assert decide(found).requeued
    stuck = case(Cause.TIME_LIMIT, attempts=attempts(*[Cause.TIME_LIMIT] * 3, saved=False))
    assert "3 attempts in a row saved nothing new" in decide(stuck).reason
    allowed = replace(stuck, limits={**DEFAULT_LIMITS, Cause.NO_PROGRESS: None})
    assert decide(allowed).requeued
    # A job that is preempted all the time is not to blame.
    assert decide(replace(stuck, cause=Cause.PREEMPTED, preempt_mode="REQUEUE")).requeued


def test_an_attempt_that_a_pause_has_swallowed_is_not_to_blame():
    """Neither does it make good for the others: what counts is what went on without a pause."""
    stuck = attempts(*[Cause.TIME_LIMIT] * 3, saved=False)
    swallowed = tuple(replace(a, paused_s=500.0 * (a.number == 1)) for a in stuck)
    assert decide(case(Cause.TIME_LIMIT, attempts=swallowed)).requeued
    more = attempts(*[Cause.TIME_LIMIT] * 4, saved=False)
    swallowed = tuple(replace(a, paused_s=500.0 * (a.number == 1)) for a in more)
    assert "3 attempts in a row" in decide(case(Cause.TIME_LIMIT, attempts=swallowed)).reason


def test_a_pause_is_its_owner_s_and_says_so():
    found = evidence(status=replace(LEFT, **PAUSED))
    assert classify(found) == (Cause.OPERATOR, "paused by alice for 600 s")
    moved = replace(LEFT, leaving=words.ASKED, note="pause: everything is saved")
    assert classify(evidence(status=moved))[0] is Cause.DAEMON


def test_an_answer_tells_nothing_of_when_the_job_starts_again():
    """Slurm's own delay and the daemon's cool-down decide that, whatever a reason would promise."""
    limits = {**DEFAULT_LIMITS, Cause.LOST_PEER: None}
    short = [replace(a, ended_s=a.started_s + 5) for a in attempts(*[Cause.LOST_PEER] * 5)]
    answer = decide(case(Cause.LOST_PEER, attempts=short, limits=limits))
    assert (answer.by, answer.reason) == (By.FT_RUN, "why")


def test_limits():
    assert parse_limits("") == DEFAULT_LIMITS
    found = parse_limits("node-fail=3, TIME_LIMIT=unlimited,user-error=1")
    assert found[Cause.NODE_FAIL] == 3
    assert found[Cause.TIME_LIMIT] is None
    assert found[Cause.USER_ERROR] == 1
    assert found[Cause.LOST_PEER] == 5


@pytest.mark.parametrize("text", ["bored=3", "node-fail", "node-fail=", "node-fail=-1", "=3", ","])
def test_limit_slips(text: str):
    with pytest.raises(UsageError, match="--max-requeues="):
        parse_limits(text)


@given(
    st.sampled_from(Cause),
    st.sampled_from(["auto", "always", "never"]),
    st.booleans(),
    st.none() | st.just(RECORD) | st.just(replace(RECORD, requeue=False)),
    st.sampled_from(["", "REQUEUE", "CANCEL", "SUSPEND", "OFF"]),
    st.integers(0, 70),
)
def test_every_answer_has_a_reason_and_never_means_never(
    cause, mode, saved, record, preempt_mode, count
):
    found = Case(
        cause,
        "why",
        attempts(*[cause] * (count + 1)),
        DEFAULT_LIMITS,
        mode=mode,
        saved=saved,
        record=record and replace(record, restarts=count),
        preempt_mode=preempt_mode,
        restarts=count,
    )
    answer = decide(found)
    assert answer.reason
    if mode == "never" or (record is not None and not record.requeue):
        assert answer.by in (By.NOBODY, By.SLURM)
    if answer.by is By.FT_RUN:
        most = DEFAULT_LIMITS[cause]
        assert most is None or count < most


def test_a_job_that_somebody_holds_is_not_promised_to_come_back_by_itself():
    held = replace(RECORD, state="PENDING", reason="job_requeued_in_held_state")
    answer = decide(case(Cause.OPERATOR, record=held))
    assert answer.by is By.SOMEBODY
    assert "held there until it is released (scontrol release)" in answer.reason
    free = replace(RECORD, state="PENDING", reason="BeginTime")
    assert "held" not in decide(case(Cause.OPERATOR, record=free)).reason

"""The ledger: merged, closed late, bounded, replaced atomically."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.domain.attempt import (
    MAX_ATTEMPTS,
    MAX_ATTEMPTS_BYTES,
    Attempt,
    Attempts,
    Cause,
    parse_attempts,
)
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.request import attempts_path
from slurm_ft.requeue import attempts
from slurm_ft.status import Status

EMPTY = Attempts("77", ())


def test_an_attempt_begins_and_ends(tmp_path: Path):
    path = tmp_path / attempts.file_name("77")
    assert attempts.load(path, "77") == EMPTY
    ledger = attempts.begin(EMPTY, Attempt(0, 100.0, 4, nodes=("n1",)))
    attempts.store(path, ledger)
    assert attempts.load(path, "77") == ledger
    ended = replace(ledger.attempts[-1], ended_s=200.0, cause=Cause.PREEMPTED, requeued=True)
    attempts.store(path, attempts.close(ledger, ended))
    assert attempts.load(path, "77").attempts == (ended,)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_daemon_looks_for_the_same_name():
    assert attempts_path(Path("/spool"), 5, "12_3").name == attempts.file_name("12_3")


def test_only_so_many_are_kept():
    ledger = EMPTY
    for number in range(MAX_ATTEMPTS + 5):
        ledger = attempts.begin(ledger, Attempt(number, float(number), 1))
    assert len(ledger.attempts) == MAX_ATTEMPTS
    assert ledger.attempts[-1].number == MAX_ATTEMPTS + 4


def test_a_job_of_many_nodes_still_fits(tmp_path: Path):
    nodes = tuple(f"a-rather-long-node-name-{n:05d}" for n in range(1000))
    ledger = EMPTY
    for number in range(8):
        ledger = attempts.begin(ledger, Attempt(number, float(number), 4000, nodes=nodes))
    path = tmp_path / "ledger"
    attempts.store(path, ledger)
    assert path.stat().st_size <= MAX_ATTEMPTS_BYTES
    kept = attempts.load(path, "77").attempts
    assert [a.number for a in kept] == list(range(8))
    assert kept[-1].nodes == nodes
    assert kept[0].nodes == ()
    parse_attempts(path.read_text(), "ledger")


def test_what_the_session_told():
    said = Status(
        attempt=2, rank=0, pid=1, at_s=0.0, step=9, saved_step=8, restored_step=4, save_s=1.5
    )
    found = attempts.with_status(Attempt(2, 0.0, 1), said)
    assert (found.last_step, found.saved_step, found.restored_step, found.save_s) == (9, 8, 4, 1.5)
    assert attempts.with_status(Attempt(3, 0.0, 1), said) == Attempt(3, 0.0, 1)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("0|NODE_FAIL|2026-11-29T21:56:54", Cause.NODE_FAIL),
        ("0|PREEMPTED|2026-11-29T21:56:54", Cause.PREEMPTED),
        ("0|TIMEOUT|2026-11-29T21:56:54", Cause.TIME_LIMIT),
        ("0|REQUEUED|2026-11-29T21:56:54", Cause.OPERATOR),
        ("0|CANCELLED by 1000|2026-11-29T21:56:54", Cause.CANCELLED),
        ("0|SOMETHING_NEW|2026-11-29T21:56:54", Cause.UNKNOWN),
        ("1|NODE_FAIL|2026-11-29T21:56:54", Cause.UNKNOWN),
        ("sacct: error", Cause.UNKNOWN),
    ],
)
def test_ends_that_only_the_accounting_knows(row: str, cause: Cause):
    ledger = attempts.begin(attempts.begin(EMPTY, Attempt(0, 1.0, 1)), Attempt(1, 2.0, 1))
    assert attempts.unsure_before(ledger, 1)
    closed = attempts.close_from_sacct(ledger, 1, [row])
    assert closed.attempts[0].cause is cause
    assert closed.attempts[0].requeued
    assert closed.attempts[1].cause is None


def test_the_accounting_corrects_what_was_written_in_a_hurry_and_nothing_else():
    hurried = Attempt(1, 2.0, 1, cause=Cause.CANCELLED, reason="the job was cancelled")
    known = Attempt(0, 1.0, 1, cause=Cause.TIME_LIMIT, requeued=True, reason="limit")
    ledger = Attempts("77", (known, hurried, Attempt(2, 3.0, 1)))
    rows = ["0|REQUEUED|x", "1|NODE_FAIL|x", "2|RUNNING|Unknown"]
    closed = attempts.close_from_sacct(ledger, 2, rows)
    assert closed.attempts[0] == known
    assert (closed.attempts[1].cause, closed.attempts[1].requeued) == (Cause.NODE_FAIL, True)
    silent = attempts.close_from_sacct(ledger, 2, [])
    # It is here again, so it was not cancelled for good; nobody knows better what it was.
    assert (silent.attempts[1].cause, silent.attempts[1].requeued) == (Cause.CANCELLED, True)
    assert not attempts.unsure_before(Attempts("77", (known, Attempt(1, 2.0, 1))), 1)


def test_a_ledger_of_another_form_is_not_taken_for_an_empty_one(tmp_path: Path):
    path = tmp_path / "ledger"
    path.write_text("{}")
    with pytest.raises(ProtocolError):
        attempts.load(path, "77")
    path.write_text(" " * (MAX_ATTEMPTS_BYTES + 1))
    with pytest.raises(ProtocolError, match="longer than"):
        attempts.load(path, "77")


def test_a_full_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "ledger"
    attempts.store(path, EMPTY)
    before = path.read_text()

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        attempts.store(path, attempts.begin(EMPTY, Attempt(0, 1.0, 1)))
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ledger"]

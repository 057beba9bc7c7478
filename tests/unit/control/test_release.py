"""Release: every job back in its submitted shape and native place, whatever state we died in."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os

import pytest

from slurm_ext.cli import release as command
from slurm_ext.control.heartbeat import beat
from slurm_ext.control.journal import Journal
from slurm_ext.control.ledger import holds_something
from slurm_ext.control.locks import FileLock, life_lock
from slurm_ext.control.release import Outcome, release
from slurm_ext.control.released import clear_released, is_released
from slurm_ext.control.resume import REVOKED_S
from slurm_ext.domain.action import ActionKind
from slurm_ext.domain.document import Mode
from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.job import JobState
from tests.fakes.slurm import Fault
from tests.unit.control.bench import Bench


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def run(bench: Bench, **options):
    return release(bench.slurm, bench.config, lambda: bench.slurm.now, **options)


def let_nothing_be_left(bench: Bench, jobs: list[str], gpus: int = 4) -> None:
    for job in jobs:
        found = bench.slurm.find(job)
        assert found.begin_s <= bench.now, job
        assert found.site_factor == 0, job
        assert found.gpus == gpus, job
        assert found.time_limit_s == 7200.0, job
        assert not found.req_nodes, job
    with Journal(bench.config.journal, 1000) as journal:
        held = [e.job_id for e in journal.ledger().values() if holds_something(e)]
    assert [job for job in held if job in jobs] == []


def test_leased_jobs_are_let_go_in_native_order(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(4)]
    bench.cycles(3)
    bench.engine.close()
    found = run(bench)
    assert found.outcome is Outcome.DONE
    assert found.writes["lift"] == 4
    let_nothing_be_left(bench, jobs)
    assert run(bench).outcome is Outcome.NOTHING


def test_a_job_that_came_back_a_moment_ago_is_waited_for(bench):
    """Let go at once, Slurm would fail it for good; left alone, nobody would let it go."""
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles(3)
    bench.engine.close()
    bench.slurm.find(job).restarts = 1
    bench.slurm.find(job).submit_s = bench.now
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        bench.slurm.advance(seconds)

    assert bench.slurm.find(job).begin_s > bench.now
    found = run(bench, sleep=sleep)
    assert found.writes["lift"] == 1
    assert waits == [REVOKED_S]
    let_nothing_be_left(bench, [job])


def test_a_daemon_killed_after_any_write_leaves_nothing_that_release_cannot_undo(tmp_path):
    """Dies after the first, second, ... write of a cycle that resizes, pins and lifts."""
    total = None
    died_at = 0
    while total is None or died_at <= total:
        folder = tmp_path / str(died_at)
        folder.mkdir()
        bench = Bench(folder)
        blocker = bench.fill()
        jobs = [bench.submit(gpus=4) for _ in range(3)]
        bench.cycles(3)
        bench.slurm.cancel(blocker)
        for node in bench.slurm.nodes:  # nothing starts meanwhile, so that all is to be undone
            bench.slurm.set_node(node, "DRAIN" if died_at else "IDLE")
        for node in list(bench.slurm.nodes)[:2]:
            bench.slurm.set_node(node, "IDLE")
        bench.slurm.writes.clear()
        written = 0

        def die(slurm, action, limit=died_at):
            nonlocal written
            if limit and written >= limit:
                raise KeyboardInterrupt
            written += 1

        bench.slurm.before_write = die
        with contextlib.suppress(KeyboardInterrupt):
            bench.engine.cycle()
        bench.slurm.before_write = None
        bench.engine.close()
        if total is None:
            total = len(bench.slurm.writes)
            assert total > 3
        assert run(bench).outcome in (Outcome.DONE, Outcome.NOTHING)
        let_nothing_be_left(
            bench, [j for j in jobs if bench.slurm.find(j).state is JobState.PENDING]
        )
        died_at += 1


def test_a_fresh_heartbeat_stops_the_timer_and_an_old_one_does_not(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(2)]
    bench.cycles(3)
    calls = dict(bench.slurm.calls)
    assert run(bench, if_stale=True).outcome is Outcome.ALIVE
    assert bench.slurm.calls == calls
    bench.engine.close()
    bench.slurm.advance(bench.config.lease_s / 4)
    assert run(bench, if_stale=True).outcome is Outcome.ALIVE
    bench.slurm.advance(bench.config.lease_s)
    assert run(bench, if_stale=True).outcome is not Outcome.ALIVE
    let_nothing_be_left(bench, jobs)


def test_the_timer_asks_slurm_nothing_when_nothing_is_out(bench):
    bench.cycles()
    bench.engine.close()
    bench.config.heartbeat.unlink()
    calls = dict(bench.slurm.calls)
    assert run(bench, if_stale=True).outcome is Outcome.NOTHING
    assert bench.slurm.calls == calls


def test_a_lost_journal_is_rebuilt_from_the_spool(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()
    for path in bench.config.journal.parent.iterdir():
        path.unlink()
    assert run(bench, if_stale=False).outcome is Outcome.DONE
    let_nothing_be_left(bench, jobs)


def test_a_damaged_journal_does_not_stop_it(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()
    bench.config.journal.write_bytes(b"garbage" * 1000)
    assert run(bench).outcome is Outcome.DONE
    let_nothing_be_left(bench, jobs)


def test_a_journal_that_cannot_be_written_does_not_stop_it(bench, monkeypatch, caplog):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()

    def full(*_args, **_options):
        raise DataError("journal", "the disk is full", "free it")

    monkeypatch.setattr(Journal, "store", full)
    assert run(bench).outcome is Outcome.DONE
    assert "the disk is full" in caplog.text
    assert all(bench.slurm.find(job).begin_s <= bench.now for job in jobs)


def test_a_journal_that_cannot_be_opened_does_not_stop_it(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()
    for path in bench.config.journal.parent.iterdir():
        path.unlink()
    bench.config.journal.parent.rmdir()
    bench.config.journal.parent.write_text("no directory")
    assert run(bench).outcome is Outcome.DONE
    assert all(bench.slurm.find(job).begin_s <= bench.now for job in jobs)


def test_with_everything_lost_leases_expire_by_themselves(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()
    for folder in (bench.config.journal.parent, bench.config.spool / "plans"):
        for path in folder.iterdir():
            path.unlink()
    run(bench)
    bench.slurm.advance(bench.config.lease_s)
    let_nothing_be_left(bench, jobs)


def test_what_slurm_does_not_take_back_is_told(bench, capsys, monkeypatch):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(2)]
    bench.cycles(3)
    bench.engine.close()
    bench.slurm.refuse("StartTime", times=1000)
    found = run(bench)
    assert found.outcome is Outcome.LEFT
    assert {action.job_id for action in found.left} == set(jobs)
    assert {action.kind for action in found.left} == {ActionKind.LIFT}
    monkeypatch.setattr(command, "load_config", lambda *_, **__: bench.config)
    monkeypatch.setattr(command, "open_backend", lambda _: bench.slurm)
    monkeypatch.setattr(command.time, "time", lambda: bench.slurm.now)
    args = argparse.Namespace(config=None, overrides=[], resume=False, if_stale=False)
    assert command.run(args) == 1
    assert "Slurm does not take StartTime=now" in capsys.readouterr().err


def test_slurm_being_away_is_an_error_and_the_next_try_works(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(2)]
    bench.cycles(3)
    bench.engine.close()
    bench.slurm.inject("snapshot", Fault.FAIL)
    with pytest.raises(SourceMissingError):
        run(bench)
    bench.slurm.inject("apply", Fault.HALF)
    with pytest.raises(SourceMissingError):
        run(bench)
    assert run(bench).outcome is Outcome.DONE
    let_nothing_be_left(bench, jobs)


def test_beside_a_living_daemon_it_stays_released_until_it_is_resumed(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    lock = FileLock(life_lock(bench.config.journal))
    assert lock.acquire()
    found = run(bench)
    assert found.marked
    assert is_released(bench.config.journal)
    reports = bench.cycles(3)
    assert {report.mode for report in reports} == {Mode.RELEASED}
    let_nothing_be_left(bench, jobs)
    assert clear_released(bench.config.journal)
    bench.cycles(2)
    assert all(bench.slurm.find(job).begin_s > bench.now for job in jobs)
    lock.release()


def test_a_living_daemon_that_cannot_be_told_does_not_stop_it(bench, monkeypatch, caplog):
    """A full disk takes no mark."""

    def full(path, *_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    lock = FileLock(life_lock(bench.config.journal))
    assert lock.acquire()
    monkeypatch.setattr("slurm_ext.control.released.replace_file", full)
    found = run(bench)
    assert (found.outcome, found.marked) == (Outcome.DONE, False)
    let_nothing_be_left(bench, jobs)
    assert "stop it" in caplog.text
    lock.release()


def test_the_timer_leaves_no_mark(bench):
    bench.fill()
    bench.submit(gpus=4)
    bench.cycles(2)
    lock = FileLock(life_lock(bench.config.journal))
    assert lock.acquire()  # a daemon that hangs: alive, but without a heartbeat
    beat(bench.config.heartbeat, bench.now - 10_000, bench.config.lease_s, 1)
    found = run(bench, if_stale=True)
    assert found.outcome is Outcome.DONE
    assert not is_released(bench.config.journal)
    lock.release()


def test_a_person_beside_us_keeps_what_is_theirs(bench):
    """A user's own hold, --begin and priority survive a release."""
    bench.fill()
    held = bench.submit(gpus=4)
    later = bench.submit(gpus=4, begin_s=bench.now + 5000)
    foreign = bench.slurm.submit(gpus=4, begin_s=bench.now + 4000)
    bench.slurm.hold(held)
    bench.cycles(3)
    bench.engine.close()
    run(bench)
    assert bench.slurm.find(held).held_by_user
    assert bench.slurm.find(later).begin_s > bench.now + 4000
    assert bench.slurm.find(foreign).begin_s > bench.now + 3000

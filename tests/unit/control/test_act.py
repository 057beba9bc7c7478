"""Acting: waves, their bound, what is told about each write; documents and news beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.changes import DecisionLog
from slurm_ext.control.documents import DocumentKeeper, same
from slurm_ext.control.journal import Journal
from slurm_ext.control.runs import MIN_RUN_S, RunWatch
from slurm_ext.control.spool import read_plan
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.job import JobState
from slurm_ext.domain.plan import Decision, Verdict
from tests.fakes.slurm import FakeSlurm
from tests.unit.control.bench import Bench


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_writes_of_a_cycle_are_bounded_and_the_rest_follows(tmp_path):
    bench = Bench(tmp_path, max_writes_per_cycle=3)
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(8)]
    reports = bench.cycles(5)
    assert max(report.writes for report in reports) <= 3
    assert all(bench.slurm.find(job).begin_s > bench.now for job in jobs)


def test_every_write_is_journalled_with_reason_fields_and_outcome(bench):
    job = bench.submit(gpus=4)
    bench.cycles()
    with Journal(bench.config.journal, 1000) as journal:
        rows = [row for row in journal.history(job) if row.event.startswith("write")]
    assert [row.event for row in rows][-1] == "write:lift"
    assert all(row.outcome in ("ok", "gone: it does not wait any more") for row in rows)
    assert all(row.reason and row.fields for row in rows)
    assert len(rows) == len(bench.slurm.writes)


def test_a_refused_write_is_told_with_slurms_words_and_not_repeated_in_its_cycle(bench):
    job = bench.submit(gpus=4)
    bench.slurm.refuse("NumTasks", "Requested node configuration is not available", times=1000)
    (report,) = bench.cycles()
    assert report.failed == 1
    sizes = [a for a in bench.slurm.writes if any(key == "NumTasks" for key, _ in a.fields)]
    assert len(sizes) == 1
    with Journal(bench.config.journal, 1000) as journal:
        outcomes = [row.outcome for row in journal.history(job) if row.outcome]
    assert any("Requested node configuration is not available" in text for text in outcomes)


def test_a_write_that_slurm_accepts_and_does_not_do_is_noticed(bench, monkeypatch):
    job = bench.submit(gpus=4)
    whole = bench.slurm._write

    def half(action):
        fields = tuple(f for f in action.fields if f[0] != "NumTasks")
        result = whole(replace(action, fields=fields))
        return replace(result, action=action)

    monkeypatch.setattr(bench.slurm, "_write", half)
    (report,) = bench.cycles()
    assert report.failed == 1
    with Journal(bench.config.journal, 1000) as journal:
        outcomes = {row.outcome for row in journal.history(job)}
    assert "not read back: Slurm shows something else" in outcomes
    assert bench.slurm.find(job).state is JobState.PENDING  # never let go as it is


def test_the_document_lies_in_the_spool_before_the_job_may_start(bench):
    job = bench.submit(gpus=4)
    found = []

    def look(slurm, action):
        if ("StartTime", "now") in action.fields:
            found.append(read_plan(bench.config.spool, int(job)).decision.configuration.gpus)

    bench.slurm.before_write = look
    bench.cycles()
    assert found == [16]


def test_while_another_writes_nothing_is_written(bench):
    from slurm_ext.control.locks import FileLock, acting_lock

    job = bench.submit(gpus=4)
    lock = FileLock(acting_lock(bench.config.journal))
    assert lock.acquire()
    (report,) = bench.cycles()
    assert (report.writes, report.skipped) == (0, "")
    lock.release()
    bench.cycles()
    assert bench.slurm.find(job).state is JobState.RUNNING


def decision(verdict: Verdict = Verdict.START, gpus: int = 4, **changes: object) -> Decision:
    values: dict[str, object] = {
        "configuration": Configuration(gpus, (gpus,)),
        "reason": "because",
        **changes,
    }
    return Decision("1", verdict, 0, **values)  # type: ignore[arg-type]


def test_news_are_what_a_user_would_call_another_decision():
    log = DecisionLog()
    first = decision()
    assert log.news({"1": first}) == [first]
    assert log.news({"1": replace(first, rank=7, reason="other words")}) == []
    assert len(log.news({"1": decision(gpus=8)})) == 1
    assert len(log.news({"1": decision(gpus=8, nodes=("n1",))})) == 1
    waiting = decision(Verdict.WAIT, gpus=8)
    assert log.news({"1": waiting}) == [waiting]
    assert log.news({"1": decision(Verdict.WAIT, gpus=2)}) == []  # a guess, not a decision
    leave = decision(Verdict.LEAVE, reason="its owner holds it")
    assert log.news({"1": leave}) == [leave]
    assert len(log.news({"1": replace(leave, reason="it depends on 5")})) == 1
    assert log.news({}) == []
    assert len(log.news({"1": replace(leave, reason="it depends on 5")})) == 1


def test_a_document_is_written_again_when_it_tells_something_new(bench):
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles(2)
    old = read_plan(bench.config.spool, int(job))
    assert not same(None, old)
    assert same(old, replace(old, made_s=old.made_s + 5, priority=old.priority + 3))
    assert not same(old, replace(old, place=2))
    moved = replace(old.decision, expected_start_s=old.made_s + 10_000.0)
    document = replace(old, decision=moved)
    assert same(
        document, replace(document, decision=replace(moved, expected_start_s=old.made_s + 10_050.0))
    )
    assert not same(
        document, replace(document, decision=replace(moved, expected_start_s=old.made_s + 20_000.0))
    )
    assert not same(document, replace(document, decision=replace(moved, expected_start_s=None)))


def test_documents_of_starting_jobs_come_first_and_are_bounded(bench, monkeypatch):
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles(2)
    base = read_plan(bench.config.spool, int(job))
    start = replace(base.decision, verdict=Verdict.START, rank=99)
    documents = {n: replace(base, base_id=n, place=n) for n in range(1, 6)}
    documents[6] = replace(base, base_id=6, decision=start)
    monkeypatch.setattr("slurm_ext.control.documents.MAX_WRITES", 3)
    keeper = DocumentKeeper()
    due = keeper.due(documents)
    assert [d.base_id for d in due] == [6, 1, 2]
    keeper.wrote(due)
    assert [d.base_id for d in keeper.due(documents)] == [3, 4, 5]


def test_runs_are_told_when_they_end_and_only_then():
    slurm = FakeSlurm(nodes=2)
    ends, requeued, short = (
        slurm.submit(gpus=4, time_limit_s=1000.0, run_s=400.0),
        slurm.submit(gpus=2, time_limit_s=1000.0, run_s=4000.0),
        slurm.submit(gpus=2, time_limit_s=1000.0, run_s=MIN_RUN_S / 2),
    )
    slurm.advance(1)
    watch = RunWatch()
    assert watch.watch(slurm.snapshot(), {ends: 200.0}, slurm.now) == []
    slurm.advance(MIN_RUN_S - 10)
    slurm.requeue(requeued)
    assert watch.watch(slurm.snapshot(), {}, slurm.now) == []
    assert slurm.find(short).state is JobState.COMPLETED
    slurm.advance(400)
    told = watch.watch(slurm.snapshot(), {}, slurm.now)
    assert {(run.kind.value, run.declared_s) for run in told} == {
        ("limit", 1000.0),
        ("work", 200.0),
    }
    assert all(400 <= run.actual_s <= 450 for run in told)
    assert watch.watch(slurm.snapshot(), {}, slurm.now) == []

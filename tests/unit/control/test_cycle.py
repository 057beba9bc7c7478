"""Whole cycles against the fake Slurm: what is written, told, remembered and survived."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control.heartbeat import is_stale, last_beat
from slurm_ext.control.journal import Journal
from slurm_ext.control.ledger import KEEP_S
from slurm_ext.control.spool import Spool, read_cluster, read_plan, write_request
from slurm_ext.domain.action import ActionKind
from slurm_ext.domain.document import ENDED, Mode
from slurm_ext.domain.errors import SolverError, SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.domain.node import Limits
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.request import PinRequest, cluster_path, table_path
from slurm_ext.estimate.table import read_table
from tests.fakes.slurm import Fault
from tests.unit.control.bench import Bench


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_an_observer_plans_tells_and_changes_nothing(tmp_path):
    bench = Bench(tmp_path, act=[])
    job = bench.submit()
    (report,) = bench.cycles()
    assert (report.jobs, report.writes, report.mode) == (1, 0, Mode.OBSERVE)
    assert bench.slurm.writes == []
    document = read_plan(bench.config.spool, int(job))
    assert document.mode is Mode.OBSERVE
    assert document.decision.verdict is Verdict.START
    assert len(document.candidates) > 1
    assert not is_stale(bench.config.heartbeat, bench.now)


def test_observe_overrides_the_configuration(bench):
    bench.start(observe_only=True)
    bench.submit()
    bench.cycles(3)
    assert bench.slurm.writes == []


def test_a_job_is_grown_into_an_empty_cluster_and_starts_at_once(bench):
    job = bench.submit(gpus=4)
    (report,) = bench.cycles()
    assert report.writes > 0
    found = bench.slurm.find(job)
    assert found.state is JobState.RUNNING
    assert found.gpus == 16
    document = read_plan(bench.config.spool, int(job))
    assert document.decision.configuration.gpus == 16
    assert document.requested_gpus == 4
    bench.cycles()
    document = read_plan(bench.config.spool, int(job))
    assert (document.state, document.present_gpus) == ("RUNNING", 16)


def test_a_cycle_in_which_nothing_changed_writes_nothing_but_due_renewals(bench):
    bench.fill()
    waiting = [bench.submit(gpus=4) for _ in range(5)]
    bench.cycles(4)
    bench.slurm.writes.clear()
    # Half a lease: every job is renewed exactly once, and nothing else is written.
    bench.cycles(int(bench.config.lease_s * bench.config.renew_at / bench.config.cycle_s))
    assert {action.kind for action in bench.slurm.writes} == {ActionKind.LEASE}
    assert sorted(action.job_id for action in bench.slurm.writes) == sorted(waiting)
    assert all(bench.slurm.find(job).state is JobState.PENDING for job in waiting)


def test_what_is_ours_is_journalled_before_slurm_is_written_to(bench):
    job = bench.submit()
    seen = []

    def check(slurm, action):
        with Journal(bench.config.journal, 1000) as journal:
            entry = journal.ledger()[action.job_id]
        for keyword, value in action.fields:
            if keyword == "NumTasks":
                seen.append(entry.written.ntasks == int(value))
            if keyword == "StartTime" and value != "now":
                seen.append(entry.lease_until_s is not None)

    bench.slurm.before_write = check
    bench.cycles(2)
    assert bench.slurm.find(job).gpus == 16
    assert seen
    assert all(seen)


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.HANG, Fault.TRUNCATED])
@pytest.mark.parametrize("call", ["snapshot", "admin_comments", "slurm_config"])
def test_a_missing_source_skips_the_cycle_and_is_counted(bench, call, fault):
    job = bench.submit()
    bench.slurm.inject(call, fault)
    (report,) = bench.cycles()
    assert report.skipped
    assert bench.slurm.writes == []
    assert is_stale(bench.config.heartbeat, bench.now)
    skipped = bench.engine.metrics.skipped.collect()[0].samples
    assert sum(s.value for s in skipped if s.name.endswith("_total")) == 1
    bench.cycles(2)
    assert bench.slurm.find(job).state is JobState.RUNNING


def test_time_in_which_slurm_did_not_answer_is_no_failure_to_start(bench, monkeypatch):
    job = bench.submit()
    with monkeypatch.context() as held:
        held.setattr(bench.slurm, "_schedule", lambda: None)
        bench.cycles()
        bench.slurm.inject("snapshot", Fault.FAIL, times=60)
        assert all(report.skipped for report in bench.cycles(60))
        bench.cycles(2)
        decision = read_plan(bench.config.spool, int(job)).decision
        assert decision.verdict is Verdict.START, decision.reason
        # From then on Slurm answers, and its patience is used up as ever.
        bench.cycles(30)
        assert read_plan(bench.config.spool, int(job)).decision.left_to_slurm


def test_limits_that_cannot_be_read_again_keep_their_last_value(bench):
    bench.fill()
    bench.cycles()
    bench.slurm.inject("limits", Fault.FAIL, times=100)
    bench.slurm.advance(120)
    (report,) = bench.cycles()
    assert not report.skipped
    assert "squeue" in read_cluster(bench.config.spool).refusals


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.HALF])
def test_a_write_that_dies_half_way_is_finished_by_the_next_cycles(bench, fault):
    jobs = [bench.submit(gpus=4) for _ in range(4)]
    bench.slurm.inject("apply", fault)
    (report,) = bench.cycles()
    assert report.skipped
    with Journal(bench.config.journal, 1000) as journal:
        assert any(row.outcome.startswith("unknown") for row in journal.history())
    bench.cycles(4)
    assert all(bench.slurm.find(job).state is JobState.RUNNING for job in jobs)
    assert bench.slurm.shrunk == []


def test_the_read_back_failing_ends_the_cycle_and_nothing_else(bench):
    job = bench.submit()
    bench.slurm.inject("jobs", Fault.FAIL)
    (report,) = bench.cycles()
    assert report.skipped
    bench.cycles(2)
    assert bench.slurm.find(job).state is JobState.RUNNING


def test_a_job_that_starts_between_plan_and_write_keeps_its_ranks(bench):
    job = bench.submit(gpus=4)

    def start(slurm, action):
        waits = action.job_id == job and slurm.find(job).state is JobState.PENDING
        if waits and any(key == "NumTasks" for key, _ in action.fields):
            slurm.start(job)

    bench.slurm.before_write = start
    bench.cycles(3)
    found = bench.slurm.find(job)
    assert found.state is JobState.RUNNING
    assert found.gpus == 4
    assert bench.slurm.shrunk == []


def test_a_job_cancelled_between_plan_and_write_is_no_error(bench):
    job = bench.submit()
    bench.slurm.before_write = lambda slurm, action: (
        slurm.cancel(job)
        if job in slurm.queue or slurm.find(job).state.value == "PENDING"
        else None
    )
    bench.cycles(2)
    with Journal(bench.config.journal, 1000) as journal:
        outcomes = {row.outcome for row in journal.history(job) if row.event.startswith("write")}
    assert outcomes == {"gone: it does not wait any more"}


def test_a_resize_that_slurm_refuses_lets_the_job_run_as_submitted(bench):
    job = bench.submit(gpus=4)
    bench.slurm.refuse("NumTasks", times=100)
    bench.cycles(12)
    found = bench.slurm.find(job)
    assert found.state is JobState.RUNNING
    assert found.gpus == 4


def test_a_restarted_daemon_goes_on_without_writing_again(bench):
    bench.fill()
    for _ in range(3):
        bench.submit(gpus=4)
    bench.cycles(3)
    entries = dict(bench.engine.memory.ledger)
    bench.engine.close()
    bench.slurm.writes.clear()
    bench.start()
    assert dict(bench.engine.memory.ledger) == entries
    reports = bench.cycles(2)
    assert [r.writes for r in reports] == [0, 0]


@pytest.mark.parametrize("damage", ["lost", "garbage"])
def test_a_lost_journal_is_rebuilt_from_slurm_and_spool(bench, damage, caplog):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    entries = {job: bench.engine.memory.ledger[job] for job in jobs}
    assert all(entry.lease_until_s for entry in entries.values())
    bench.engine.close()
    for path in bench.config.journal.parent.iterdir():
        if damage == "lost":
            path.unlink()
    if damage == "garbage":
        bench.config.journal.write_bytes(b"garbage" * 1000)
    bench.start()
    (report,) = bench.cycles()
    assert not report.skipped
    assert report.writes == 0  # the leases are known to be ours
    found = {job: bench.engine.memory.ledger[job] for job in jobs}
    assert {j: e.lease_until_s for j, e in found.items()} == {
        j: e.lease_until_s for j, e in entries.items()
    }
    assert "journal" in caplog.text


def test_with_journal_and_spool_lost_every_job_still_starts(bench):
    head = bench.submit(gpus=16, samples=36_000)
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    bench.engine.close()
    for path in bench.config.journal.parent.iterdir():
        path.unlink()
    for path in (bench.config.spool / "plans").iterdir():
        path.unlink()
    bench.start()
    for _ in range(200):
        bench.cycles()
        if all(bench.slurm.find(j).state is JobState.COMPLETED for j in [head, *jobs]):
            break
    else:
        pytest.fail("a job never ran")


def test_a_journal_removed_under_our_feet_is_written_anew(bench):
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles(3)
    bench.config.journal.unlink()
    bench.cycles()
    with Journal(bench.config.journal, 1000) as journal:
        assert journal.ledger()[job] == bench.engine.memory.ledger[job]


@pytest.mark.parametrize("damage", ["lost", "garbage"])
def test_a_table_that_is_lost_is_told_and_jobs_still_start(tmp_path, damage, caplog):
    bench = Bench(tmp_path)
    if damage == "lost":
        bench.config.table.unlink()
    else:
        bench.config.table.write_bytes(b"garbage" * 1000)
    job = bench.submit(gpus=4)
    bench.cycles(2)
    assert bench.slurm.find(job).state is JobState.RUNNING
    assert bench.slurm.find(job).gpus == 4
    assert str(bench.config.table) in caplog.text
    assert any(str(bench.config.table) in w for w in read_cluster(bench.config.spool).refusals)


def test_a_pin_of_the_owner_stops_resizing_and_its_release_allows_it(bench):
    blocker = bench.fill()
    job = bench.submit(gpus=4, uid=0)
    write_request(bench.config.spool, 0, PinRequest(int(job), True, bench.now))
    bench.cycles()
    document = read_plan(bench.config.spool, int(job))
    assert "its owner pinned its GPU count (slurm-ext pin)" in document.permit.reasons
    assert [c.gpus for c in document.candidates] == [4]
    write_request(bench.config.spool, 0, PinRequest(int(job), False, bench.now + 1))
    bench.cycles()
    document = read_plan(bench.config.spool, int(job))
    assert len(document.candidates) > 1
    assert bench.slurm.find(blocker).state is JobState.RUNNING


def test_a_pin_by_somebody_else_counts_nothing(bench):
    bench.fill()
    job = bench.submit(gpus=4, uid=2001)
    write_request(bench.config.spool, 0, PinRequest(int(job) + 1, True, bench.now))
    bench.cycles()
    assert len(read_plan(bench.config.spool, int(job)).candidates) > 1


def test_a_pinned_count_is_given(bench):
    job = bench.submit(gpus=4, uid=0)
    write_request(bench.config.spool, 0, PinRequest(int(job), True, bench.now, gpus=2))
    bench.cycles(3)
    found = bench.slurm.find(job)
    assert (found.state, found.gpus) == (JobState.RUNNING, 2)


def test_switching_acting_off_gives_everything_back(bench):
    bench.fill()
    jobs = [bench.submit(gpus=4) for _ in range(3)]
    bench.cycles(3)
    assert any(bench.slurm.find(job).begin_s > bench.now for job in jobs)
    bench.engine.reconfigure(bench.config.observing())
    bench.cycles(2)
    for job in jobs:
        found = bench.slurm.find(job)
        assert found.begin_s <= bench.now
        assert found.site_factor == 0
        assert found.gpus == 4
    assert read_plan(bench.config.spool, int(jobs[0])).mode is Mode.OBSERVE


def test_foreign_jobs_are_never_written_to_and_have_no_document(bench):
    bench.fill()
    foreign = bench.slurm.submit(gpus=4, admin_comment="", time_limit_s=3600)
    bench.submit(gpus=4)
    bench.cycles(5)
    assert all(action.job_id != foreign for action in bench.slurm.writes)
    with pytest.raises(SourceMissingError):
        read_plan(bench.config.spool, int(foreign))


def test_a_damaged_directive_is_left_alone_and_told(bench):
    job = bench.slurm.submit(gpus=4, admin_comment='ft:{"v":1,"gpus":7}')
    bench.cycles()
    document = read_plan(bench.config.spool, int(job))
    assert document.decision.verdict is Verdict.LEAVE
    assert "directive is unusable" in document.decision.reason
    assert bench.slurm.find(job).state is JobState.RUNNING


def test_the_cluster_document_and_the_heartbeat_are_of_this_cycle(bench):
    bench.submit()
    bench.cycles(3)
    whole = read_cluster(bench.config.spool)
    beat = last_beat(bench.config.heartbeat)
    assert whole.cycle == beat.cycle == 3
    assert whole.mode is Mode.ACTING
    assert whole.acting["main"] == ("lease", "order", "pin", "resize")


def test_a_decision_is_logged_once_with_job_action_and_reason(bench, caplog):
    caplog.set_level("INFO")
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles(4)
    lines = [
        r.data for r in caplog.records if r.getMessage() == "decision" and r.data["job"] == job
    ]
    assert [line["action"] for line in lines] == ["wait"]
    assert lines[0]["reason"]
    with Journal(bench.config.journal, 1000) as journal:
        rows = [r for r in journal.history(job) if r.event.startswith("decision")]
    assert [r.event for r in rows] == ["decision:wait"]
    assert json.loads(rows[0].terms)


def test_a_spool_that_cannot_be_used_costs_documents_and_no_cycle(tmp_path, caplog):
    (tmp_path / "spool").write_text("not a directory")
    bench = Bench(tmp_path)
    job = bench.submit()
    bench.cycles(2)
    assert bench.slurm.find(job).state is JobState.RUNNING
    assert "spool" in caplog.text
    (tmp_path / "spool").unlink()
    bench.submit(gpus=4)
    bench.cycles()
    assert read_cluster(bench.config.spool).cycle == 3


def test_a_spool_that_cannot_be_written_is_told_once(bench, monkeypatch, caplog):
    def full(path, *_args, **_options):
        name = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(name))

    monkeypatch.setattr("slurm_ext.control.spool.replace_file", full)
    bench.fill()
    bench.cycles(5)
    assert caplog.text.count("No space left") == 1


def test_past_runs_teach_habits(bench):
    job = bench.submit(gpus=4, samples=72_000)
    bench.cycles(2)
    bench.slurm.find(job).end_s = bench.now + 500  # takes far longer than the table says
    bench.slurm.advance(600)
    bench.cycles()
    with Journal(bench.config.journal, 1000) as journal:
        kinds = {run.kind.value for run in journal.runs()}
    assert kinds == {"limit", "work"}


def test_documents_of_gone_jobs_are_removed_after_a_while_also_by_a_new_daemon(bench):
    job = bench.submit(gpus=4)
    bench.cycles(2)
    bench.slurm.cancel(job)
    bench.cycles(2)
    assert read_plan(bench.config.spool, int(job)).state == ENDED  # explain still answers
    bench.engine.close()
    bench.start()
    bench.cycles()
    bench.slurm.advance(KEEP_S + 10)
    bench.cycles(2)
    with pytest.raises(SourceMissingError):
        read_plan(bench.config.spool, int(job))
    with Journal(bench.config.journal, 1000) as journal:
        assert journal.directives() == {}


@pytest.mark.parametrize("restarted", [False, True], ids=["lives", "restarted"])
def test_a_job_whose_number_another_one_had_is_not_taken_for_that_one(bench, restarted):
    """slurmctld died, and gave the numbers of its last unsaved seconds to other jobs."""
    bench.fill()
    owner = {"user": "bob", "uid": 0}
    number = bench.submit(gpus=4, **owner)
    bench.cycles(3)
    assert bench.engine.memory.ledger[number].lease_until_s
    write_request(bench.config.spool, 0, PinRequest(int(number), True, bench.now))
    bench.cycles(3)
    assert bench.engine.memory.ledger[number].veto
    written = len(bench.slurm.writes)
    bench.slurm.forget(number)
    bench.slurm.advance(60 + 5)
    # Without a directive: foreign. Then with one, and it was never pinned.
    foreign = bench.slurm.submit(gpus=4, admin_comment="", time_limit_s=3600)
    assert foreign == number
    assert read_plan(bench.config.spool, int(number)).user == "bob"
    if restarted:
        bench.engine.close()
        bench.start()
    bench.cycles(3)
    assert len(bench.slurm.writes) == written
    assert number not in bench.engine.memory.ledger
    with pytest.raises(SourceMissingError):
        read_plan(bench.config.spool, int(number))
    bench.engine.close()
    bench.start()
    bench.cycles(2)
    assert len(bench.slurm.writes) == written
    bench.slurm.forget(foreign)
    bench.slurm.advance(60)
    assert bench.submit(gpus=2, **owner) == number
    bench.cycles(3)
    entry = bench.engine.memory.ledger[number]
    assert entry.submitted.gpus == 2
    assert entry.lease_until_s
    assert not entry.veto


def test_a_new_daemon_does_not_write_documents_again(bench, monkeypatch):
    bench.fill()
    bench.submit(gpus=4)
    bench.cycles(3)
    bench.engine.close()
    bench.start()
    monkeypatch.setattr(Spool, "write_plans", lambda *_: pytest.fail("written again"))
    bench.cycles()


def test_with_mixed_partitions_each_sees_what_would_or_will_be_done(tmp_path):
    """An observed partition's jobs take nothing from the plan of the acting one."""
    bench = Bench(tmp_path, nodes=1)
    bench.slurm.partitions["other"] = replace(bench.slurm.partitions["main"], name="other")
    bench.slurm.nodes["n01"].partitions = frozenset({"main", "other"})
    observed = bench.submit(gpus=4, samples=1000, partitions=("other",), begin_s=bench.now + 5)
    acted = bench.submit(gpus=4, samples=90_000)
    bench.cycles()
    assert {a.job_id for a in bench.slurm.writes} == {acted}
    first = read_plan(bench.config.spool, int(observed))
    second = read_plan(bench.config.spool, int(acted))
    assert (first.mode, second.mode) == (Mode.OBSERVE, Mode.ACTING)
    assert first.decision.verdict is Verdict.START
    assert second.decision.verdict is Verdict.START


def test_a_policy_that_fails_is_replaced_for_the_cycle(bench, caplog):
    class Broken:
        name = "broken"

        def __call__(self, view, now):
            raise SolverError("no solution")

    job = bench.submit(gpus=4)
    bench.start(policy=Broken())
    bench.cycles(3)
    assert bench.slurm.find(job).state is JobState.RUNNING
    assert "no solution" in caplog.text
    assert "no solution" in read_cluster(bench.config.spool).refusals


def test_directives_in_comments_are_read_where_that_is_switched_on(tmp_path):
    for number, wanted in enumerate((False, True)):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(folder, read_comments=wanted)
        bench.fill()
        job = bench.slurm.submit(gpus=4, comment="ft: model=vit samples=1000 batch=256 gpus=auto")
        bench.cycles(2)
        if wanted:
            document = read_plan(bench.config.spool, int(job))
            assert not document.permit.resize  # Lua did not see it
            assert document.permit.order
        else:
            with pytest.raises(SourceMissingError):
                read_plan(bench.config.spool, int(job))


def test_users_find_a_copy_of_the_table_in_the_spool(bench):
    bench.cycles()
    copy = table_path(bench.config.spool)
    assert read_table(copy) == read_table(bench.config.table)
    assert copy.stat().st_mode & 0o444 == 0o444
    written = copy.stat().st_mtime_ns
    bench.cycles()
    assert copy.stat().st_mtime_ns == written  # only when the table has changed


def test_what_a_plan_wants_and_is_not_done_stands_in_the_document(bench):
    bench.slurm.site_limits["qos:normal"] = Limits("qos normal", grp_gpus=8)
    jobs = [bench.submit(gpus=1, qos="normal") for _ in range(6)]
    bench.cycles(1)
    told = [read_plan(bench.config.spool, int(job)).notes for job in jobs]
    refused = [n for notes in told for n in notes if "not done: qos normal allows 8 GPUs" in n]
    running = sum(j.gpus for j in bench.slurm.snapshot().running())
    assert running <= 8
    assert refused


def test_a_limit_that_slurm_names_is_reacted_to_in_the_next_cycle(bench):
    """The count that was planned is taken back and the job starts on another one."""
    job = bench.submit(gpus=2, base_priority=1000)
    bench.slurm.cap_gpus = 4  # a limit that only Slurm knows
    bench.cycles(1)
    assert bench.slurm.find(job).gpus > 4
    assert bench.slurm.find(job).state is JobState.PENDING
    bench.cycles(3)
    assert bench.slurm.find(job).state is JobState.RUNNING
    assert bench.slurm.find(job).gpus <= 4
    refused = read_plan(bench.config.spool, int(job)).refused
    assert any("did not start it" in why for why in refused.values())


def test_an_array_of_which_every_task_runs_is_shown_as_running(bench):
    job = bench.submit(gpus=1, auto=False, array_id=1, tasks=(1, 2, 3))
    bench.slurm.find(job).array_id = base = bench.slurm.find(job).raw_id
    bench.fill()
    bench.cycles(1)
    assert read_plan(bench.config.spool, base).state == "PENDING"
    for held in list(bench.slurm.queue.values()):
        if held.placement:
            bench.slurm.cancel(held.job_id)
    bench.cycles(2)
    assert all(j.running for j in bench.slurm.snapshot().jobs)
    document = read_plan(bench.config.spool, base)
    assert (document.state, document.job_id) == ("RUNNING", str(base))


@pytest.mark.parametrize("what", ["plans", "whole", "everything"])
def test_documents_removed_beside_a_live_daemon_are_written_again(bench, what):
    runs = bench.submit(16, 10**7, auto=False, nodes=4, time_limit_s=1e6)
    bench.cycles(2)
    waits = bench.submit(gpus=4)
    bench.cycles(2)
    spool = bench.config.spool
    if what == "whole":
        Path(cluster_path(spool)).unlink()
        for document in (spool / "plans").iterdir():
            document.unlink()
    else:
        shutil.rmtree(spool / "plans" if what == "plans" else spool)
    bench.cycles(1)
    assert read_plan(spool, int(runs)).state == "RUNNING"
    assert read_plan(spool, int(waits)).state == "PENDING"
    assert read_cluster(spool)
    assert Path(table_path(spool)).exists()


def test_a_heartbeat_that_cannot_be_written_is_told_once_and_fails_no_cycle(bench, caplog):
    bench.config.heartbeat.unlink(missing_ok=True)
    bench.config.heartbeat.mkdir()  # a directory in the way, also for root
    reports = bench.cycles(3)
    assert [report.skipped for report in reports] == ["", "", ""]
    assert sum(r.getMessage().startswith("heartbeat:") for r in caplog.records) == 1

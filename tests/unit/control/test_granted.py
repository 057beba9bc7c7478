"""Documents of jobs that run or have run, through whole cycles: none is missing, all are closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control.documents import LAST_WORDS_S, UNTOLD
from slurm_ext.control.granted import BY_SLURM, UNPLANNED, as_started
from slurm_ext.control.outages import out_of_use
from slurm_ext.control.resume import noted
from slurm_ext.control.spool import read_plan
from slurm_ext.control.truth import (
    TRUTH_EVERY_S,
    Told,
    truth_every_s,
    truth_from,
    worth_telling,
)
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.document import ENDED, PlanDocument
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Node
from slurm_ext.domain.plan import Decision, Verdict
from slurm_ext.domain.progress import Progress
from tests.unit.cli.spooled import document
from tests.unit.control.test_attempts import Site, running


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def plan_of(site: Site, job: str) -> PlanDocument:
    return read_plan(site.config.spool, int(job))


def first(site: Site, job: str, **values: object) -> Attempt:
    """The job's only start, as its ft-run records it."""
    begun = site.slurm.find(job).start_s or site.now
    return replace(Attempt(0, begun, site.slurm.find(job).gpus), **values)


# -- jobs that no cycle planned ------------------------------------------------------------------


def test_a_job_that_started_before_any_cycle_is_seen_running_in_the_first(site):
    job = site.submit(4, 10**8, auto=False, time_limit_s=1e6)
    site.slurm.start(job)
    site.report(job, total_steps=2000)
    site.record(job, first(site, job))
    site.cycles()
    found = plan_of(site, job)
    assert (found.state, found.job_id, found.starts) == ("RUNNING", job, 1)
    assert (found.requested_gpus, found.present_gpus) == (4, 4)
    assert (found.decision.verdict, found.decision.reason) == (Verdict.LEAVE, UNPLANNED)
    assert found.truth.step == 20
    assert [a.number for a in found.attempts] == [0]


def test_its_document_goes_on_like_any_other(site):
    job = site.submit(4, 10**8, auto=False, time_limit_s=1e6)
    site.slurm.start(job)
    site.cycles()
    site.report(job, step=77)
    site.cycles()
    assert plan_of(site, job).truth.step == 77
    site.slurm.cancel(job)
    site.cycles(2)
    assert plan_of(site, job).state == ENDED


def test_a_running_job_with_a_broken_directive_says_so(site):
    job = site.slurm.submit(gpus=4, admin_comment='ft:{"v":1,"gpus":7}', time_limit_s=1e6)
    site.slurm.start(job)
    site.cycles()
    found = plan_of(site, job)
    assert found.state == "RUNNING"
    assert "directive is unusable" in found.decision.reason


def test_a_planned_job_with_a_broken_directive_is_running_once_it_runs(site):
    job = site.slurm.submit(gpus=4, admin_comment='ft:{"v":1,"gpus":7}', time_limit_s=1e6)
    site.cycles(2)
    found = plan_of(site, job)
    assert found.state == "RUNNING"
    assert "directive is unusable" in found.decision.reason


def test_a_running_job_without_a_directive_still_has_no_document(site):
    job = site.slurm.submit(gpus=4, admin_comment="", time_limit_s=1e6)
    site.slurm.start(job)
    site.cycles(2)
    assert int(job) not in site.engine._teller.known


# -- what runs waits for nothing -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (Decision("7", Verdict.START, 0, "most progress"), "most progress"),
        (Decision("7", Verdict.ORDER, 0, "2 GPUs are free"), "2 GPUs are free"),
        (Decision("7", Verdict.ORDER, 0, "only its place", waits_for="a seat"), BY_SLURM),
        (Decision("7", Verdict.ORDER, 0, "does not start", wanted_since_s=1.0), BY_SLURM),
        (Decision("7", Verdict.WAIT, 0, "not decided", waits_for="a seat"), BY_SLURM),
        (Decision("7", Verdict.LEAVE, 0, "its owner holds it"), BY_SLURM),
    ],
)
def test_reasons_to_wait_are_gone_once_the_job_runs(made: Decision, reason: str):
    found = as_started(replace(made, expected_start_s=5.0))
    assert (found.reason, found.waits_for, found.expected_start_s) == (reason, "", None)


def test_a_job_that_waited_for_a_seat_and_runs_now_waits_for_none(site):
    full = site.fill()
    job = site.submit(4, 10**8, auto=False, time_limit_s=1e6)
    site.cycles()
    assert plan_of(site, job).decision.waits_for
    site.slurm.cancel(full)
    site.slurm.advance(1)
    assert site.slurm.find(job).state is JobState.RUNNING  # Slurm was faster than the plan
    site.cycles()
    found = plan_of(site, job)
    assert (found.state, found.decision.waits_for) == ("RUNNING", "")
    assert found.decision.reason == BY_SLURM


def test_a_node_that_is_down_is_named_to_who_waits(tmp_path):
    site = Site(tmp_path, nodes=2)
    names = sorted(site.slurm.nodes)
    site.slurm.set_node(names[1], "DOWN*")
    job = site.submit(8, 10**8, auto=False, nodes=2, time_limit_s=1e6)
    site.cycles()
    found = plan_of(site, job)
    assert found.state == "PENDING"
    assert found.decision.waits_for.endswith(f"; {names[1]} is down")
    site.slurm.set_node(names[1], "IDLE")
    site.cycles(2)
    assert "down" not in plan_of(site, job).decision.waits_for


def test_nodes_out_of_use_in_words():
    def node(name: str, state: str, available: bool = False) -> Node:
        return Node(name, gpus=4, state=state, available=available)

    assert out_of_use([node("n1", "IDLE", True)]) == ""
    assert out_of_use([node("n2", "DOWN*"), node("n1", "IDLE", True)]) == "n2 is down"
    assert (
        out_of_use([node("n2", "DOWN"), node("n3", "IDLE*"), node("n5", "IDLE+DRAIN")])
        == "n[2-3] are down, n5 is drained"
    )
    # Being switched off or on to save power, or kept for maintenance: no outage.
    assert out_of_use([node("n2", "IDLE%"), node("n3", "MAINT"), node("n4", "MIXED*#")]) == ""
    assert out_of_use([node("n4", "DOWN*#")]) == "n4 is down"


# -- how often it was started --------------------------------------------------------------------


def test_starts_are_counted_when_they_happen(site):
    job = site.submit(4, 10**8, auto=False, time_limit_s=1e6)
    full = site.fill()
    site.cycles()
    assert plan_of(site, job).starts == 0
    site.slurm.cancel(full)
    site.cycles(2)
    assert plan_of(site, job).starts == 1
    site.fill_rest()
    site.came_back(job, Cause.PREEMPTED)
    site.fill_rest()
    site.cycles()
    found = plan_of(site, job)
    assert (found.state, found.starts) == ("PENDING", 1)
    site.slurm.cancel(job)
    site.cycles()
    found = plan_of(site, job)
    assert (found.state, found.starts) == (ENDED, 1)


def test_a_job_that_was_requeued_and_runs_again_between_two_cycles_is_told_anew(site):
    job = running(site)
    site.slurm.requeue(job)
    site.slurm.advance(5)
    site.slurm.find(job).begin_s = site.now
    site.slurm.advance(1)
    assert site.slurm.find(job).state is JobState.RUNNING
    site.cycles()
    found = plan_of(site, job)
    assert (found.state, found.attempt, found.starts) == ("RUNNING", 1, 2)


# -- last words ----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 3])
def test_the_end_of_a_job_is_read_after_it_has_left_the_queue(site, late):
    """Also where ft-run writes it, or the file system shows it, some cycles later."""
    job = running(site)
    site.report(job, step=100, total_steps=400)
    site.record(job, first(site, job))
    site.cycles()
    end = first(site, job, ended_s=site.now, cause=Cause.COMPLETED, exit_code=0, last_step=400)
    site.slurm.cancel(job)
    site.cycles(late)
    site.record(job, end)
    site._write(
        site.config.spool / str(plan_of(site, job).uid) / f"progress-{job}.json",
        Progress(job, 0, site.now, 400, 400, 1.0, 4, total_steps=400).to_json(),
    )
    site.cycles()
    found = plan_of(site, job)
    assert found.state == ENDED
    assert found.attempts == (end,)
    assert (found.truth.step, found.truth.ends_s) == (400, None)


def test_what_an_attempt_cost_is_counted_once_also_where_it_was_told_last(site):
    job = running(site)
    site.record(job, first(site, job))
    site.cycles()
    site.record(
        job,
        first(site, job, first_step_s=1.0, ended_s=site.now, cause=Cause.CANCELLED, last_step=10),
    )
    site.slurm.cancel(job)
    site.cycles()
    spent = site.value("attempt_gpu_seconds_total")
    assert spent > 0
    site.cycles(int(LAST_WORDS_S / site.config.cycle_s) + 2)
    assert site.value("attempt_gpu_seconds_total") == spent


def test_an_end_that_nobody_tells_is_when_the_job_was_seen_to_be_gone(site):
    job = running(site)
    site.record(job, first(site, job))
    site.cycles()
    gone_s = site.now
    site.slurm.cancel(job)
    site.cycles()
    assert plan_of(site, job).attempts[-1].ended_s is None  # its last words may be on their way
    site.cycles(int(LAST_WORDS_S / site.config.cycle_s) + 1)
    last = plan_of(site, job).attempts[-1]
    assert (last.ended_s, last.cause, last.reason) == (gone_s, Cause.UNKNOWN, UNTOLD)


def test_a_new_daemon_hears_the_last_words_of_jobs_that_left_without_it(site):
    job, quiet = running(site), running(site)
    for one in (job, quiet):
        site.report(one)
        site.record(one, first(site, one))
    site.cycles()
    told_s = plan_of(site, quiet).truth.at_s
    site.engine.close()
    site.record(job, first(site, job, ended_s=site.now, cause=Cause.COMPLETED))
    for one in (job, quiet):
        site.slurm.cancel(one)
    site.slurm.advance(1800)
    site.start()
    site.cycles()
    assert plan_of(site, job).attempts[-1].cause is Cause.COMPLETED
    site.cycles(int(LAST_WORDS_S / site.config.cycle_s) + 1)
    # Half an hour without a daemon is no half hour of training.
    last = plan_of(site, quiet).attempts[-1]
    assert (last.ended_s, last.cause) == (told_s, Cause.UNKNOWN)


def test_the_record_of_another_user_ends_no_job(site):
    job = running(site)
    site.record(job, first(site, job))
    site.cycles()
    real = plan_of(site, job)
    site.slurm.cancel(job)
    other = real.uid + 1
    site.engine._teller._keeper.wrote([replace(real, uid=other)])
    site.record(job, first(site, job, ended_s=site.now, cause=Cause.COMPLETED))
    site.cycles()
    assert plan_of(site, job).attempts[-1].ended_s is None


# -- causes and distances ------------------------------------------------------------------------


@pytest.mark.parametrize("told", [Cause.LOST_PEER, Cause.UNKNOWN])
def test_a_peer_that_was_lost_with_its_node_is_a_node_failure(told):
    record = Attempts("7", (Attempt(0, 1.0, 4, ended_s=2.0, cause=told),))
    job = Job("7", 7, "ann", ("main",), JobState.PENDING, 5.0, restarts=1)
    entry = LedgerEntry("7", 0.0, restarts=0)
    assert noted(entry, job, record, True).requeues[-1].cause is Cause.NODE_FAIL
    assert noted(entry, job, record, False).requeues[-1].cause is told


def test_few_running_jobs_are_followed_closely_and_thousands_at_a_distance():
    assert truth_every_s(1) < 1.0
    assert truth_every_s(5000) == TRUTH_EVERY_S
    known = document(3, truth=truth_from(Progress("3", 0, 100.0, 1, 1, 1.0, 4)))
    told = Told(truth_from(Progress("3", 0, 110.0, 2, 2, 1.0, 4)))
    assert worth_telling(known, told, truth_every_s(1))
    assert not worth_telling(known, told, truth_every_s(5000))


def test_a_failed_save_is_told_at_once():
    report = Progress("3", 0, 100.0, 1, 1, 1.0, 4)
    known = document(3, truth=truth_from(report))
    told = Told(truth_from(replace(report, at_s=101.0, save_error="full")))
    assert told.truth is not None
    assert told.truth.save_error == "full"
    assert worth_telling(known, told, truth_every_s(5000))

"""Requeued jobs: what is noted, when they may start again, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.control.lease import Hold
from slurm_ext.control.requeues import RequeueWatch
from slurm_ext.control.resume import (
    MAX_REQUEUES,
    ORDERLY,
    REVOKED_S,
    ResumeGuard,
    cooldown_of,
    noted,
    revoking,
)
from slurm_ext.control.rules import ResumeRules
from slurm_ext.domain.action import ActionKind
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry, Requeue
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot
from tests.fakes.slurm import FakeSlurm
from tests.unit.control.acting import RULES, World, decision, kinds

START, WAIT, RESERVE, ORDER, LEAVE, _ = Verdict
SOME = ResumeRules(window_s=3600, free_orderly=3, free_failures=1, cooldown_s=60)
NOW = 10_000.0


def entry(*requeues: tuple[float, Cause], restarts: int | None = None) -> LedgerEntry:
    """A job that came back so many seconds ago each time."""
    made = tuple(Requeue(NOW - ago, cause) for ago, cause in requeues)
    return LedgerEntry(
        "7", 0.0, requeues=made, restarts=len(made) if restarts is None else restarts
    )


def job(job_id: str = "7", **values: object) -> Job:
    made = Job(job_id, 7, "ann", ("main",), JobState.PENDING, NOW, gpus=4, restarts=1)
    return replace(made, **values)


# -- what is noted -------------------------------------------------------------------------------


def test_a_first_look_notes_the_count_and_no_requeue():
    found = noted(LedgerEntry("7", 0.0), job(restarts=5), None, False)
    assert (found.restarts, found.requeues) == (5, ())


def test_a_requeue_is_noted_once_with_the_cause_that_the_job_tells():
    told = Attempts("7", (Attempt(0, 1.0, 4, ended_s=2.0, cause=Cause.PREEMPTED),))
    once = noted(entry(restarts=0), job(submit_s=NOW), told, True)
    assert once.requeues == (Requeue(NOW, Cause.PREEMPTED),)
    assert noted(once, job(submit_s=NOW), told, False) is once


@pytest.mark.parametrize(("failed", "cause"), [(True, Cause.NODE_FAIL), (False, Cause.UNKNOWN)])
def test_without_a_record_a_failed_node_is_the_cause(failed, cause):
    other = Attempts("7", (Attempt(4, 1.0, 4, ended_s=2.0, cause=Cause.PREEMPTED),))
    assert noted(entry(restarts=0), job(), other, failed).requeues[-1].cause is cause


def test_the_memory_of_requeues_is_bounded():
    found = entry(restarts=0)
    for count in range(1, 3 * MAX_REQUEUES):
        found = noted(found, job(restarts=count, submit_s=float(count)), None, False)
    assert len(found.requeues) == MAX_REQUEUES
    assert found.requeues[-1].at_s == 3 * MAX_REQUEUES - 1


def test_the_nodes_of_the_last_attempt_tell_of_a_node_failure():
    slurm = FakeSlurm(nodes=2)
    watch = RequeueWatch()
    mine = slurm.submit(gpus=4)
    slurm.advance()
    watch.look(slurm.snapshot())
    (name,) = slurm.find(mine).placement
    slurm.set_node(name, "DOWN*")
    snapshot = slurm.snapshot()
    watch.look(snapshot)
    row = snapshot.job(mine)
    found = watch.note(row, LedgerEntry(mine, 0.0, restarts=0), {})
    assert [r.cause for r in found.requeues] == [Cause.NODE_FAIL]


# -- cool-down -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causes", "wait_s"),
    [
        ([], None),
        ([Cause.UNKNOWN], None),
        ([Cause.UNKNOWN] * 2, 60),
        ([Cause.UNKNOWN] * 3, 120),
        ([Cause.UNKNOWN] * 5, 480),
        ([Cause.UNKNOWN] * 20, 1800),
        ([Cause.PREEMPTED] * 3, None),
        ([Cause.PREEMPTED] * 4, 60),
        # Each cause by itself: a node failure after many preemptions is the first of its kind.
        ([Cause.PREEMPTED] * 4 + [Cause.NODE_FAIL], None),
        ([Cause.NODE_FAIL, Cause.PREEMPTED, Cause.NODE_FAIL], 60),
    ],
)
def test_requeue_storm_each_cause_has_its_own_growing_cooldown(causes, wait_s):
    """Field case requeue-storm: requeues of one job are bounded, and separately by cause."""
    found = cooldown_of(entry(*((0.0, cause) for cause in causes)), SOME, NOW)
    assert (found is None) == (wait_s is None)
    if found is not None:
        assert found.until_s == NOW + wait_s
        assert f"cause: {causes[-1].value}" in found.reason
        assert f"{causes.count(causes[-1])} requeues" in found.reason


def test_old_requeues_are_forgiven_and_a_cooldown_ends():
    old = entry((7200.0, Cause.UNKNOWN), (5000.0, Cause.UNKNOWN), (10.0, Cause.UNKNOWN))
    assert cooldown_of(old, SOME, NOW) is None
    fresh = entry((100.0, Cause.UNKNOWN), (10.0, Cause.UNKNOWN))
    assert cooldown_of(fresh, SOME, NOW) is not None
    assert cooldown_of(fresh, SOME, NOW + 50.0) is None


@given(
    st.lists(st.tuples(st.floats(0, 7200), st.sampled_from(list(Cause))), max_size=40),
    st.floats(0, 7200),
)
def test_no_cooldown_outlives_its_bound(requeues, later):
    made = entry(*sorted(requeues, key=lambda r: -r[0]))
    found = cooldown_of(made, SOME, NOW + later)
    if found is not None:
        assert NOW + later < found.until_s <= made.requeues[-1].at_s + SOME.cooldown_max_s


def test_the_orderly_causes_are_those_that_are_nobodys_fault():
    assert {Cause.USER_ERROR, Cause.NODE_FAIL, Cause.NO_PROGRESS, Cause.UNKNOWN}.isdisjoint(ORDERLY)


# -- how many at once ----------------------------------------------------------------------------


def guard(*jobs: Job, at_once: int = 2, stepping: tuple[str, ...] = ()) -> ResumeGuard:
    return ResumeGuard(Snapshot(NOW, jobs, ()), replace(SOME, at_once=at_once), NOW, stepping)


def test_only_so_many_requeued_jobs_of_a_partition_start_at_once():
    running = job("1", state=JobState.RUNNING, start_s=NOW - 5)
    mine = guard(running, job("2", eligible_s=NOW + 100), job("3", eligible_s=NOW + 100))
    free = Permit(lease=True)
    assert mine.refusal(job("2"), entry(restarts=1), Hold.REQUEUE, free) == ""
    why = mine.refusal(job("3"), entry(restarts=1), Hold.REQUEUE, free)
    assert "as many requeued jobs of its partition as may (2)" in why
    elsewhere = job("4", partitions=("other",))
    assert mine.refusal(elsewhere, entry(restarts=1), Hold.REQUEUE, free) == ""
    # A job in its first attempt loads no checkpoint; it is no resume.
    assert mine.refusal(job("5", restarts=0), entry(restarts=0), Hold.GRACE, free) == ""


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"state": JobState.RUNNING, "start_s": NOW - 5}, True),
        ({"state": JobState.RUNNING, "start_s": NOW - 61}, False),
        ({"state": JobState.RUNNING, "start_s": NOW - 5, "restarts": 0}, False),
        ({"eligible_s": NOW + 1}, True),  # let go, by slurmctld's clock
        ({"eligible_s": NOW - 30}, True),
        ({"eligible_s": NOW - 300}, False),  # waits for GPUs, reads nothing
        ({"eligible_s": NOW + 100}, False),
        ({"eligible_s": NOW, "held_by_user": True}, False),
    ],
)
def test_who_is_on_its_way(values, counts):
    found = guard(job("1", **values), at_once=1)
    refused = found.refusal(job("2"), entry(restarts=1), Hold.REQUEUE, Permit(lease=True))
    assert bool(refused) == counts


def test_a_job_that_steps_again_makes_room():
    running = job("1", state=JobState.RUNNING, start_s=NOW - 5)
    found = guard(running, at_once=1, stepping=("1",))
    assert found.refusal(job("2"), entry(restarts=1), Hold.REQUEUE, Permit(lease=True)) == ""


def test_a_lease_that_may_not_be_renewed_is_lifted_in_any_case():
    cooling = entry((0.0, Cause.UNKNOWN), (0.0, Cause.UNKNOWN))
    assert guard().refusal(job(), cooling, Hold.OURS, Permit(lease=False)) == ""
    assert guard().refusal(job(), cooling, Hold.REQUEUE, Permit(lease=False)) != ""


@pytest.mark.parametrize(
    ("restarts", "after_s", "waits"),
    [(1, 0.0, True), (1, 1.9, True), (1, 2.0, False), (0, 0.0, False)],
)
def test_a_job_that_came_back_a_moment_ago_is_not_let_go(restarts, after_s, waits):
    """Its nodes would take its new credential for the one that they have just revoked."""
    found = job(restarts=restarts, submit_s=NOW)
    assert bool(revoking(found, NOW + after_s)) is waits


# -- acting --------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World(FakeSlurm(nodes=4, gpus_per_node=4))


def requeued(world: World, **fields: object) -> str:
    """A job that ran in its submitted size and came back a moment ago."""
    mine = world.submit(4, **fields)
    world.act(decision(mine, START, gpus=4))
    world.slurm.advance()
    assert world.fake(mine).state is JobState.RUNNING
    world.slurm.requeue(mine)
    # So long after it that its nodes take a new credential.
    world.slurm.advance(REVOKED_S)
    return mine


@pytest.mark.parametrize("verdict", [START, ORDER, RESERVE])
@pytest.mark.parametrize("resizable", [True, False])
def test_eligible_121s_the_delay_is_lifted_whatever_lets_the_job_go(world, verdict, resizable):
    """Field case eligible-121s, for every verdict that leaves the job to start."""
    mine = requeued(world, resizable=resizable)
    assert world.fake(mine).begin_s == world.fake(mine).submit_s + 121
    gpus = 4 if verdict is START else None
    assert ActionKind.LIFT in kinds(world.act(decision(mine, verdict, gpus=gpus)))
    world.slurm.advance()
    assert world.fake(mine).state is JobState.RUNNING


def test_the_delay_is_known_from_slurms_configuration(world):
    mine = requeued(world)
    world.fake(mine).begin_s = world.slurm.now + 301  # AuthInfo=cred_expire=300
    # Taken for a StartTime that somebody set.
    assert ActionKind.LIFT not in kinds(world.act(decision(mine, START, gpus=4)))
    world.rules = replace(RULES, requeue_hold_s=301.0)
    assert ActionKind.LIFT in kinds(world.act(decision(mine, START, gpus=4)))


def test_requeue_storm_a_hundred_jobs_of_a_failed_rack_come_back_in_parts(world):
    world.rules = replace(RULES, resume=ResumeRules(at_once=3))
    jobs = [requeued(world) for _ in range(4)]
    plan = [decision(mine, START, gpus=4, rank=i) for i, mine in enumerate(jobs)]
    assert kinds(world.act(*plan)).count(ActionKind.LIFT) == 3
    assert any("as may (3)" in refusal.reason for refusal in world.refusals)
    world.slurm.advance(5)
    assert world.act(*plan) == []
    world.slurm.advance(ResumeRules().settle_s)
    assert kinds(world.act(*plan)).count(ActionKind.LIFT) == 1


def test_a_cooling_job_that_may_not_be_leased_is_left_to_slurms_own_delay(world):
    mine = requeued(world, resizable=False)
    now = world.slurm.now
    world.ledger[mine] = replace(
        world.ledger[mine], requeues=(Requeue(now, Cause.USER_ERROR),) * 5, restarts=1
    )
    assert world.act(decision(mine, START, gpus=4)) == []
    assert any("cools down" in refusal.reason for refusal in world.refusals)
    world.slurm.advance(122)
    assert world.fake(mine).state is JobState.RUNNING


def test_a_cooling_job_that_may_be_leased_is_kept_back_until_its_cooldown_ends(world):
    mine = requeued(world)
    now = world.slurm.now
    world.ledger[mine] = replace(
        world.ledger[mine], requeues=(Requeue(now, Cause.USER_ERROR),) * 6, restarts=1
    )
    until = cooldown_of(world.ledger[mine], RULES.resume, now).until_s
    assert until - now > 400
    while world.slurm.now < until:
        world.act(decision(mine, START, gpus=4))
        assert world.fake(mine).state is JobState.PENDING
        world.slurm.advance(5)
    world.act(decision(mine, START, gpus=4))
    world.slurm.advance()
    assert world.fake(mine).state is JobState.RUNNING


def test_release_lets_cooling_jobs_go(world):
    mine = requeued(world)
    world.act(decision(mine, WAIT))
    world.ledger[mine] = replace(
        world.ledger[mine], requeues=(Requeue(world.slurm.now, Cause.UNKNOWN),) * 9, restarts=1
    )
    world.release()
    assert not world.leased(mine)


def test_hold_then_priority_a_held_job_that_came_back_is_not_let_go(world):
    """Field case hold-then-priority: a person's hold is sacred, also after a requeue."""
    mine = requeued(world)
    world.slurm.hold(mine)
    assert ActionKind.LIFT not in kinds(world.act(decision(mine, START, gpus=4)))
    permit = world.permits(world.snapshot())[mine]
    assert permit.reasons == ("its owner holds it",)


def test_badconstraints_exclusive_is_told_and_never_released(world):
    """Field case badconstraints-exclusive: priority 0 set by Slurm itself is nobody's hold."""
    mine = requeued(world)
    snapshot = world.snapshot()
    rows = tuple(
        replace(row, priority=0, reason="BadConstraints", exclusive=True) for row in snapshot.jobs
    )
    snapshot = replace(snapshot, jobs=rows)
    (why,) = world.permits(snapshot)[mine].reasons
    assert "Slurm holds it with reason BadConstraints since its requeue, nobody else does" in why


def test_an_attempt_inherits_no_failed_count(world):
    """What Slurm did not start in one attempt may be tried in the next."""
    mine = requeued(world)
    world.ledger[mine] = replace(world.ledger[mine], unstarted=(8,), attempt=0)
    world.act(decision(mine, START, gpus=8))
    world.slurm.advance()
    found = world.fake(mine)
    assert (found.state, found.gpus) == (JobState.RUNNING, 8)
    assert (world.ledger[mine].attempt, world.ledger[mine].unstarted) == (1, ())


def test_a_size_that_is_wanted_again_belongs_to_the_new_attempt(world):
    mine = world.submit(4)
    world.act(decision(mine, START, gpus=8))
    world.slurm.advance()
    world.ledger[mine] = replace(world.ledger[mine], unstarted=(2,))
    world.slurm.requeue(mine)
    world.slurm.advance(REVOKED_S)
    assert kinds(world.act(decision(mine, START, gpus=8))) == [ActionKind.LIFT]
    assert (world.ledger[mine].attempt, world.ledger[mine].unstarted) == (1, ())

"""The state machine of acting, against an in-memory Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.permits import NO_GPUS
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.submitted import notice_others
from slurm_ext.control.unstarted import notice_unstarted
from slurm_ext.domain.action import ActionKind
from slurm_ext.domain.job import JobState, ShapeKind
from slurm_ext.domain.node import Limits, Reservation
from slurm_ext.domain.plan import Decision, Verdict
from tests.fakes.slurm import FakeSlurm
from tests.unit.control.acting import (
    EVERYTHING,
    RULES,
    World,
    decision,
    estimate,
    fields_of,
    kinds,
    plan_of,
)

START, WAIT, RESERVE, ORDER, LEAVE, _ = Verdict  # nobody plans STOP for a daemon


@pytest.fixture
def world() -> World:
    return World(FakeSlurm(nodes=4, gpus_per_node=4))


def test_a_start_in_another_shape_is_leased_then_written_then_lifted_in_one_cycle(world: World):
    job = world.submit(4)
    written = world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert kinds(written) == [ActionKind.LEASE, ActionKind.SHAPE, ActionKind.LIFT]
    world.slurm.advance()
    started = world.fake(job)
    assert started.state is JobState.RUNNING
    assert started.placement == {"n01": 4, "n02": 4}
    assert world.slurm.late_size_writes == []


def test_a_leased_job_needs_two_waves_to_start(world: World):
    job = world.submit(4)
    assert kinds(world.act(decision(job, WAIT))) == [ActionKind.LEASE]
    written = world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert kinds(written) == [ActionKind.SHAPE, ActionKind.LIFT]


def test_a_lease_about_to_end_is_renewed_before_the_shape_is_written(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    world.slurm.advance(world.ledger[job].lease_until_s - world.slurm.now - RULES.safe_s + 1)
    written = world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert kinds(written) == [ActionKind.LEASE, ActionKind.SHAPE, ActionKind.LIFT]


def test_the_submit_grace_is_taken_over(world: World):
    job = world.submit(4, begin_s=world.slurm.now + RULES.grace_s)
    assert kinds(world.act(decision(job, WAIT))) == [ActionKind.LEASE]
    world.slurm.advance(RULES.grace_s + 1)
    assert world.fake(job).state is JobState.PENDING
    other = world.submit(4, begin_s=world.slurm.now + RULES.grace_s)
    assert kinds(world.act(decision(job, WAIT), decision(other, ORDER))) == [ActionKind.LIFT]


def test_waiting_writes_nothing_but_due_renewals(world: World):
    jobs = [world.submit(4) for _ in range(200)]
    waits = [decision(job, WAIT, rank=i) for i, job in enumerate(jobs)]
    assert len(world.act(*waits)) == 200
    most = 0
    for _ in range(120):
        world.slurm.advance(RULES.cycle_s)
        written = world.act(*waits)
        assert {a.kind for a in written} <= {ActionKind.LEASE}
        most = max(most, len(written))
    assert most <= 0.05 * len(jobs)
    assert all(world.leased(job) for job in jobs)


def test_a_reserved_job_is_unleased_in_its_present_shape(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    assert kinds(world.act(decision(job, RESERVE))) == [ActionKind.LIFT]
    assert not world.leased(job)


def test_a_start_that_did_not_come_about_waits_in_the_submitted_shape(world: World):
    blocker = world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    assert world.fake(blocker).state is JobState.RUNNING
    job = world.submit(4)
    world.at_submitted[job] = estimate(1800)
    world.act(decision(job, START, gpus=8, remaining=estimate(1000), nodes=("n01", "n02")))
    shaped = world.row(job)
    assert (shaped.gpus, shaped.nodes, shaped.req_nodes) == (8, 2, ("n01", "n02"))
    assert shaped.time_limit_s == 40 * 60  # 3600 s x 1200 s / 1800 s
    written = world.act(decision(job, WAIT))
    assert kinds(written) == [ActionKind.LEASE, ActionKind.RESTORE]
    back = world.row(job)
    assert (back.gpus, back.nodes, back.req_nodes, back.time_limit_s) == (4, 1, (), 3600)
    assert world.leased(job)
    assert world.act(decision(job, WAIT)) == []


@pytest.mark.parametrize("verdict", [ORDER, LEAVE])
def test_a_job_that_may_not_be_resized_any_more_is_given_back_and_let_go(world: World, verdict):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert world.row(job).gpus == 8
    written = world.act(decision(job, verdict))
    assert kinds(written) == [ActionKind.LEASE, ActionKind.RESTORE, ActionKind.LIFT]
    assert world.row(job).gpus == 4
    assert world.act(decision(job, verdict)) == []


def test_acting_switched_off_gives_everything_back(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    shaped, waiting = world.submit(4), world.submit(4)
    world.act(
        decision(shaped, START, gpus=8, remaining=estimate(600)), decision(waiting, WAIT, rank=1)
    )
    world.rules = ActingRules()
    world.act()
    assert world.row(shaped).gpus == 4
    assert not world.leased(shaped)
    assert not world.leased(waiting)
    assert world.act() == []


def test_a_user_hold_stays_and_what_is_ours_is_given_back_under_it(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    world.slurm.hold(job)
    written = world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert ActionKind.FACTOR not in kinds(written)
    assert world.fake(job).held_by_user
    assert world.row(job).gpus == 4


def test_a_begin_time_of_the_user_is_never_moved(world: World):
    job = world.submit(4, begin_s=world.slurm.now + 7200)
    world.directives[job] = replace(world.directives[job], begin_s=world.slurm.now + 7200)
    assert world.act(decision(job, START, gpus=8, remaining=estimate(600))) == []
    other = world.submit(4, begin_s=world.slurm.now + 3600)  # scontrol update StartTime= by hand
    assert world.act(decision(other, WAIT)) == []


def test_with_the_ledger_lost_a_lease_is_left_to_expire_once(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    until = world.fake(job).begin_s
    world.ledger.clear()
    assert world.act(decision(job, WAIT)) == []
    world.slurm.advance(until - world.slurm.now)
    assert world.fake(job).state is JobState.RUNNING


def test_a_renewal_that_never_arrived_leaves_the_old_lease_ours(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    world.slurm.advance(RULES.lease_s / 2)
    world.act(decision(job, WAIT), before=lambda step: step == 0)  # killed before the write
    assert world.ledger[job].lease_until_s != world.fake(job).begin_s
    assert kinds(world.act(decision(job, WAIT))) == [ActionKind.LEASE]
    assert world.leased(job)


def test_a_shape_write_that_never_arrived_is_not_taken_for_the_users(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    world.act(decision(job, START, gpus=8, remaining=estimate(600)), before=lambda step: step == 0)
    assert world.ledger[job].written.gpus == 8
    world.act(decision(job, START, gpus=16, remaining=estimate(600)), before=lambda step: step == 0)
    assert world.ledger[job].submitted.gpus == 4
    world.act(decision(job, WAIT))
    world.slurm.advance(RULES.lease_s * 2)  # nobody renews any more
    assert world.fake(job).gpus == 4


def test_what_the_owner_changes_is_what_is_given_back(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    world.fake(job).ntasks = 2  # scontrol update NumTasks=2 by its owner
    world.fake(job).time_limit_s = 7200
    world.act(decision(job, WAIT))
    assert world.row(job).gpus == 2
    assert world.row(job).time_limit_s == 7200
    assert world.ledger[job].submitted.gpus == 2


def test_a_refused_half_of_a_resize_is_written_again_and_not_lifted(world: World):
    job = world.submit(8, nodes=2, kind=ShapeKind.LAUNCHER_PER_NODE)
    world.slurm.refuse("TresPerNode", times=1)
    written = world.act(decision(job, START, gpus=2, remaining=estimate(600)))
    assert kinds(written) == [
        ActionKind.LEASE,
        ActionKind.SHAPE,
        ActionKind.SHAPE,
        ActionKind.LIFT,
    ]
    assert (world.row(job).gpus, world.row(job).nodes) == (2, 1)


def test_a_shape_that_slurm_never_takes_falls_back_to_the_submitted_one(world: World):
    job = world.submit(8, nodes=2, kind=ShapeKind.LAUNCHER_PER_NODE)
    world.slurm.refuse("TresPerNode", times=3)
    world.act(decision(job, START, gpus=2, remaining=estimate(600)))
    row = world.row(job)
    assert (row.gpus, row.nodes) == (8, 2)
    assert not world.leased(job)
    assert any("failed to take" in r.reason for r in world.refusals)
    # And it is not tried again in this attempt.
    assert world.act(decision(job, START, gpus=2, remaining=estimate(600))) == []


@pytest.mark.parametrize("step", range(6))
def test_a_job_that_starts_at_any_moment_is_never_shrunk(step: int):
    world = World(FakeSlurm(nodes=4, gpus_per_node=4))
    world.slurm.config["schedulerparameters"] = ""  # without disable_job_shrink
    job = world.submit(8)

    def race(number: int) -> bool:
        if number == step and world.fake(job).state is JobState.PENDING:
            # As Slurm would: not before its begin time.
            world.slurm.advance()
        return False

    world.act(decision(job, START, gpus=2, remaining=estimate(600)), before=race)
    world.slurm.advance()
    assert world.fake(job).state is JobState.RUNNING
    assert world.slurm.shrunk == []
    assert world.slurm.late_size_writes == []


def test_a_requeued_job_inherits_neither_shape_nor_pin_nor_factor(world: World):
    job = world.submit(4, base_priority=5)
    rival = world.submit(4, base_priority=100)
    world.submit(16, nodes=4, foreign=True, base_priority=1000)
    world.slurm.advance()
    world.at_submitted[job] = estimate(1800)
    plan = (
        decision(job, START, gpus=8, nodes=("n03", "n04"), remaining=estimate(600)),
        decision(rival, ORDER, rank=1),
    )
    world.act(*plan)
    assert world.fake(job).site_factor > 0
    for name in list(world.slurm.queue.values()):
        if name.placement:
            world.slurm.cancel(name.job_id)
    world.slurm.advance()
    assert world.fake(job).state is JobState.RUNNING
    world.slurm.requeue(job)
    world.slurm.advance(1)
    written = world.act(decision(job, WAIT), decision(rival, ORDER, rank=1))
    assert ActionKind.RESTORE in kinds(written)
    row = world.row(job)
    assert (row.gpus, row.req_nodes, row.site_factor) == (4, (), 0)
    assert world.ledger[job].attempt == 1
    assert world.leased(job)


def test_slurms_requeue_delay_is_lifted_for_a_start(world: World):
    job = world.submit(4)
    world.act(decision(job, START, gpus=4))
    world.slurm.advance()
    world.slurm.requeue(job)
    assert world.fake(job).begin_s > world.slurm.now + 100
    # In the same second its nodes would refuse it.
    assert world.act(decision(job, START, gpus=4)) == []
    assert "a moment ago" in world.refusals[0].reason
    world.slurm.advance(2)
    world.act(decision(job, START, gpus=4))
    world.slurm.advance()
    assert world.fake(job).state is JobState.RUNNING


@pytest.mark.parametrize("ordered", [True, False])
def test_slurms_requeue_delay_is_lifted_for_a_job_without_gpus_where_we_order(
    world: World, ordered: bool
):
    job = world.submit(0, kind=ShapeKind.FIXED)
    if not ordered:
        world.rules = replace(RULES, acts={})
    world.slurm.advance()
    assert world.fake(job).state is JobState.RUNNING
    world.slurm.requeue(job)
    world.slurm.advance(2)
    written = world.act(decision(job, LEAVE))
    assert [(a.kind, a.reason) for a in written] == (
        [(ActionKind.LIFT, f"let go: {NO_GPUS}")] if ordered else []
    )


def test_pins_are_never_longer_than_the_node_count(world: World):
    job = world.submit(4)
    plan = decision(job, START, gpus=4, nodes=("n01", "n02"), remaining=estimate(600))
    world.act(plan)
    assert world.row(job).req_nodes == ()
    assert any("not pinned" in r.reason for r in world.refusals)


def test_a_limit_that_slurm_checks_no_more_keeps_a_changed_job_back(world: World):
    world.slurm.site_limits["qos:normal"] = Limits("qos normal", grp_gpus=12)
    first, second = world.submit(4), world.submit(4)
    starts = [
        decision(first, START, gpus=8, rank=0, remaining=estimate(600)),
        decision(second, START, gpus=8, rank=1, remaining=estimate(600)),
    ]
    world.act(*starts)
    world.slurm.advance()
    assert world.fake(first).state is JobState.RUNNING
    assert world.leased(second)
    assert any("qos normal allows 12 GPUs at once" in r.reason for r in world.refusals)
    world.act(decision(second, START, gpus=4, remaining=estimate(600)))
    world.slurm.advance()
    assert world.fake(second).state is JobState.RUNNING


def test_growth_in_front_of_a_promised_foreign_job_falls_back_to_the_submitted_shape(world: World):
    runner = world.submit(16, nodes=4, foreign=True, run_s=600.0, time_limit_s=600.0)
    world.slurm.advance()
    assert world.fake(runner).state is JobState.RUNNING
    foreign = world.submit(16, nodes=4, foreign=True)
    job = world.submit(4)
    world.slurm.advance(1)
    assert world.row(foreign).start_s is not None
    world.act(decision(job, START, gpus=8, remaining=estimate(6000)))
    assert world.row(job).gpus == 4
    assert any(f"could delay job {foreign}" in r.reason for r in world.refusals)
    # What ends before the promise may grow.
    world.at_submitted[job] = estimate(3600)
    world.act(decision(job, START, gpus=8, remaining=estimate(300)))
    assert world.row(job).gpus == 8


def test_the_start_is_ahead_of_what_waits_unleased(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    old = world.submit(4, base_priority=9000)
    young = world.submit(4, base_priority=100)
    written = world.act(
        decision(young, START, gpus=8, remaining=estimate(600)), decision(old, ORDER, rank=1)
    )
    assert world.row(young).priority > world.row(old).priority
    lifts = [a for a in written if a.kind is ActionKind.LIFT and a.job_id == young]
    factors = [a for a in written if a.kind is ActionKind.FACTOR and a.job_id == young]
    assert all(written.index(f) < written.index(lifts[0]) for f in factors)
    assert (
        world.act(
            decision(young, START, gpus=8, remaining=estimate(600)), decision(old, ORDER, rank=1)
        )
        == []
    )


def test_past_the_waiting_limit_the_order_is_by_age_and_nothing_is_leased(world: World):
    world.submit(16, nodes=4, foreign=True, time_limit_s=None, run_s=1e9)
    world.slurm.advance()
    old = world.submit(4, base_priority=100)
    world.slurm.advance(RULES.waiting_limit_s + 60)
    young = world.submit(4, base_priority=9000)
    world.act(decision(old, WAIT, rank=1), decision(young, ORDER, rank=0))
    assert not world.leased(old)
    assert world.row(old).priority > world.row(young).priority


def test_output_is_bounded_and_lifts_come_first(world: World):
    jobs = [world.submit(4) for _ in range(6)]
    world.act(*(decision(job, WAIT) for job in jobs))
    fresh = [world.submit(4) for _ in range(3)]
    world.rules = replace(RULES, max_writes_per_cycle=4)
    plan = plan_of(
        *(decision(job, START, gpus=4, rank=i) for i, job in enumerate(jobs[:3])),
        *(decision(job, WAIT, rank=9) for job in [*jobs[3:], *fresh]),
    )
    # Starts of a rank-per-GPU job get their node count first; take those for granted here.
    for job in jobs:
        world.directives[job] = replace(
            world.directives[job], req=replace(world.directives[job].req, nodes_max=1)
        )
    found = world.wave(plan)
    assert len(found.actions) == 4
    assert [a.kind for a in found.actions] == [ActionKind.LEASE] + [ActionKind.LIFT] * 3
    assert found.left_out == 2


def test_a_pinned_count_is_written_and_kept_while_it_waits(world: World):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    world.ledger[job] = replace(world.ledger[job], veto=True, veto_gpus=2)
    world.submit(16, nodes=4, foreign=True)
    world.act(decision(job, START, gpus=2, remaining=estimate(900)))
    assert world.row(job).gpus == 2
    world.act(decision(job, ORDER))
    assert world.row(job).gpus == 2
    world.release()
    assert world.row(job).gpus == 4
    assert world.ledger[job].veto


def test_an_array_is_written_under_its_exact_pending_set_and_without_a_node_count(world: World):
    job = world.submit(4, kind=ShapeKind.SINGLE_NODE, array=(1, 2, 3))
    written = world.act(decision(job, START, gpus=2, nodes=("n01",), remaining=estimate(600)))
    shape = fields_of(written, ActionKind.SHAPE)
    assert {a.job_id for a in written} == {f"{job.split('_')[0]}_[1-3]"}
    assert shape == {"NumTasks": "2", "TresPerNode": "gres/gpu:2", "TimeLimit": "60"}


def test_running_jobs_get_no_actions(world: World):
    job = world.submit(4)
    world.slurm.advance()
    assert world.act(decision(job, START, gpus=8, remaining=estimate(600))) == []


def test_release_restores_everything_and_then_nothing_is_left(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    shaped = world.submit(4, base_priority=10)
    waiting = world.submit(4, base_priority=20)
    ordered = world.submit(4, base_priority=30)
    before = {j: world.row(j) for j in (shaped, waiting, ordered)}
    world.act(
        decision(shaped, START, gpus=8, nodes=("n01", "n02"), remaining=estimate(900)),
        decision(ordered, ORDER, rank=1),
        decision(waiting, WAIT, rank=2),
    )
    assert world.release()
    for job, row in before.items():
        after = world.row(job)
        assert (after.gpus, after.nodes, after.ntasks) == (row.gpus, row.nodes, row.ntasks)
        assert (after.site_factor, after.time_limit_s, after.req_nodes) == (0, 3600, ())
        assert not world.leased(job)
    assert world.release() == []


def test_release_with_a_lost_ledger_zeroes_factors_and_lets_leases_expire(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    shaped = world.submit(4, base_priority=10)
    waiting = world.submit(4, base_priority=20)
    ordered = world.submit(4, base_priority=3000)
    world.act(
        decision(shaped, START, gpus=8, remaining=estimate(900)),
        decision(ordered, ORDER, rank=1),
        decision(waiting, WAIT, rank=2),
    )
    assert world.row(shaped).site_factor != 0
    world.ledger.clear()
    world.release()
    assert world.row(shaped).gpus == 4
    assert world.row(shaped).site_factor == world.row(ordered).site_factor == 0
    assert world.leased(waiting)
    world.slurm.advance(RULES.lease_s + 1)
    assert not world.leased(waiting)
    assert world.release() == []


def test_only_order_is_acted_on_where_only_order_is_switched_on(world: World):
    world.rules = replace(RULES, acts={"main": frozenset({"order"})})
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    first, second = world.submit(4), world.submit(8)
    written = world.act(decision(second, START, gpus=8, rank=0), decision(first, ORDER, rank=1))
    assert set(kinds(written)) == {ActionKind.FACTOR}
    assert world.row(second).priority > world.row(first).priority


def test_a_partition_that_is_not_named_is_never_written_to():
    world = World(FakeSlurm(nodes=4, partitions=("main", "other")))
    world.rules = replace(RULES, acts={"other": EVERYTHING})
    job = world.submit(4)
    assert world.act(decision(job, START, gpus=8, remaining=estimate(600))) == []


def test_the_shape_before_a_write_that_never_arrived_is_ours_too(world: World):
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    world.act(decision(job, WAIT), before=lambda step: step == 1)  # leased, then killed
    world.act(decision(job, START, gpus=16, remaining=estimate(600)), before=lambda step: step == 0)
    assert (world.row(job).gpus, world.ledger[job].written.gpus) == (8, 16)
    world.act(decision(job, WAIT))
    assert world.row(job).gpus == 4
    assert world.ledger[job].submitted.gpus == 4


def test_a_node_count_that_was_made_exact_is_opened_again(world: World):
    """Ranks may spread as submitted; planned for one node they may not, in the same numbers."""
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    written = world.act(decision(job, START, gpus=4))
    assert fields_of(written, ActionKind.SHAPE) == {"NumTasks": "4", "NumNodes": "1"}
    assert world.act(decision(job, START, gpus=4)) == []
    written = world.act(decision(job, WAIT))
    assert fields_of(written, ActionKind.RESTORE) == {"NumTasks": "4", "NumNodes": "1-0"}
    assert world.act(decision(job, WAIT)) == []


# -- a start that Slurm does not carry out ---------------------------------------------------------


def left(job: str) -> Decision:
    """What the policy says once it has lost its patience."""
    return replace(decision(job, ORDER), wanted_since_s=0.0)


def blocked_in(world: World, gpus: int) -> str:
    """A job of 4 that lies let go on ``gpus`` and does not start."""
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    job = world.submit(4)
    world.act(decision(job, START, gpus=gpus, remaining=estimate(600)))
    assert world.row(job).gpus == gpus
    assert not world.leased(job)
    return job


def test_a_start_that_slurm_does_not_carry_out_is_given_back_and_not_tried_again(world: World):
    job = blocked_in(world, 8)
    written = world.act(left(job))
    assert kinds(written) == [ActionKind.LEASE, ActionKind.RESTORE, ActionKind.LIFT]
    assert world.row(job).gpus == 4
    assert not world.leased(job)
    assert world.ledger[job].unstarted == (8,)
    assert world.act(left(job)) == []
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert world.row(job).gpus == 4
    assert any("did not start it on 8 GPUs" in r.reason for r in world.refusals)


def test_a_requeue_makes_every_count_possible_again(world: World):
    job = blocked_in(world, 8)
    world.act(left(job))
    for other in [j.job_id for j in world.slurm.queue.values() if j.placement]:
        world.slurm.cancel(other)
    world.slurm.advance()
    assert world.fake(job).state is JobState.RUNNING
    world.slurm.requeue(job)
    world.act(decision(job, WAIT))
    assert world.ledger[job].unstarted == ()


@pytest.mark.parametrize(
    ("reason", "struck"),
    [
        ("AssocGrpGRES", (8,)),
        ("QOSMaxCpuPerUserLimit", (8,)),
        ("MaxGRESPerAccount", (8,)),
        ("Resources", ()),
        ("Priority", ()),
        ("None", ()),
    ],
)
def test_a_limit_that_slurm_names_strikes_the_count_off_at_once(world: World, reason, struck):
    job = blocked_in(world, 8)
    row = replace(world.row(job), reason=reason)
    now = world.slurm.now
    assert notice_unstarted(row, world.ledger[job], now).unstarted == struck
    # An old reason proves nothing, nor does one of a job that may not start yet.
    stale = replace(world.ledger[job], reason_before=reason)
    assert notice_unstarted(row, stale, now).unstarted == ()
    later = replace(row, eligible_s=now + 100)
    assert notice_unstarted(later, world.ledger[job], now).unstarted == ()


def test_the_submitted_count_is_never_struck_off(world: World):
    job = blocked_in(world, 8)
    world.act(left(job))
    row = replace(world.row(job), reason="AssocGrpGRES")
    assert notice_unstarted(row, world.ledger[job], world.slurm.now).unstarted == (8,)


# -- what the owner gave ---------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["ntasks", "nodes"])
def test_a_size_that_the_owner_gave_with_scontrol_is_kept(world: World, field):
    job = world.submit(4)
    world.act(decision(job, WAIT))
    setattr(world.fake(job), field, 2)
    world.ledger[job] = notice_others(world.row(job), world.ledger[job])  # as each cycle does
    assert world.ledger[job].resized_by_hand
    world.act(decision(job, START, gpus=8, remaining=estimate(600)))
    assert getattr(world.row(job), field) == 2
    permit = world.permits(world.snapshot())[job]
    assert not permit.resize
    assert permit.order
    assert "by hand" in " ".join(permit.reasons)


def test_a_node_count_that_slurm_derived_is_not_taken_for_the_owners(world: World):
    job = world.submit(8, nodes=2)
    world.directives[job] = replace(
        world.directives[job], req=replace(world.directives[job].req, nodes=1)
    )
    world.act(decision(job, WAIT))
    assert not world.ledger[job].resized_by_hand
    assert world.permits(world.snapshot())[job].resize


# -- reservations ----------------------------------------------------------------------------------


def test_a_stretched_limit_that_would_reach_into_a_reservation_is_refused(world: World):
    now = world.slurm.now
    names = tuple(world.slurm.nodes)
    world.slurm.reservations.append(Reservation("maint", names, now + 1800, now + 9000))
    job = world.submit(4, time_limit_s=1200.0)
    world.at_submitted[job] = estimate(600)
    world.act(decision(job, START, gpus=1, remaining=estimate(2400)))
    assert world.row(job).gpus == 4
    assert any("reach into reservation maint" in r.reason for r in world.refusals)


def test_a_limit_of_ours_does_not_close_the_pool(world: World):
    job = world.submit(4, time_limit_s=1200.0)
    world.act(decision(job, WAIT))
    world.at_submitted[job] = estimate(600)
    world.submit(16, nodes=4, foreign=True)
    world.slurm.advance()
    world.act(decision(job, START, gpus=1, remaining=estimate(2400)))
    row = world.row(job)
    assert row.time_limit_s > 1800
    now = world.slurm.now
    names = tuple(world.slurm.nodes)
    world.slurm.reservations.append(Reservation("maint", names, now + 1800, now + 9000))
    snapshot = world.snapshot()
    assert PoolIndex(snapshot).pool_of(row) is None
    assert PoolIndex(snapshot, world.ledger).pool_of(row) is not None

"""Deciding: which counts are offered, and what is left of a plan when the policy fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.decide import Decided, decide, everything_allowed, policy_from, still_valid
from slurm_ext.control.observe import Observation, Observer
from slurm_ext.control.permits import facts_from
from slurm_ext.control.rules import rules_from
from slurm_ext.control.submitted import first_sight
from slurm_ext.domain.directive import extract_from_admin_comment
from slurm_ext.domain.job import Shape, ShapeKind
from slurm_ext.domain.node import Limits, Reservation
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import TitanPolicy
from tests.unit.control.bench import Bench


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def look(bench: Bench) -> Observation:
    return Observer(bench.slurm, bench.config, None).observe(bench.now, {})


def plan(bench: Bench, previous: Plan | None = None, **changes: object) -> Decided:
    seen = look(bench)
    ledger = {
        job.job_id: replace(first_sight(job, seen.directives[job.job_id], None), **changes)
        for job in seen.snapshot.pending()
        if job.job_id in seen.directives
    }
    rules = rules_from(bench.config)
    policy = policy_from(bench.config)
    return decide(seen, ledger, rules, facts_from(seen.slurm), bench.config, policy, previous)


def counts(decided: Decided, job: str) -> list[int]:
    return [candidate.gpus for candidate in decided.view.facts[job].candidates]


def test_the_configuration_names_the_policy(bench):
    assert isinstance(policy_from(bench.config), TitanPolicy)
    assert isinstance(policy_from(bench.config.model_copy(update={"policy": "srtf"})), SrtfPolicy)


@pytest.mark.parametrize(("state", "starts"), [("IDLE~", True), ("IDLE%", False)])
def test_nodes_that_slurm_switches_on_for_a_job_have_free_gpus(bench, state, starts):
    job = bench.submit(gpus=4)
    for name in bench.slurm.nodes:
        bench.slurm.set_node(name, state)
    decision = plan(bench).plan.decisions[job]
    assert (decision.verdict is Verdict.START) == starts


def test_auto_is_capped_by_the_administrator_and_every_refusal_is_told(tmp_path):
    bench = Bench(tmp_path, max_gpus_per_job=8)
    job = bench.submit(gpus=4)
    decided = plan(bench)
    assert counts(decided, job) == [1, 2, 4, 8]
    assert 12 not in counts(decided, job)


@pytest.mark.parametrize(("factor", "started"), [(1.0, False), (1000.0, True)])
def test_how_long_a_job_holds_out_is_configured(tmp_path, factor, started):
    """Four GPUs are free for long work, and all others come free in a minute."""
    bench = Bench(tmp_path, hold_out=factor)
    nodes = bench.slurm.nodes
    gpus = sum(node.gpus for node in nodes.values()) - 4
    short = bench.submit(gpus, 1000, auto=False, nodes=len(nodes) - 1, time_limit_s=60.0)
    bench.slurm.start(short)
    job = bench.submit(gpus=8, samples=10**6, nodes=2)
    decision = plan(bench).plan.decisions[job]
    assert (decision.verdict is Verdict.START) is started, decision.reason


def test_the_efficiency_floor_is_the_configured_one(tmp_path):
    bench = Bench(tmp_path, efficiency_floor=0.99)
    job = bench.submit(gpus=4)
    decided = plan(bench)
    assert counts(decided, job) == [1, 4]  # the requested count is never refused by the floor
    assert "efficiency floor" in decided.refused[job][8]


def test_limits_of_the_qos_bound_the_counts(bench):
    bench.slurm.site_limits["qos:normal"] = Limits("qos normal", max_gpus_per_job=4)
    job = bench.submit(gpus=4, qos="normal")
    decided = plan(bench)
    assert max(counts(decided, job)) == 4
    assert "qos normal allows 4 GPUs" in decided.refused[job][8]


def test_a_size_that_slurm_failed_to_take_is_not_offered_again(bench):
    job = bench.submit(gpus=4)
    entry = plan(bench).view.facts[job]
    assert 16 in [c.gpus for c in entry.candidates]
    seen = look(bench)
    shape = first_sight(seen.snapshot.job(job), seen.directives[job], None).submitted
    decided = plan(bench, failed=replace(shape, gpus=16, nodes=4, ntasks=16))
    assert 16 not in counts(decided, job)
    assert "failed to take" in decided.refused[job][16]


def test_a_pinned_job_has_one_candidate(bench):
    job = bench.submit(gpus=4)
    assert counts(plan(bench, veto=True, veto_gpus=2), job) == [2]
    assert counts(plan(bench, veto=True), job) == [4]


def test_an_observer_plans_as_if_everything_were_allowed(tmp_path):
    bench = Bench(tmp_path, act=[])
    seen = look(bench)
    rules = everything_allowed(rules_from(bench.config), seen.snapshot)
    assert rules.may("main", "resize")
    assert not rules_from(bench.config).may("main", "resize")


def test_starts_of_the_previous_plan_are_kept_only_where_they_still_fit(bench):
    jobs = [bench.submit(gpus=4) for _ in range(4)]
    first = plan(bench)
    started = {j for j, d in first.plan.decisions.items() if d.verdict is Verdict.START}
    assert started
    assert set(still_valid(first.view, first.plan)) == started
    assert still_valid(first.view, None) == {}
    # A job is gone, and the node of another is down.
    gone, *rest = sorted(started)
    bench.slurm.cancel(gone)
    for name in first.plan.decisions[rest[0]].nodes:
        bench.slurm.set_node(name, "DRAIN")
    kept = still_valid(plan(bench).view, first.plan)
    assert gone not in kept
    assert rest[0] not in kept
    assert set(kept) <= set(rest) <= set(jobs)
    lost = {n for n, node in bench.slurm.nodes.items() if node.state == "DRAIN"}
    assert not any(lost & set(decision.nodes) for decision in kept.values())


def test_kept_starts_never_take_a_gpu_twice(bench):
    for _ in range(4):
        bench.submit(gpus=4)
    first = plan(bench)
    # A plan that gives every job the same seat.
    start = next(d for d in first.plan.decisions.values() if d.verdict is Verdict.START)
    doubled = replace(
        first.plan,
        decisions={
            job: replace(start, job_id=job, nodes=("n01",), configuration=start.configuration)
            for job in first.plan.decisions
            if start.configuration in [c.configuration for c in first.view.facts[job].candidates]
        },
    )
    kept = still_valid(first.view, doubled)
    assert sum(d.configuration.gpus for d in kept.values()) <= 4


# -- what is offered is what may start -------------------------------------------------------------


def test_growth_that_could_delay_somebody_elses_job_is_not_offered(bench):
    """Else its GPUs are planned, refused when it shall start, and stay idle."""
    bench.slurm.find(bench.fill()).time_limit_s = 60.0
    foreign = bench.slurm.submit(gpus=16, nodes=4, base_priority=10_000)
    job = bench.submit(gpus=4)
    bench.slurm.advance(6)
    decided = plan(bench)
    assert max(counts(decided, job)) == 4
    assert f"could delay job {foreign}" in decided.refused[job][8]


def test_a_count_whose_limit_reaches_into_a_reservation_is_not_offered(bench):
    names = tuple(bench.slurm.nodes)
    job = bench.submit(gpus=4, time_limit_s=1200.0)  # 100 s on 4 GPUs, 360 s on one
    bench.slurm.reservations.append(Reservation("maint", names, bench.now + 1800, bench.now + 9e3))
    decided = plan(bench)
    assert 1 not in counts(decided, job)
    assert 4 in counts(decided, job)
    assert "would reach into reservation maint" in decided.refused[job][1]


def test_a_job_stretched_before_a_reservation_was_announced_keeps_its_pool(bench):
    names = tuple(bench.slurm.nodes)
    job = bench.submit(gpus=4, time_limit_s=1200.0)
    bench.slurm.find(job).time_limit_s = 4500.0
    bench.slurm.reservations.append(Reservation("maint", names, bench.now + 1800, bench.now + 9e3))
    decided = plan(bench, submitted_limit_s=1200.0, written_limit_s=4500.0)
    assert decided.plan.decisions[job].verdict is not Verdict.LEAVE
    assert 1 not in counts(decided, job)


def test_minutes_of_a_count_are_those_of_the_limit_that_it_would_get(bench):
    # 7200 s on 4 GPUs are 480 GPU minutes; the limit shrinks with more of them, but not as fast.
    bench.slurm.site_limits["qos:normal"] = Limits("qos normal", max_gpu_minutes_per_job=500)
    job = bench.submit(gpus=4, qos="normal")
    decided = plan(bench)
    assert 4 in counts(decided, job)
    assert 16 not in counts(decided, job)
    assert "500 GPU minutes per job" in decided.refused[job][16]


def test_a_count_that_slurm_did_not_start_is_not_offered_again(bench):
    job = bench.submit(gpus=4)
    decided = plan(bench, unstarted=(8, 4))
    assert 8 not in counts(decided, job)
    assert 4 in counts(decided, job)  # as submitted it is Slurm's own
    assert "did not start it" in decided.refused[job][8]


def test_a_job_that_was_let_go_does_not_stand_in_its_own_way(bench):
    bench.slurm.site_limits["qos:normal"] = Limits("qos normal", grp_gpus=8)
    bench.fill()
    job = bench.submit(gpus=4, qos="normal", begin_s=bench.now)
    bench.slurm.find(job).ntasks = 8
    shape = Shape(ShapeKind.RANK_PER_GPU, 8, 2, 8)
    bench.slurm.find("1").qos = "other"
    decided = plan(bench, written=shape)
    assert 8 in counts(decided, job)
    other = bench.submit(gpus=4, qos="normal")
    decided = plan(bench, written=shape)
    assert "qos normal allows 8 GPUs at once: 8 in use" in decided.refused[other][8]


def test_the_lower_end_of_a_node_range_is_kept(bench):
    job = bench.submit(gpus=4, nodes=2, auto=True)
    fake = bench.slurm.find(job)
    directive = extract_from_admin_comment(fake.admin_comment)
    ranged = replace(directive, req=replace(directive.req, nodes=2, nodes_max=4))
    fake.admin_comment = f"ft:{ranged.to_json()}"
    decided = plan(bench)
    assert counts(decided, job) == [4, 8, 16]
    assert "at least 2 were asked for" in decided.refused[job][2]
    assert decided.view.facts[job].candidates[0].configuration.placement == (2, 2)

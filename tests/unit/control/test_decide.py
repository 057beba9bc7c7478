"""Deciding: which counts are offered, and what is left of a plan when the policy fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.decide import Decided, decide, everything_allowed, policy_from, still_valid
from slurm_ext.control.observe import Observation, Observer
from slurm_ext.control.permits import facts_from
from slurm_ext.control.rules import rules_from
from slurm_ext.control.submitted import first_sight
from slurm_ext.domain.node import Limits
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


def test_auto_is_capped_by_the_administrator_and_every_refusal_is_told(tmp_path):
    bench = Bench(tmp_path, max_gpus_per_job=8)
    job = bench.submit(gpus=4)
    decided = plan(bench)
    assert counts(decided, job) == [1, 2, 4, 8]
    assert 12 not in counts(decided, job)


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

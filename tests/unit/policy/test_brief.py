"""A brief plan starts and stops what a whole plan does; it only leaves the rest unsaid."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import Policy, View
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import Hardware, replay
from slurm_ext.sim.policies import POLICIES, policy_named
from tests.unit.sim.test_engine import sim_job

jobs = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from([1, 1, 1, 2, 4, 8]),
        st.integers(1, 12),
        st.sampled_from([(), (), (1, 2, 4, 8)]),
    ),
    min_size=1,
    max_size=30,
)


class Twice:
    """Asks a policy for a brief plan and for a whole one, and compares what is to be done."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.name = inner.name
        self.preemptive = bool(getattr(inner, "preemptive", False))
        self.asked = 0
        self.unsaid = 0

    def __call__(self, view: View, now: float) -> Plan:
        brief = self.inner(view, now)
        # The whole plan is made from what the daemon has, without prepared orders.
        whole = self.inner(replace(view, brief=False, queues=None, shortest=None), now)
        assert _to_do(brief) == _to_do(whole)
        self.asked += 1
        self.unsaid += len(whole.decisions) - len(brief.decisions)
        return brief


def _to_do(plan: Plan) -> dict[str, tuple[Verdict, Configuration | None, tuple[str, ...]]]:
    return {
        key: (d.verdict, d.configuration, d.nodes)
        for key, d in plan.decisions.items()
        if d.verdict in (Verdict.START, Verdict.STOP)
    }


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(rows=jobs, pooled=st.booleans())
def test_brief_plans_do_the_same(
    name: str, rows: list[tuple[int, int, int, tuple[int, ...]]], pooled: bool
) -> None:
    hardware = Hardware(2, 4, pooled=pooled)
    listed = [
        sim_job(f"j{n:02}", submit, gpus, run * 3, counts=counts, hardware=hardware)
        for n, (submit, gpus, run, counts) in enumerate(rows)
    ]
    policy = Twice(policy_named(name))
    replay(listed, hardware, policy, Costs(), 5.0 if policy.preemptive else 0.0)
    assert policy.asked


@pytest.mark.parametrize("name", ["fifo", "backfill", "srtf", "titan", "titan-rigid"])
def test_brief_plans_are_brief(name: str) -> None:
    listed = [sim_job(f"j{n:02}", 0, 4, 10 + n) for n in range(20)]
    policy = Twice(policy_named(name))
    replay(listed, Hardware(2, 4), policy)
    assert policy.unsaid > 100

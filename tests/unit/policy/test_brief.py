"""A brief plan starts and stops what a whole plan does; it only leaves the rest unsaid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import JobFacts, Policy, View
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
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
        # Then the simulator keeps the queue in the policy's own order, and shows that.
        self.standing = getattr(inner, "standing", None)
        self.asked = 0
        self.unsaid = 0

    def __call__(self, view: View, now: float) -> Plan:
        brief = self.inner(view, now)
        # The whole plan is made from what the daemon has, without prepared orders.
        plain = replace(view, brief=False, queues=None, shortest=None, alike=None, apart=None)
        whole = self.inner(plain, now)
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


class WholeQueue:
    """The same policy, which does not say by which number it ranks: it is shown the whole queue."""

    def __init__(self, inner: TitanPolicy) -> None:
        self.inner = inner
        self.name = inner.name

    def __call__(self, view: View, now: float) -> Plan:
        assert view.alike is None
        return self.inner(view, now)


@pytest.mark.parametrize("limit_s", [7 * 86400.0, 25.0])
@settings(max_examples=25, deadline=None)
@given(rows=jobs, pooled=st.booleans())
def test_a_queue_in_order_changes_nothing(
    limit_s: float, rows: list[tuple[int, int, int, tuple[int, ...]]], pooled: bool
) -> None:
    """Also where jobs are past the waiting limit and block the others."""
    hardware = Hardware(2, 4, pooled=pooled)
    listed = [
        sim_job(f"j{n:02}", submit, gpus, run * 3, counts=counts, hardware=hardware)
        for n, (submit, gpus, run, counts) in enumerate(rows)
    ]
    policy = TitanPolicy(TitanConfig(waiting_limit_s=limit_s))
    assert (
        replay(listed, hardware, policy).runs == replay(listed, hardware, WholeQueue(policy)).runs
    )


def test_a_long_queue_is_not_looked_at_to_its_end() -> None:
    """One thousand jobs wait, and a decision touches the few that could start."""
    seen: list[int] = []

    class Counting(TitanPolicy):
        def __call__(self, view: View, now: float) -> Plan:
            facts = _Counted(view.facts)
            plan = super().__call__(replace(view, facts=facts), now)
            seen.append(facts.read)
            return plan

    listed = [sim_job(f"j{n:04}", 0, 1 + n % 2, 10 + n) for n in range(1000)]
    replay(listed, Hardware(2, 4), Counting())
    assert max(seen) < 100


class _Counted(Mapping[str, JobFacts]):
    """Facts that count how often one was looked at."""

    def __init__(self, inner: Mapping[str, JobFacts]) -> None:
        self._inner = inner
        self.read = 0

    def __getitem__(self, key: str) -> JobFacts:
        self.read += 1
        return self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


@pytest.mark.parametrize("name", ["fifo", "backfill", "srtf", "titan", "titan-rigid"])
def test_brief_plans_are_brief(name: str) -> None:
    listed = [sim_job(f"j{n:02}", 0, 4, 10 + n) for n in range(20)]
    policy = Twice(policy_named(name))
    replay(listed, Hardware(2, 4), policy)
    assert policy.unsaid > 100

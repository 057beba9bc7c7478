"""Leases: whose a future start is, and when they end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.control.lease import Hold, begin_s, hold_of, lease_end_s, renewal_due
from slurm_ext.control.rules import ActingRules
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.journal import LedgerEntry

NOW = 1_700_000_000.0
RULES = ActingRules()
JOB = Job("7", 7, "alice", ("main",), JobState.PENDING, NOW - 600.0, eligible_s=NOW - 600.0)
ENTRY = LedgerEntry("7", NOW - 600.0)


def test_the_begin_time_is_not_backfills_expectation():
    planned = replace(JOB, start_s=NOW + 9000, reason="Resources")
    assert begin_s(planned) == JOB.eligible_s
    assert hold_of(planned, ENTRY, Directive(), RULES, NOW) is Hold.NONE
    assert begin_s(replace(JOB, eligible_s=None, start_s=NOW + 60, reason="BeginTime")) == NOW + 60
    assert begin_s(replace(JOB, eligible_s=None, start_s=NOW + 60, reason="Resources")) is None


@pytest.mark.parametrize(
    ("job", "entry", "directive", "expected"),
    [
        ({"eligible_s": NOW - 1}, {}, Directive(), Hold.NONE),
        ({"eligible_s": NOW + 50}, {"lease_until_s": NOW + 50}, Directive(), Hold.OURS),
        ({"eligible_s": NOW + 50}, {"lease_until_s": NOW + 51}, Directive(), Hold.OURS),
        ({"eligible_s": NOW + 50}, {"lease_until_s": NOW + 60}, Directive(), Hold.OTHERS),
        (
            {"eligible_s": NOW + 50},
            {"lease_until_s": NOW + 200, "lease_before_s": NOW + 50},
            Directive(),
            Hold.OURS,
        ),
        ({"eligible_s": NOW + 4, "submit_s": NOW - 1}, {}, Directive(), Hold.GRACE),
        ({"eligible_s": NOW + 60, "submit_s": NOW - 1}, {}, Directive(), Hold.OTHERS),
        (
            {"eligible_s": NOW + 4, "submit_s": NOW - 1},
            {},
            Directive(begin_s=NOW + 4),
            Hold.OTHERS,
        ),
        (
            {"eligible_s": NOW + 111, "submit_s": NOW - 10, "restarts": 1},
            {},
            Directive(),
            Hold.REQUEUE,
        ),
        (
            {"eligible_s": NOW + 111, "submit_s": NOW - 10, "restarts": 0},
            {},
            Directive(),
            Hold.OTHERS,
        ),
        ({"eligible_s": NOW + 4, "submit_s": NOW - 1}, {}, None, Hold.OTHERS),
    ],
)
def test_whose_a_future_start_is(job, entry, directive, expected):
    found = hold_of(replace(JOB, **job), replace(ENTRY, **entry), directive, RULES, NOW)
    assert found is expected


@given(
    number=st.integers(1, 2**31),
    lease_s=st.floats(2, 3600),
    renew_at=st.floats(0.1, 0.9),
    now=st.floats(1.6e9, 1.9e9),
)
def test_a_lease_ends_within_its_length_and_is_not_due_at_once(number, lease_s, renew_at, now):
    rules = ActingRules(lease_s=lease_s, renew_at=renew_at)
    job = replace(JOB, base_id=number)
    until = lease_end_s(job, rules, now)
    assert until == int(until)
    assert now + lease_s * (1 - renew_at) - 1e-3 <= until <= now + lease_s + 1
    if until - now > lease_s * (1 - renew_at):
        assert not renewal_due(until, rules, now)


@pytest.mark.parametrize("jobs", [40, 1000, 5000])
def test_renewals_are_staggered(jobs):
    """At most one in twenty per cycle, although all were leased in one."""
    ends = {i: lease_end_s(replace(JOB, base_id=i), RULES, NOW) for i in range(jobs)}
    now, most = NOW, 0
    for _ in range(100):
        now += RULES.cycle_s
        due = [i for i, end in ends.items() if renewal_due(end, RULES, now)]
        for i in due:
            ends[i] = lease_end_s(replace(JOB, base_id=i), RULES, now)
        most = max(most, len(due))
        assert min(ends.values()) > now + RULES.safe_s
    assert most <= 0.05 * jobs

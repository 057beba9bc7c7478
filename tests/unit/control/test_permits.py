"""Permits: what may be touched, and a reason for every no."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.control.permits import NO_GPUS, SlurmFacts, classify, facts_from
from slurm_ext.control.rules import ActingRules
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.job import Job, JobState, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.pausing import Paused
from slurm_ext.slurm.facts import SlurmConfig

NOW = 1_700_000_000.0
RULES = ActingRules(acts={"main": frozenset({"order", "resize", "lease", "pin"})})
FACTS = SlurmFacts()
DIRECTIVE = Directive(
    gpus=GpuRequest(GpuRequestKind.AUTO),
    shape=ShapeKind.RANK_PER_GPU,
    req=RequestedShape(gpus=4, nodes=1, ntasks=4, gpus_per_task=1),
)
JOB = Job(
    "7",
    7,
    "alice",
    ("main",),
    JobState.PENDING,
    NOW - 100,
    gpus=4,
    ntasks=4,
    qos="normal",
    priority=5000,
    eligible_s=NOW - 100,
)
ENTRY = LedgerEntry("7", NOW - 100)


def permit(job: Job = JOB, directive: Directive | None = DIRECTIVE, entry=ENTRY, **more):
    facts, rules = more.get("facts", FACTS), more.get("rules", RULES)
    return classify(job, directive, entry, facts, rules, NOW, more.get("attempts"))


def test_an_ordinary_job_may_be_ordered_leased_resized_and_pinned():
    found = permit()
    assert (found.order, found.resize, found.lease, found.pin) == (True, True, True, True)
    assert found.reasons == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"held_by_user": True, "priority": 0, "reason": "JobHeldUser"}, "its owner holds it"),
        ({"held_by_admin": True, "priority": 0}, "an administrator holds it"),
        ({"priority": 0}, "somebody holds it"),
        ({"priority_set": True}, "an operator set its priority"),
        ({"dependency": "afterok:3"}, "depends on"),
        ({"partitions": ("main", "other")}, "2 partitions"),
        ({"qos": "a,b"}, "several QOS"),
        ({"het_job_id": 7}, "heterogeneous"),
        ({"eligible_s": NOW + 3600}, "not by the daemon"),
        ({"state": JobState.RUNNING}, "only pending jobs"),
    ],
)
def test_jobs_that_are_left_alone_entirely(change, words):
    found = permit(replace(JOB, **change))
    assert (found.order, found.resize, found.lease, found.pin) == (False,) * 4
    assert words in found.reasons[0]


def test_badconstraints_exclusive():
    """Field case: priority 0 after a node failure is not a person's hold."""
    found = permit(
        replace(JOB, reason="BadConstraints", priority=0, held_by_admin=True, restarts=1)
    )
    assert not found.order
    assert "Slurm holds it" in found.reasons[0]


def test_a_foreign_job_is_left_alone():
    found = permit(directive=None)
    assert not (found.order)
    assert not (found.resize)
    assert not (found.lease)
    assert not (found.pin)
    assert "no --ft-* directive" in found.reasons[0]


def test_the_users_own_begin():
    own = replace(DIRECTIVE, begin_s=NOW + 3600)
    found = permit(replace(JOB, eligible_s=NOW + 3600), own)
    assert not found.order
    assert "--begin" in found.reasons[0]
    # Once it has passed it binds nobody.
    assert permit(JOB, replace(DIRECTIVE, begin_s=NOW - 50)).resize


def paused(hold_s: float = 600.0, ended_s: float = NOW - 20, number: int = 0) -> Attempts:
    reason = Paused("alice", hold_s).words + "; last save failed: no"
    return Attempts(
        "7", (Attempt(number, NOW - 900, 4, ended_s=ended_s, cause=Cause.OPERATOR, reason=reason),)
    )


BACK = replace(JOB, restarts=1, submit_s=NOW - 18, eligible_s=NOW + 584)


@pytest.mark.parametrize(
    "job",
    [
        BACK,
        # Slurm's own delay, which would be lifted, before the pause has written its own.
        replace(BACK, eligible_s=NOW + 103),
    ],
)
def test_a_job_that_its_owner_paused_stays_paused_and_says_so(job):
    assert "alice paused it until" in permit(job, attempts=paused()).reasons[0]
    assert "slurm-ext resume 7 lets it start" in permit(job, attempts=paused()).reasons[0]
    assert not permit(job, attempts=paused()).order


@pytest.mark.parametrize(
    ("job", "attempts", "words"),
    [
        (BACK, None, "not by the daemon"),
        # An older pause, of which the job has come back since.
        (replace(BACK, restarts=2), paused(), "not by the daemon"),
        # Over, and somebody has put it off again.
        (BACK, paused(ended_s=NOW - 700), "not by the daemon"),
        (replace(BACK, eligible_s=NOW + 9000), paused(), "not by the daemon"),
        # The owner has ended it: slurm-ext resume.
        (replace(BACK, eligible_s=NOW - 1), paused(), ""),
    ],
)
def test_a_pause_that_is_over_is_none(job, attempts, words):
    found = permit(job, attempts=attempts)
    assert found.order == (not words)
    assert words in "".join(found.reasons)


@pytest.mark.parametrize(
    ("job", "entry"),
    [
        (replace(JOB, eligible_s=NOW + 120), replace(ENTRY, lease_until_s=NOW + 120)),
        (replace(JOB, eligible_s=NOW + 120), replace(ENTRY, lease_before_s=NOW + 120)),
        (replace(JOB, submit_s=NOW - 1, eligible_s=NOW + 4), ENTRY),  # submit grace
        (replace(JOB, submit_s=NOW - 21, eligible_s=NOW + 100, restarts=1), ENTRY),  # requeue
    ],
)
def test_future_starts_that_are_ours_to_move(job, entry):
    assert permit(job, entry=entry).resize


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": False}, "salloc and srun"),
        ({"exclusive": True}, "--exclusive"),
        ({"req_nodes": ("n1",)}, "--nodelist"),
        ({"licenses": "matlab:1"}, "licences"),
        ({"reservation": "course"}, "reservation course"),
        ({"features": "[a|b]"}, "ties nodes"),
    ],
)
def test_jobs_that_are_ordered_and_never_resized(change, words):
    found = permit(replace(JOB, **change))
    assert found.order
    assert not (found.resize)
    assert not (found.lease)
    assert not (found.pin)
    assert any(words in reason for reason in found.reasons)


@pytest.mark.parametrize(
    "directive",
    [
        replace(DIRECTIVE, gpus=GpuRequest()),
        replace(DIRECTIVE, shape=ShapeKind.FIXED),
        replace(DIRECTIVE, shape=None),
        replace(DIRECTIVE, req=None),
        replace(DIRECTIVE, req=replace(DIRECTIVE.req, why_fixed="exclusive")),
    ],
)
def test_directives_that_allow_order_only(directive):
    found = permit(directive=directive)
    assert found.order
    assert not (found.resize)
    assert not (found.lease)
    assert not (found.pin)
    assert found.reasons


def test_our_own_pin_is_no_node_list_of_the_users():
    pinned = replace(JOB, req_nodes=("n1",))
    assert permit(pinned, entry=replace(ENTRY, pinned=True)).resize
    assert not permit(pinned).resize


def test_the_owners_pin_of_the_count_is_a_veto():
    kept = permit(entry=replace(ENTRY, veto=True))
    assert kept.order
    assert not kept.resize
    assert "slurm-ext pin" in kept.reasons[0]
    # The count asked for still has to be written once.
    assert permit(entry=replace(ENTRY, veto=True, veto_gpus=2)).resize
    assert not permit(replace(JOB, gpus=2), entry=replace(ENTRY, veto=True, veto_gpus=2)).resize


def test_past_the_waiting_limit_it_may_be_resized_but_not_kept_back():
    old = replace(ENTRY, first_submit_s=NOW - RULES.waiting_limit_s - 1)
    found = permit(entry=old)
    assert found.resize
    assert not found.lease
    assert "waiting limit" in found.reasons[0]


def test_an_array_may_be_resized_and_not_pinned():
    found = permit(replace(JOB, job_id="7_[1-5]", array=True))
    assert found.resize
    assert not found.pin


def test_switches_of_the_partition():
    assert not permit(rules=ActingRules()).order
    only_order = replace(RULES, acts={"main": frozenset({"order"})})
    found = permit(rules=only_order)
    assert found.order
    assert not found.resize
    no_pin = replace(RULES, acts={"main": frozenset({"order", "resize", "lease"})})
    assert permit(rules=no_pin).resize
    assert not permit(rules=no_pin).pin


def test_limits_without_accrue_always_forbid_leases():
    found = permit(facts=SlurmFacts(enforces_limits=True))
    assert found.order
    assert not (found.resize)
    assert not (found.lease)
    assert "ACCRUE_ALWAYS" in found.reasons[0]
    assert permit(facts=SlurmFacts(enforces_limits=True, accrues_always=True)).lease


@pytest.mark.parametrize(
    "values",
    [
        {"prioritytype": "priority/basic"},
        {"prioritytype": "priority/multifactor", "prioritysitefactorplugin": "site_factor/x"},
    ],
)
def test_a_slurm_in_which_nothing_may_be_touched(values):
    facts = facts_from(SlurmConfig("24.11.5", values))
    found = permit(facts=facts)
    assert not (found.order)
    assert not (found.resize)
    assert not (found.lease)
    assert not (found.pin)
    assert facts.refusal() in found.reasons


@pytest.mark.parametrize("acts", [{"order"}, {"order", "resize", "lease", "pin"}])
def test_a_job_without_gpus_is_told_that_there_is_nothing_to_plan(acts: set[str]):
    rules = replace(RULES, acts={"main": frozenset(acts)})
    found = permit(replace(JOB, gpus=0), replace(DIRECTIVE, gpus=GpuRequest()), rules=rules)
    assert (found.order, found.resize, found.lease) == (True, False, False)
    assert found.reasons[0] == NO_GPUS
    assert "as submitted" not in " ".join(found.reasons)

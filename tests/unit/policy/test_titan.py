"""Policy titan: who starts, on how many GPUs, and what the rest is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Partition
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import JobFacts, Permit, View
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.queue import fields
from slurm_ext.policy.roomless import term_name
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from tests.unit.policy.build import FULL, facts, job, nodes, placement, view

HOUR = 3600.0


def decide(v: View, now: float = 0.0, **config: object) -> Plan:
    return TitanPolicy(TitanConfig(**config))(v, now)  # type: ignore[arg-type]


def gpus_started(plan: Plan) -> dict[str, int]:
    return {
        d.job_id: d.configuration.gpus
        for d in plan.decisions.values()
        if d.verdict is Verdict.START and d.configuration is not None
    }


def test_two_gpus_go_to_two_jobs_not_to_the_one_with_more_samples_per_second() -> None:
    # A runs 100 and 190 samples/s, B 80 and 100, on one and two GPUs; both have 1000 s to go on
    # one. The largest sum of samples/s would be 190 with both GPUs given to A.
    known = {
        "1": facts(1, {1: 1000.0, 2: 1000.0 * 100 / 190}),
        "2": facts(2, {1: 1000.0, 2: 1000.0 * 80 / 100}),
    }
    plan = decide(view([job(1), job(2)], known, nodes(1, gpus=2)))
    assert gpus_started(plan) == {"1": 1, "2": 1}
    assert plan.decisions["2"].terms[0].name == "progress"
    # What keeps A from taking both is named.
    assert "not 2 GPUs: progress" in [t.name for t in plan.decisions["1"].terms]


def test_a_lone_job_gets_the_fastest_count_and_is_pinned() -> None:
    known = {"1": facts(1, {1: 8 * HOUR, 4: 2.2 * HOUR, 8: 1.2 * HOUR})}
    plan = decide(view([job(1)], known, nodes(3, used=[1])))
    decision = plan.decisions["1"]
    assert decision.verdict is Verdict.START
    assert decision.nodes == ("n01", "n02")
    assert {t.name for t in decision.terms} >= {"progress"}


def test_a_candidate_without_a_seat_is_replaced_by_one_that_has_one() -> None:
    # 6 GPUs are free, never 8 and never a whole node.
    known = {"1": facts(1, {1: 8 * HOUR, 2: 4.1 * HOUR, 4: 2.2 * HOUR})}
    plan = decide(view([job(1)], known, nodes(2, used=[1, 1])))
    assert gpus_started(plan) == {"1": 2}
    assert "2 times" in plan.solves[0].note


def test_a_faster_count_without_cpus_beside_its_gpus_is_told() -> None:
    # All eight GPUs are free; somebody's CPUs are in the way on the second node.
    machines = nodes(2)
    machines = (machines[0], replace(machines[1], cpus_alloc=1))
    known = {"1": facts(1, {4: 2 * HOUR, 8: HOUR})}
    started = decide(view([job(1, 4, cpus=32)], known, machines)).decisions["1"]
    assert started.verdict is Verdict.START
    assert started.configuration is not None
    assert started.configuration.gpus == 4
    words = {term.name: term.words for term in started.terms}
    assert words[term_name(8)] == "there are not 2 nodes with 32 free CPUs beside 4 free GPUs"
    # Without that job there is room, and nothing of the kind is said.
    free = decide(view([job(1, 4, cpus=32)], known, nodes(2))).decisions["1"]
    assert free.configuration is not None
    assert free.configuration.gpus == 8
    assert not any(term.name.startswith("no room") for term in free.terms)


def test_a_faster_count_without_memory_or_whole_nodes_is_told() -> None:
    known = {"1": facts(1, {2: 2 * HOUR, 4: HOUR})}
    split = decide(view([job(1, 2)], known, nodes(2, used=[1, 1]))).decisions["1"]
    assert term_name(4) in {t.name for t in split.terms}
    assert "there is no node with 4 GPUs free" in {t.words for t in split.terms}
    full = tuple(replace(n, memory_mib=8192, memory_alloc_mib=1024) for n in nodes(1))
    tight = decide(view([job(1, 2, memory_mib=4096)], known, full)).decisions["1"]
    words = "there is no node with 8 GiB of free memory beside the GPUs and CPUs"
    assert words in {t.words for t in tight.terms}


def test_a_gang_starts_whole_or_waits_and_says_so() -> None:
    # Seven of eight GPUs are free: nothing of an eight-GPU job starts.
    known = {"1": facts(1, {8: HOUR})}
    plan = decide(view([job(1, 8)], known, nodes(2, used=[1])))
    assert gpus_started(plan) == {}
    assert "at least 8 GPU" in plan.decisions["1"].waits_for


def test_a_stream_of_short_jobs_cannot_starve_a_large_one() -> None:
    # One GPU job ends and one arrives every minute; the large job has waited past its limit.
    now, large = 10 * HOUR, facts(1, {8: HOUR}, since=0.0)
    busy = [
        Job(
            str(90 + i),
            90 + i,
            "bob",
            ("main",),
            JobState.RUNNING,
            0.0,
            gpus=1,
            node_names=(f"n{i // 4:02d}",),
        )
        for i in range(7)
    ]
    ends = {job.job_id: now + 60.0 * (i + 1) for i, job in enumerate(busy)}
    known = {"1": large, "2": facts(2, {1: 500.0}, since=now - 1), "3": facts(3, {1: 300.0})}
    known["3"] = replace(known["3"], waiting_since_s=now - 1)
    v = view([*busy, job(1, 8), job(2), job(3)], known, nodes(2, used=[4, 3]), free_at=ends)
    plan = decide(v, now=now, waiting_limit_s=5 * HOUR)
    assert plan.decisions["1"].verdict is Verdict.RESERVE
    # The last of the running jobs ends in 420 s: 300 s fit before that, 500 s do not.
    assert gpus_started(plan) == {"3": 1}


def test_what_does_not_start_waits_under_a_lease_and_is_told_why() -> None:
    known = {n: facts(int(n), {4: HOUR * int(n)}) for n in ("1", "2", "3")}
    plan = decide(view([job(1), job(2), job(3)], known, nodes(1)))
    assert gpus_started(plan) == {"1": 4}
    assert plan.decisions["2"].verdict is Verdict.WAIT
    assert "at least 4 GPU" in plan.decisions["2"].waits_for
    assert plan.decisions["2"].expected_start_s == HOUR
    assert plan.decisions["3"].expected_start_s == 3 * HOUR
    assert plan.decisions["2"].rank < plan.decisions["3"].rank


def test_with_foreign_jobs_in_the_pool_slurm_reserves_for_our_first() -> None:
    known = {n: facts(int(n), {4: HOUR * int(n)}) for n in ("1", "2", "3")}
    jobs = [job(1), job(2), job(3), job(9)]
    plan = decide(view(jobs, known, nodes(1)))
    assert plan.decisions["2"].verdict is Verdict.RESERVE
    assert plan.decisions["3"].verdict is Verdict.WAIT
    assert "9" not in plan.decisions


def test_a_foreign_job_of_another_partition_changes_nothing() -> None:
    known = {n: facts(int(n), {4: HOUR * int(n)}) for n in ("1", "2")}
    far = replace(job(9), partitions=("other",))
    plan = decide(view([job(1), job(2), far], known, nodes(1)))
    assert plan.decisions["2"].verdict is Verdict.WAIT


@pytest.mark.parametrize(
    ("foreign", "verdict"),
    [
        (job(9, reason="QOSMaxGRESPerJob"), Verdict.WAIT),
        (job(9, reason="AccountNotAllowed"), Verdict.WAIT),
        (job(9, reason="QOSGrpGRES"), Verdict.RESERVE),  # until others end
        (replace(job(9, reason="PartitionDown"), partitions=("main", "far")), Verdict.RESERVE),
    ],
)
def test_a_foreign_job_that_slurm_never_starts_overtakes_nobody(foreign, verdict) -> None:
    known = {n: facts(int(n), {4: HOUR * int(n)}) for n in ("1", "2")}
    found = view([job(1), job(2), foreign], known, nodes(1))
    assert fields(found)[0].foreign == (verdict is Verdict.RESERVE)
    assert decide(found).decisions["2"].verdict is verdict


def test_a_job_past_the_waiting_limit_comes_first_even_if_worth_little() -> None:
    known = {
        "1": facts(1, {4: 100 * HOUR}, since=0.0),
        "2": facts(2, {4: 0.1 * HOUR}, since=90 * HOUR),
    }
    plan = decide(
        view([job(1), job(2)], known, nodes(1)), now=100 * HOUR, waiting_limit_s=50 * HOUR
    )
    assert gpus_started(plan) == {"1": 4}
    assert plan.decisions["1"].rank == 0


def test_nothing_delays_an_overdue_job_that_cannot_start_yet() -> None:
    busy = Job("8", 8, "bob", ("main",), JobState.RUNNING, 0.0, gpus=4, node_names=("n00",))
    known = {
        "1": facts(1, {8: HOUR}, since=0.0),
        "2": facts(2, {4: 0.4 * HOUR}, since=99 * HOUR),
        "3": facts(3, {4: 5 * HOUR}, since=99 * HOUR),
    }
    jobs = [busy, job(1, gpus=8), job(2, gpus=4), job(3, gpus=4)]
    now = 100 * HOUR
    plan = decide(
        view(jobs, known, nodes(2, used=[4]), free_at={"8": now + 0.5 * HOUR}),
        now=now,
        waiting_limit_s=50 * HOUR,
    )
    assert plan.decisions["1"].verdict is Verdict.RESERVE
    assert gpus_started(plan) == {"2": 4}  # ends before n00 does; job 3 would not


def test_left_over_gpus_are_not_promised_twice_behind_an_overdue_job() -> None:
    busy = Job("8", 8, "bob", ("main",), JobState.RUNNING, 0.0, gpus=4, node_names=("n00",))
    now = 100 * HOUR
    known = {
        "1": facts(1, {8: HOUR}, since=0.0),
        "2": facts(2, {4: 5 * HOUR}, since=99 * HOUR),
        "3": facts(3, {4: 6 * HOUR}, since=99 * HOUR),
    }
    jobs = [busy, job(1, gpus=8), job(2, gpus=4), job(3, gpus=4)]
    # Node n00 is busy; of the 8 free GPUs 4 are left over once job 1 gets its 8.
    plan = decide(
        view(jobs, known, nodes(3, used=[4]), free_at={"8": now + 0.5 * HOUR}),
        now=now,
        waiting_limit_s=50 * HOUR,
    )
    assert plan.decisions["1"].verdict is Verdict.START
    plan = decide(
        view(jobs, known | {"1": facts(1, {12: HOUR})}, nodes(4, used=[4, 4]), free_at={}),
        now=now,
        waiting_limit_s=50 * HOUR,
    )
    assert plan.decisions["1"].verdict is Verdict.RESERVE
    assert len(gpus_started(plan)) <= 1


def test_the_last_plan_is_kept_unless_a_change_pays() -> None:
    known = {"1": facts(1, {4: 1.00 * HOUR}), "2": facts(2, {4: 1.02 * HOUR})}
    jobs = [job(1), job(2)]
    first = decide(view([job(2)], known, nodes(1)))
    assert gpus_started(first) == {"2": 4}
    second = decide(view(jobs, known, nodes(1), previous=first))
    assert gpus_started(second) == {"2": 4}
    much_better = {"1": facts(1, {4: 0.2 * HOUR}), "2": known["2"]}
    third = decide(view(jobs, much_better, nodes(1), previous=first))
    assert gpus_started(third) == {"1": 4}


def test_a_start_that_slurm_does_not_carry_out_gives_its_gpus_back() -> None:
    known = {"1": facts(1, {4: 1.0 * HOUR}), "2": facts(2, {4: 2 * HOUR})}
    limited = replace(job(1), reason="QOSMaxGRESPerUser")
    v = view([limited, job(2)], known, nodes(1))
    first = decide(v, now=0.0)
    assert gpus_started(first) == {"1": 4}
    still = decide(replace(v, previous=first), now=100.0)
    assert gpus_started(still) == {"1": 4}
    later = decide(replace(v, previous=still), now=130.0)
    assert gpus_started(later) == {"2": 4}
    # Given back its submitted shape, in which Slurm may start it.
    assert later.decisions["1"].verdict is Verdict.ORDER
    assert later.decisions["1"].left_to_slurm
    assert "QOSMaxGRESPerUser" in later.decisions["1"].reason
    assert decide(replace(v, previous=later), now=1200.0).decisions["1"].left_to_slurm
    assert gpus_started(decide(replace(v, previous=later), now=1300.0)) == {"1": 4}


def test_an_observer_does_not_take_slurms_silence_for_a_failure() -> None:
    v = replace(view([job(1)], {"1": facts(1, {4: HOUR})}, nodes(1)), carried_out=False)
    first = decide(v, now=0.0)
    assert gpus_started(decide(replace(v, previous=first), now=1e5)) == {"1": 4}


def test_a_decision_names_what_speaks_against_more_gpus() -> None:
    known = {"1": facts(1, {1: 1000.0, 2: 900.0}), "2": facts(2, {1: 1000.0, 2: 800.0})}
    plan = decide(view([job(1), job(2)], known, nodes(1, gpus=2)))
    names = [t.name for t in plan.decisions["2"].terms]
    assert "not 2 GPUs: progress" in names


def test_a_job_whose_order_alone_is_ours_is_never_started_or_leased_by_us() -> None:
    order_only = Permit(order=True, reasons=("its shape is not ours to change",))
    known = {"1": facts(1, {4: HOUR}, order_only), "2": facts(2, {4: 2 * HOUR}, order_only)}
    plan = decide(view([job(1, 4), job(2, 4)], known, nodes(1)))
    assert plan.decisions["1"].verdict is Verdict.ORDER
    assert plan.decisions["2"].verdict is Verdict.ORDER
    assert plan.decisions["1"].rank < plan.decisions["2"].rank
    assert not plan.decisions["1"].nodes


def test_a_job_that_may_not_be_ordered_is_left_and_says_why() -> None:
    known = {"1": facts(1, {4: HOUR}, Permit(order=False, reasons=("held by its user",)))}
    plan = decide(view([job(1, 4)], known, nodes(1)))
    assert plan.decisions["1"].verdict is Verdict.LEAVE
    assert "held by its user" in plan.decisions["1"].reason


def test_overlapping_pools_share_their_gpus() -> None:
    machines = nodes(3)
    pools = {"main": ("n00", "n01"), "high": ("n01", "n02")}
    known = {
        "1": facts(1, {8: HOUR}),
        "2": replace(facts(2, {8: HOUR * 0.9}), pool="high"),
        "3": replace(facts(3, {4: HOUR * 0.5}), pool="high"),
    }
    v = view([job(1), job(2), job(3)], known, machines, pools)
    plan = decide(v)
    # Eight GPUs in "main" and four more in "high": jobs 1 and 3 fit, 1 and 2 do not.
    assert gpus_started(plan) == {"1": 8, "3": 4}
    assert plan.decisions["3"].nodes == ("n02",)


def test_a_pool_without_free_gpus_is_not_solved() -> None:
    known = {"1": facts(1, {4: HOUR})}
    plan = decide(view([job(1)], known, nodes(1, used=[4])))
    assert plan.solves == ()
    assert plan.decisions["1"].verdict is Verdict.WAIT


def test_partitions_that_name_no_known_node_do_not_break_the_plan() -> None:
    snapshot = Snapshot(0.0, (job(1),), (), (Partition("main", ()),))
    plan = decide(View(snapshot, {"1": facts(1, {4: HOUR})}, {"main": ()}))
    assert plan.decisions["1"].verdict is Verdict.WAIT


@st.composite
def _views(draw: st.DrawFn) -> View:
    used = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    count = draw(st.integers(0, 8))
    known: dict[str, JobFacts] = {}
    jobs = []
    for number in range(1, count + 1):
        base = draw(st.floats(60, 40000))
        counts = draw(st.sets(st.sampled_from([1, 2, 4, 8, 12]), min_size=1, max_size=4))
        times = {g: base / g**0.8 for g in sorted(counts)}
        permit = draw(st.sampled_from([FULL, Permit(order=True), Permit(order=False)]))
        known[str(number)] = facts(number, times, permit, since=draw(st.floats(0, 1e5)))
        jobs.append(job(number, gpus=min(counts)))
    if draw(st.booleans()):
        jobs.append(job(99))
    return view(jobs, known, nodes(len(used), used=used))


@settings(max_examples=150, deadline=None)
@given(_views(), st.sampled_from([1e9, 3e4]))
def test_plans_are_complete_feasible_and_repeatable(v: View, limit: float) -> None:
    policy = TitanPolicy(TitanConfig(waiting_limit_s=limit))
    plan = policy(v, 1e5)
    assert set(plan.decisions) == set(v.facts)
    taken: dict[str, int] = {}
    for decision in plan.decisions.values():
        if decision.verdict is Verdict.START:
            assert decision.configuration is not None
            assert v.facts[decision.job_id].permit.resize
            assert decision.configuration.placement == placement(decision.configuration.gpus)
            for name, share in zip(decision.nodes, decision.configuration.placement, strict=True):
                taken[name] = taken.get(name, 0) + share
    for node in v.snapshot.nodes:
        assert taken.get(node.name, 0) <= node.gpus_free
    mine = [d.rank for d in plan.decisions.values() if d.verdict is not Verdict.LEAVE]
    assert sorted(mine) == list(range(len(mine)))
    again = policy(v, 1e5)
    assert again.decisions == plan.decisions
    # Told its own plan, the policy keeps what it started. (Where seats were scarce the plan is not
    # the best one, and a second look may find one that is better by the margin.)
    kept = policy(replace(v, previous=plan), 1e5)
    if all(solve.optimal for solve in plan.solves):
        assert gpus_started(plan).items() <= gpus_started(kept).items()


def test_what_seats_left_over_is_given_out_again() -> None:
    # Eight GPUs are worth most on one job, which finds no whole nodes; then two jobs share them.
    known = {"1": facts(1, {8: 100.0}), "2": facts(2, {3: 900.0}), "3": facts(3, {3: 900.0})}
    plan = decide(view([job(1), job(2), job(3)], known, nodes(3, used=[1, 1, 2])))
    assert gpus_started(plan) == {"2": 3, "3": 3}

"""Jobs that Slurm never starts as they are: told, left out, or planned in another size."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control.barred import Foreseen, foresee_bar, why_barred
from slurm_ext.control.case import cases_of
from slurm_ext.control.rules import rules_from
from slurm_ext.control.spool import read_plan
from slurm_ext.control.unstarted import notice_barred
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.document import PlanDocument
from slurm_ext.domain.job import Job, JobState, Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.node import Limits, Partition
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.reasons import BARS
from slurm_ext.domain.snapshot import Snapshot
from tests.fakes.model import FakeJob
from tests.unit.control.bench import Bench
from tests.unit.control.test_decide import counts, plan
from tests.unit.control.test_permits import DIRECTIVE, JOB, permit

FIXED = Directive()
EIGHT = Shape(ShapeKind.RANK_PER_GPU, 8, 2, 8)
DATA = Path(__file__).parents[2] / "data" / "slurm"
RELEASES = ("24.11", "26.05")

# -- Slurm's names ---------------------------------------------------------------------------------


def slurms_names(release: str) -> set[str]:
    table = DATA / release / "job_state_reasons.txt"
    names = {line.split()[2] for line in table.read_text().splitlines()}
    assert len(names) > 200
    return names


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_one_of_slurms(release: str) -> None:
    assert set(BARS) - slurms_names(release) == set()


@pytest.mark.parametrize("release", RELEASES)
def test_every_limit_of_one_job_is_known_and_no_limit_that_others_free(release: str) -> None:
    of_one = re.compile(r"(QOS|Assoc)Max\w*Per(Job|Node)(Limit)?|QOSMin\w+|Partition\w+|Invalid\w+")
    passing = re.compile(r"\w*Grp\w+|\w*Per(User|Account)(Limit)?|\w*(Jobs?|Submit)\w*Limit")
    names = slurms_names(release)
    of_one_job = {name for name in names if of_one.fullmatch(name)}
    assert len(of_one_job) > 60
    assert of_one_job - set(BARS) == set()
    by_others = {n for n in names if passing.fullmatch(n) and "PerJob" not in n}
    assert len(by_others) > 80
    assert by_others & set(BARS) == set()


# -- what may be touched ---------------------------------------------------------------------------

ANY_SIZE = (
    *("PartitionTimeLimit", "PartitionDown", "PartitionInactive", "PartitionConfig"),
    *("BadConstraints", "AccountNotAllowed", "QOSNotAllowed", "InvalidAccount", "InvalidQOS"),
    *("QOSMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit"),
    *("QOSMaxLicensePerJob", "AssocMaxBBPerNode", "QOSMinLicense", "DependencyNeverSatisfied"),
)
BY_SIZE = (
    *("PartitionNodeLimit", "MaxMemPerLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob"),
    *("QOSMaxNodePerJobLimit", "QOSMaxMemoryPerJob", "AssocMaxMemPerJob", "QOSMaxBillingPerJob"),
    *("QOSMaxGRESPerNode", "AssocMaxCpuPerNode", "QOSMaxMemoryPerNode", "AssocMaxNodePerJobLimit"),
    *("QOSMaxCpuMinutesPerJobLimit", "AssocMaxGRESMinutesPerJob"),
    *("QOSMinCpuNotSatisfied", "QOSMinGRES", "QOSMinMemory", "QOSMinNode", "QOSMinBilling"),
)


@pytest.mark.parametrize("reason", [*ANY_SIZE, *BY_SIZE])
def test_a_job_of_fixed_size_is_left_out_and_told(reason: str) -> None:
    job = replace(JOB, reason=reason)
    found = permit(job, FIXED)
    assert (found.order, found.resize, found.lease, found.pin) == (False,) * 4
    assert "whatever becomes free" in found.reasons[0]
    assert f"(reason {reason} in partition main)" in found.reasons[0]
    # Slurm's next reason decides anew.
    assert permit(replace(job, reason="Resources"), FIXED).order


@pytest.mark.parametrize("reason", ANY_SIZE)
def test_what_no_size_mends_leaves_out_one_that_may_be_resized_too(reason: str) -> None:
    found = permit(replace(JOB, reason=reason), DIRECTIVE)
    assert (found.order, found.resize, found.lease, found.pin) == (False,) * 4
    assert f"(reason {reason} in partition main)" in found.reasons[0]


@pytest.mark.parametrize("reason", BY_SIZE)
def test_what_another_size_may_mend_does_not(reason: str) -> None:
    found = permit(replace(JOB, reason=reason), DIRECTIVE)
    assert found.order
    assert found.resize


@pytest.mark.parametrize(
    "reason",
    [
        *("", "None", "Priority", "Resources", "BeginTime", "Dependency", "ReqNodeNotAvail"),
        *("QOSMaxJobsPerUserLimit", "AssocGrpGRES", "QOSGrpCpuLimit", "QOSMaxGRESPerUser"),
        *("AssocMaxJobsLimit", "JobArrayTaskLimit", "Reservation", "Licenses", "MaxGRESPerAccount"),
        *("QOSUsageThreshold", "QOSTimeLimit", "Constraints", "MaxGRESRunMinsPerUser"),
    ],
)
def test_what_passes_by_itself_bars_nobody(reason: str) -> None:
    job = replace(JOB, reason=reason)
    assert job.bar is None
    assert job.competes
    assert why_barred(job) == ""


@pytest.mark.parametrize(
    ("change", "barred"),
    [
        ({"reason": "PartitionDown"}, True),
        # Slurm shows what it found in one partition; the job may start in the other.
        ({"reason": "PartitionDown", "partitions": ("main", "far")}, False),
        ({"reason": "QOSMaxGRESPerJob", "partitions": ("main", "far")}, False),
        ({"reason": "QOSMaxGRESPerJob", "qos": "normal,high"}, False),
        ({"reason": "InvalidAccount", "partitions": ("main", "far")}, True),
        ({"reason": "PartitionDown", "state": JobState.RUNNING}, False),
    ],
)
def test_of_several_partitions_or_qos_one_reason_tells_nothing(change, barred: bool) -> None:
    job = replace(JOB, **change)
    assert (job.bar is not None) is barred
    assert job.competes is not barred


def test_who_has_to_do_what() -> None:
    words = why_barred(replace(JOB, reason="PartitionTimeLimit"))
    assert "ask for less --time" in words
    assert "scontrol update JobId=7" in words
    assert "an administrator has to open it" in why_barred(replace(JOB, reason="PartitionDown"))
    assert "more than its QOS allows one job" in why_barred(replace(JOB, reason="QOSMaxGRESPerJob"))
    assert "less than its QOS asks of one job" in why_barred(replace(JOB, reason="QOSMinGRES"))
    lost = permit(replace(JOB, reason="DependencyNeverSatisfied", dependency="afterok:5(failed)"))
    assert "can never come to be" in lost.reasons[0]
    assert "another partition" not in lost.reasons[0]


# -- the plan --------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def only(job_id: str, reason: str, when: Callable[[FakeJob], bool] = lambda job: True):
    """Slurm's word about one job."""
    return lambda job: reason if str(job.raw_id) == job_id and when(job) else ""


def told(bench: Bench, job_id: str) -> PlanDocument:
    return read_plan(bench.config.spool, int(job_id))


def test_a_job_beside_it_gets_what_it_gets_alone(bench: Bench) -> None:
    """Growth is refused where it could delay others: this one cannot be delayed."""
    dead = bench.submit(4, auto=False, time_limit_s=3600.0)
    bench.slurm.bar = only(dead, "PartitionTimeLimit")
    bench.slurm.advance()
    live = bench.submit(4, auto=True, time_limit_s=1700.0)
    bench.cycles()
    assert told(bench, dead).decision.verdict is Verdict.LEAVE
    assert told(bench, live).decision.configuration.gpus == 16


def test_nor_does_one_that_may_be_resized_keep_gpus_which_no_size_would_let_it_use(
    bench: Bench,
) -> None:
    dead = bench.submit(8, nodes=2, auto=True)
    bench.slurm.bar = only(dead, "AccountNotAllowed")
    bench.cycles(4)
    assert told(bench, dead).decision.verdict is Verdict.LEAVE
    assert "AccountNotAllowed in partition main" in told(bench, dead).decision.reason
    live = bench.submit(4, auto=True)
    bench.cycles(4)
    assert bench.slurm.find(live).gpus == 16
    assert bench.slurm.find(live).state is JobState.RUNNING
    # Nothing of ours stays on it, so that Slurm goes on looking, and its next reason counts.
    assert bench.slurm.find(dead).begin_s <= bench.now
    assert bench.slurm.find(dead).gpus == 8
    bench.slurm.bar = lambda job: ""
    bench.slurm.cancel(live)
    bench.cycles(4)
    assert bench.slurm.find(dead).state is JobState.RUNNING


def above(most: int) -> Callable[[FakeJob], bool]:
    return lambda job: job.gpus > most


def test_a_job_barred_by_its_size_is_started_in_another(bench: Bench) -> None:
    """The limit is one that we cannot know (billing); 4 GPUs are the most that Slurm takes."""
    job = bench.submit(8, nodes=2, auto=True)
    bench.slurm.bar = only(job, "QOSMaxBillingPerJob", above(4))
    bench.cycles(12)
    found = bench.slurm.find(job)
    assert found.state is JobState.RUNNING, told(bench, job).decision
    assert found.gpus <= 4


def test_what_bars_the_submitted_size_is_remembered_under_a_lease(tmp_path: Path) -> None:
    """Slurm's reason is BeginTime then: it would be planned eight GPUs again and again."""
    bench = Bench(tmp_path, nodes=2)
    job = bench.submit(8, nodes=2, auto=True)
    bench.slurm.bar = only(job, "QOSMaxBillingPerJob", above(4))
    bench.cycles(1)
    assert told(bench, job).decision.configuration.gpus == 8
    bench.fill()
    bench.cycles(3)
    assert bench.slurm.find(job).reason == "BeginTime"
    document = told(bench, job)
    assert document.ours.barred == "QOSMaxBillingPerJob"
    assert [candidate.gpus for candidate in document.candidates] == [1, 2, 4]
    assert "more than its QOS allows one job" in document.refused["8"]


@pytest.mark.parametrize(
    ("now", "before", "kept"),
    [
        ({"reason": "QOSMaxGRESPerJob"}, {}, "QOSMaxGRESPerJob"),
        ({"reason": "Resources"}, {"barred": "QOSMaxGRESPerJob"}, ""),
        ({"reason": "BeginTime"}, {"barred": "QOSMaxGRESPerJob"}, "QOSMaxGRESPerJob"),
        ({"reason": ""}, {"barred": "QOSMaxGRESPerJob"}, "QOSMaxGRESPerJob"),
        ({"reason": "PartitionDown"}, {}, ""),  # told by itself, and no lease hides it
        ({"reason": "QOSMaxGRESPerJob", "eligible_s": 2e9}, {}, ""),
        # Of a size that was written: the old reason may be about the one before.
        ({"reason": "QOSMaxGRESPerJob"}, {"written": EIGHT}, "QOSMaxGRESPerJob"),
        (
            {"reason": "QOSMaxGRESPerJob"},
            {"written": EIGHT, "reason_before": "QOSMaxGRESPerJob"},
            "",
        ),
        ({"reason": "QOSMaxGRESPerJob", "gpus": 16, "ntasks": 16}, {}, ""),
        ({"reason": "QOSMaxGRESPerJob", "restarts": 1}, {}, ""),
    ],
)
def test_what_slurm_says_about_the_submitted_size(now, before, kept) -> None:
    job = replace(JOB, **{"gpus": 8, "ntasks": 8, "eligible_s": 1e9, **now})
    entry = replace(LedgerEntry("7", 1e9, submitted=EIGHT), **before)
    assert notice_barred(job, entry, 1.5e9).barred == kept


def test_a_requeue_forgets_it(bench: Bench) -> None:
    job = bench.submit(8, nodes=2, auto=True)
    bench.slurm.bar = only(job, "QOSMaxBillingPerJob", above(4))
    bench.cycles(12)
    assert bench.slurm.find(job).state is JobState.RUNNING
    bench.slurm.requeue(job)
    bench.slurm.bar = lambda job: ""
    bench.fill()
    bench.cycles(3)
    assert told(bench, job).ours.barred == ""


def test_limits_that_are_known_spare_slurm_the_first_try(bench: Bench) -> None:
    """Of a job that is leased from its submission on, Slurm says nothing yet."""
    bench.slurm.site_limits["qos:tight"] = Limits("qos tight", max_gpus_per_job=4)
    job = bench.submit(8, nodes=2, auto=True, qos="tight")
    bench.slurm.bar = only(job, "QOSMaxGRESPerJob", above(4))
    bench.cycles()
    document = told(bench, job)
    assert document.decision.verdict is Verdict.START
    assert document.decision.configuration.gpus == 4
    assert "left to Slurm: qos tight allows 4 GPUs per job" in document.refused["8"]


def test_a_time_limit_that_is_too_long_is_not_made_shorter(bench: Bench) -> None:
    """On 16 GPUs it would take less than the partition allows, and its owner asked for more."""
    bench.slurm.partitions["main"] = replace(bench.slurm.partitions["main"], max_time_s=1800.0)
    job = bench.submit(4, auto=True, time_limit_s=3600.0)
    bench.slurm.bar = only(job, "PartitionTimeLimit", lambda job: job.time_limit_s > 1800.0)
    bench.cycles(3)
    document = told(bench, job)
    assert document.decision.verdict is Verdict.LEAVE
    assert "PartitionTimeLimit" in document.decision.reason
    assert bench.slurm.find(job).time_limit_s == 3600.0
    assert (bench.slurm.find(job).gpus, bench.slurm.find(job).begin_s <= bench.now) == (4, True)


def test_where_every_size_is_barred_it_is_left_out_until_slurm_says_otherwise(
    bench: Bench,
) -> None:
    job = bench.submit(4, auto=True)
    bench.slurm.bar = only(job, "QOSMaxBillingPerJob")
    bench.cycles(20)
    document = told(bench, job)
    assert document.decision.verdict is Verdict.LEAVE
    assert "reason QOSMaxBillingPerJob" in document.decision.reason
    assert (bench.slurm.find(job).gpus, bench.slurm.find(job).begin_s <= bench.now) == (4, True)
    bench.slurm.bar = lambda job: ""
    bench.fill()
    bench.cycles(2)
    assert told(bench, job).decision.verdict is not Verdict.LEAVE
    assert told(bench, job).ours.barred == ""


def test_nor_is_it_planned_in_a_size_that_may_not_start_now(bench: Bench) -> None:
    """Any other size would be bigger or take longer, and could delay the job of others."""
    bench.slurm.find(bench.fill()).time_limit_s = 60.0
    bench.slurm.submit(gpus=16, nodes=4, base_priority=10**6)
    job = bench.submit(4, auto=True)
    bench.slurm.advance(6)
    decided = plan(bench, barred="QOSMaxBillingPerJob")
    assert counts(decided, job) == []
    assert decided.plan.decisions[job].verdict is Verdict.LEAVE
    assert "reason QOSMaxBillingPerJob" in decided.permits[job].reasons[0]
    # The same job, not barred, waits for its own size.
    assert counts(plan(bench), job) == [4]


def test_no_node_count_below_the_partitions_least_is_written(tmp_path: Path) -> None:
    """Without one Slurm makes it two nodes; with NumNodes=1 it would say PartitionNodeLimit."""
    bench = Bench(tmp_path, max_gpus_per_job=4)
    bench.slurm.partitions["main"] = replace(bench.slurm.partitions["main"], min_nodes=2)
    job = bench.submit(4, auto=True)
    bench.cycles(3)
    assert bench.slurm.find(job).state is JobState.RUNNING
    assert bench.slurm.find(job).gpus == 4
    written = [key for action in bench.slurm.writes for key, _ in action.fields]
    assert written
    assert "NumNodes" not in written


def test_the_time_limit_goes_on_following_from_the_size_that_is_barred(bench: Bench) -> None:
    """Else it would be cut as soon as the job carries another size."""
    job = bench.submit(8, nodes=2, auto=True)
    at_home = plan(bench, barred="QOSMaxBillingPerJob").at_submitted[job]
    bench.slurm.find(job).ntasks = 4
    carrying = plan(bench, barred="QOSMaxBillingPerJob")
    assert 4 in counts(carrying, job)
    assert 8 not in counts(carrying, job)
    assert carrying.at_submitted[job] == at_home


def test_nothing_of_an_earlier_attempt_bars_the_next(bench: Bench) -> None:
    job = replace(JOB, restarts=1)
    shape = Shape(ShapeKind.RANK_PER_GPU, 4, 1, 4)
    entry = LedgerEntry("7", 1e9, submitted=shape, barred="QOSMaxGRESPerJob")
    snapshot = Snapshot(0.0, (job,), ())
    (case,) = cases_of(
        Plan("titan", 0.0, {}), snapshot, {"7": entry}, {}, {}, rules_from(bench.config), 0.0
    )
    assert (case.entry.attempt, case.entry.barred) == (1, "")


# -- a job that Slurm has not seen yet -------------------------------------------------------------

SCRIPT = replace(JOB, time_limit_s=3600.0, nodes=2, gpus=8)
SHORT = Partition("main", max_time_s=1800.0)


def foreseen(
    *partitions: Partition, job: Job = SCRIPT, limits: dict[str, Limits] | None = None, **more: bool
) -> Foreseen | None:
    snapshot = Snapshot(0.0, (), (), partitions, limits=limits or {})
    known = {"enforced": True, "qos_known": True, **more}
    return foresee_bar(job, snapshot, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "job", "reason", "words"),
    [
        (
            SHORT,
            SCRIPT,
            "PartitionTimeLimit",
            "limit of 01:00:00 is above the 00:30:00 of partition main",
        ),
        (
            Partition("main", max_nodes=1),
            SCRIPT,
            "PartitionNodeLimit",
            "2 nodes, above the 1 of partition main",
        ),
        (
            Partition("main", min_nodes=3),
            replace(SCRIPT, max_nodes=2),
            "PartitionNodeLimit",
            "at most 2 nodes, below the 3 of partition main",
        ),
        (Partition("main", available=False), SCRIPT, "PartitionDown", "partition main is down"),
    ],
)
def test_what_a_partition_does_not_take(partition, job, reason, words) -> None:
    found = foreseen(partition, job=job)
    assert found is not None
    assert (found.reason, found.unless) == (reason, "")
    assert words in found.why
    # Of several partitions one is enough.
    wide = Partition("far", max_time_s=3600.0, max_nodes=2, min_nodes=2)
    assert foreseen(partition, wide, job=replace(job, partitions=("main", "far"))) is None
    # Of one that the snapshot lacks nothing is known.
    assert foreseen(partition, job=replace(job, partitions=("main", "gone"))) is None


def test_what_slurm_would_fill_in_bars_nothing() -> None:
    assert foreseen(SHORT, timed=False) is None
    assert foreseen(SHORT, job=replace(SCRIPT, time_limit_s=None)) is None
    # Without -N Slurm makes it as many nodes as it has to be.
    assert foreseen(Partition("main", min_nodes=3)) is None


def test_a_qos_may_let_it_pass() -> None:
    free = {"qos:normal": Limits("qos normal", waives=frozenset({"max_time_s"}))}
    assert foreseen(SHORT, limits=free) is None
    assert foreseen(Partition("main", max_nodes=1), limits=free) is not None
    unknown = foreseen(SHORT, qos_known=False)
    assert unknown is not None
    assert "its QOS" in unknown.unless


@pytest.mark.parametrize(
    ("key", "limits", "reason"),
    [
        ("qos:normal", Limits("qos normal", max_gpus_per_job=4), "QOSMaxGRESPerJob"),
        ("qos:normal", Limits("qos normal", max_nodes_per_job=1), "QOSMaxNodePerJobLimit"),
        ("qos:normal", Limits("qos normal", max_memory_mib_per_job=1), "QOSMaxMemoryPerJob"),
        ("qos:normal", Limits("qos normal", min_gpus_per_job=9), "QOSMinGRES"),
        ("qos:normal", Limits("qos normal", max_wall_s=600.0), "QOSMaxWallDurationPerJobLimit"),
        ("qos:normal", Limits("qos normal", max_gpu_minutes_per_job=9), "QOSMaxGRESMinutesPerJob"),
        ("assoc:lab", Limits("account lab", max_cpus_per_job=7), "AssocMaxCpuPerJobLimit"),
        ("assoc:lab", Limits("account lab", max_memory_mib_per_job=1), "AssocMaxMemPerJob"),
        (
            "assoc:lab",
            Limits("account lab", max_cpu_minutes_per_job=9),
            "AssocMaxCpuMinutesPerJobLimit",
        ),
    ],
)
def test_limits_of_one_job_are_foreseen_by_slurms_names(key, limits, reason) -> None:
    job = replace(SCRIPT, account="lab", cpus=8, memory_mib=4000)
    found = foreseen(Partition("main"), job=job, limits={key: limits})
    assert found is not None
    assert found.reason == reason
    assert all(reason in slurms_names(release) for release in RELEASES)
    assert replace(JOB, reason=reason).bar is not None
    assert foreseen(Partition("main"), job=job, limits={key: limits}, enforced=False) is None


def test_a_limit_that_may_be_meant_for_others_bars_nobody() -> None:
    loose = {"qos:normal": Limits("qos normal", max_gpus_per_job=4, max_wall_s=60.0, exact=False)}
    assert foreseen(Partition("main"), limits=loose) is None


def test_what_others_use_is_not() -> None:
    group = {"qos:normal": Limits("qos normal", grp_gpus=4, max_gpus_per_user=4)}
    assert foreseen(Partition("main"), limits=group) is None

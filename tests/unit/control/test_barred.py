"""Jobs that Slurm will not start as they are: left out of the plan, with the reason and the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control.barred import above_partition, barred
from slurm_ext.control.spool import read_plan
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.node import Partition
from tests.unit.control.bench import Bench
from tests.unit.control.test_permits import DIRECTIVE, JOB, permit

FIXED = Directive()


@pytest.mark.parametrize(
    "reason",
    [
        *("PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "BadConstraints"),
        *("AccountNotAllowed", "QOSNotAllowed", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob"),
        *("AssocMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMinGRESPerJob"),
        *("QOSMaxWallDurationPerJobLimit", "AssocMaxCpuMinutesPerJobLimit"),
    ],
)
def test_a_job_of_fixed_size_is_left_out_and_told(reason: str) -> None:
    job = replace(JOB, reason=reason)
    found = permit(job, FIXED)
    assert (found.order, found.resize, found.lease, found.pin) == (False,) * 4
    assert "whatever becomes free" in found.reasons[0]
    assert f"(reason {reason} in partition main)" in found.reasons[0]
    # Slurm's next reason decides anew.
    assert permit(replace(job, reason="Resources"), FIXED).order


@pytest.mark.parametrize(
    "reason",
    [
        *("", "None", "Priority", "Resources", "BeginTime", "Dependency", "ReqNodeNotAvail"),
        *("QOSMaxJobsPerUserLimit", "AssocGrpGRES", "QOSGrpCpuLimit", "QOSMaxGRESPerUser"),
        *("AssocMaxJobsLimit", "JobArrayTaskLimit", "Reservation", "Licenses", "MaxGRESPerAccount"),
    ],
)
def test_what_passes_by_itself_bars_nobody(reason: str) -> None:
    assert barred(replace(JOB, reason=reason)) == ""


def test_a_job_that_may_be_resized_is_given_a_size_that_fits() -> None:
    found = permit(replace(JOB, reason="PartitionTimeLimit"), DIRECTIVE)
    assert found.order
    assert found.resize


def test_who_has_to_do_what() -> None:
    words = barred(replace(JOB, reason="PartitionTimeLimit"))
    assert "ask for less --time" in words
    assert "scontrol update JobId=7" in words
    assert "an administrator has to open it" in barred(replace(JOB, reason="PartitionDown"))
    assert "more than its QOS allows one job" in barred(replace(JOB, reason="QOSMaxGRESPerJob"))


def test_a_request_above_the_partition_is_known_before_slurm_says_so() -> None:
    job = replace(JOB, time_limit_s=3600.0, nodes=2)
    short = Partition("main", max_time_s=1800.0)
    assert "01:00:00 is above the 00:30:00 of partition main" in above_partition(job, (short,))
    narrow = Partition("main", max_nodes=1)
    assert "2 nodes, above the 1 of partition main" in above_partition(job, (narrow,))
    wide = Partition("main", max_time_s=3600.0, max_nodes=2)
    assert above_partition(job, (wide, replace(short, name="other"))) == ""
    # One of several partitions is enough.
    both = replace(job, partitions=("main", "other"))
    assert above_partition(both, (short, replace(wide, name="other"))) == ""
    assert above_partition(replace(job, time_limit_s=None), (short,)) == ""


def test_a_job_beside_it_gets_what_it_gets_alone(tmp_path: Path) -> None:
    """Growth is refused where it could delay others: this one cannot be delayed."""
    bench = Bench(tmp_path, nodes=4)
    dead = bench.submit(4, auto=False, time_limit_s=3600.0)
    live = bench.submit(4, auto=True, time_limit_s=1700.0)
    seen = bench.slurm.snapshot

    def with_reason(*args, **kwargs):
        found = seen(*args, **kwargs)
        return replace(
            found,
            jobs=tuple(
                replace(job, reason="PartitionTimeLimit") if job.job_id == str(dead) else job
                for job in found.jobs
            ),
        )

    bench.slurm.snapshot = with_reason
    bench.engine.cycle()
    left, plan = read_plan(bench.config.spool, int(dead)), read_plan(bench.config.spool, int(live))
    assert left.decision.verdict.value == "leave"
    assert plan.decision.configuration.gpus == 16

"""Slurm's record as 24.11 prints it in the moments that matter."""

from __future__ import annotations

import time

import pytest

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.requeue.record import parse_record

# Recorded: preempted, within the partition's GraceTime.
IN_GRACE = (
    "JobId=1 JobName=job.sh UserId=alice(2001) GroupId=research(2000) MCS_label=N/A Priority=11100"
    " Nice=0 Account=vision QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1"
    " Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:02 TimeLimit=UNLIMITED TimeMin=N/A"
    " SubmitTime=2026-11-29T21:56:51 EligibleTime=2026-11-29T21:56:51"
    " AccrueTime=2026-11-29T21:56:51 StartTime=2026-11-29T21:56:52 EndTime=Unknown Deadline=N/A"
    " PreemptEligibleTime=2026-11-29T21:56:52 PreemptTime=2026-11-29T21:56:54 SuspendTime=None"
    " SecsPreSuspend=0 LastSchedEval=2026-11-29T21:56:52 Scheduler=Main Partition=preempt"
    " AllocNode:Sid=ctl:345 ReqNodeList=(null) ExcNodeList=(null) NodeList=n2 BatchHost=n2"
    " NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* OverSubscribe=OK"
    " Command=/home/alice/job.sh WorkDir=/home/alice StdErr=/home/alice/j-1.out StdIn=/dev/null"
    " StdOut=/home/alice/j-1.out TresPerNode=gres/gpu:4 \n"
)


def test_preempted_within_the_grace():
    found = parse_record(IN_GRACE, 1)
    assert (found.state, found.partition, found.restarts) == ("RUNNING", "preempt", 0)
    assert found.running
    assert found.preempted
    assert found.batch
    assert found.requeue
    assert found.end_s is None
    assert found.start_s == time.mktime((2026, 11, 29, 21, 56, 52, 0, 0, -1))


def test_a_preemption_of_an_earlier_attempt_does_not_count():
    later = IN_GRACE.replace("StartTime=2026-11-29T21:56:52", "StartTime=2026-11-29T22:30:00")
    assert not parse_record(later, 1).preempted


def test_the_time_limit_was_reached():
    line = (
        IN_GRACE.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit")
        .replace("TimeLimit=UNLIMITED", "TimeLimit=1-00:01:00")
        .replace("EndTime=Unknown", "EndTime=2026-11-29T21:58:08")
    )
    found = parse_record(line, 1)
    assert (found.running, found.reason) == (False, "TimeLimit")
    assert found.end_s == time.mktime((2026, 11, 29, 21, 58, 8, 0, 0, -1))


def test_a_requeued_job_has_batch_flag_2():
    assert parse_record(IN_GRACE.replace("BatchFlag=1", "BatchFlag=2"), 1).batch
    assert not parse_record(IN_GRACE.replace("BatchFlag=1", "BatchFlag=0"), 1).batch


def test_the_right_one_of_several_tasks():
    other = IN_GRACE.replace("JobId=1 ", "JobId=2 ArrayJobId=1 ArrayTaskId=1 ")
    assert parse_record(other + IN_GRACE, 1).job_id == 1
    assert parse_record(other + IN_GRACE, 2).job_id == 2


@pytest.mark.parametrize(
    "name", ["x JobState=CANCELLED y", "a b Requeue=0", "JobId=9 Reason=TimeLimit", "=", ""]
)
def test_no_name_can_look_like_fields(name: str):
    found = parse_record(IN_GRACE.replace("JobName=job.sh", f"JobName={name}"), 1)
    assert (found.state, found.requeue, found.reason) == ("RUNNING", True, "None")


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error", IN_GRACE.replace("JobId=1 ", "JobId=7 ")]
)
def test_a_missing_record_is_not_an_empty_one(text: str):
    with pytest.raises(ProtocolError):
        parse_record(text, 1)


@pytest.mark.parametrize("field", ["JobState", "BatchFlag", "Requeue"])
def test_a_record_without_a_field_that_decides_is_refused(field: str):
    with pytest.raises(ProtocolError, match=field):
        parse_record(IN_GRACE.replace(f" {field}=", f" X{field}="), 1)

"""The in-memory Slurm must have Slurm's manners, else the tests built on it prove nothing."""

from __future__ import annotations

import pytest

from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.domain.job import JobState, ShapeKind
from slurm_ext.slurm.backend import Backend
from tests.fakes.slurm import FakeSlurm, Fault


def write(slurm: FakeSlurm, job_id: str, **fields: str) -> bool:
    action = Action(ActionKind.SHAPE, job_id, tuple(fields.items()), "test")
    return slurm.apply([action])[0].ok


def test_it_is_a_backend() -> None:
    assert isinstance(FakeSlurm(), Backend)


def test_jobs_start_in_priority_order_and_end_after_their_duration() -> None:
    slurm = FakeSlurm(nodes=1)
    first = slurm.submit(gpus=4, run_s=100)
    second = slurm.submit(gpus=4, run_s=100)
    slurm.advance(0)
    assert slurm.find(first).state is JobState.RUNNING
    assert slurm.snapshot().nodes[0].gpus_free == 0
    slurm.advance(100)
    assert slurm.find(first).state is JobState.COMPLETED
    assert slurm.find(second).start_s == slurm.now


def test_a_site_factor_moves_a_job_ahead() -> None:
    slurm = FakeSlurm(nodes=1)
    slurm.submit(gpus=4, run_s=100)
    slurm.advance(0)
    second = slurm.submit(gpus=4, run_s=100)
    third = slurm.submit(gpus=4, run_s=100)
    assert write(slurm, third, SiteFactor="50")
    assert [j.job_id for j in slurm.snapshot().pending()] == [third, second]
    slurm.advance(100)
    assert slurm.find(third).state is JobState.RUNNING


def test_a_lease_keeps_a_job_back_and_expires_by_itself() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=1, run_s=1000)
    assert write(slurm, job, StartTime="now+300")
    row = slurm.jobs([job])[0]
    assert (row.eligible, row.reason, row.start_s) == (False, "BeginTime", slurm.now + 300)
    slurm.advance(299)
    assert slurm.find(job).state is JobState.PENDING
    slurm.advance(1)
    assert slurm.find(job).state is JobState.RUNNING


def test_backfill_never_delays_the_head() -> None:
    slurm = FakeSlurm(nodes=1)
    slurm.submit(gpus=2, run_s=100, time_limit_s=120)
    slurm.advance(0)
    head = slurm.submit(gpus=4, run_s=10)
    long = slurm.submit(gpus=2, run_s=50, time_limit_s=600)
    short = slurm.submit(gpus=2, run_s=50, time_limit_s=60)
    slurm.advance(1)
    assert slurm.find(short).state is JobState.RUNNING
    assert slurm.find(long).state is JobState.PENDING
    assert slurm.jobs([head])[0].start_s == pytest.approx(slurm.now + 119)


@pytest.mark.parametrize(
    ("kind", "fields", "gpus", "nodes", "ntasks"),
    [
        (ShapeKind.LAUNCHER_PER_NODE, {"NumNodes": "2", "TresPerNode": "gres/gpu:4"}, 8, 2, 1),
        (ShapeKind.RANK_PER_GPU, {"NumTasks": "8", "NumNodes": "2"}, 8, 2, 8),
        (ShapeKind.SINGLE_NODE, {"TresPerNode": "gres/gpu:2", "NumTasks": "2"}, 2, 1, 2),
    ],
)
def test_a_resize_under_a_lease_is_what_starts(
    kind: ShapeKind, fields: dict[str, str], gpus: int, nodes: int, ntasks: int
) -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=1, kind=kind)
    assert write(slurm, job, StartTime="now+300")
    assert write(slurm, job, **fields)
    assert write(slurm, job, StartTime="now")
    slurm.advance(0)
    row = slurm.jobs([job])[0]
    assert (row.state, row.gpus, row.nodes) == (JobState.RUNNING, gpus, nodes)
    assert row.ntasks == ntasks


def test_a_half_failing_resize_keeps_the_fields_before_the_failure() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=1)
    slurm.refuse("TresPerNode")
    assert not write(slurm, job, NumNodes="2", TresPerNode="gres/gpu:4")
    row = slurm.jobs([job])[0]
    assert (row.nodes, row.tres_per_node) == (2, "gres/gpu:1")


def test_a_size_written_to_a_running_job_shrinks_it_and_is_recorded() -> None:
    slurm = FakeSlurm(config={"SchedulerParameters": ""})
    job = slurm.submit(gpus=8, nodes=2)
    slurm.before_write = lambda fake, action: fake.start(action.job_id)
    assert write(slurm, job, NumNodes="1")
    assert slurm.shrunk == [job]
    assert slurm.late_size_writes == [(job, "NumNodes", "1")]
    assert slurm.snapshot().nodes[1].gpus_free == 4


def test_disable_job_shrink_refuses_it() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=8, nodes=2)
    slurm.advance(0)
    assert not write(slurm, job, NumNodes="1")
    assert slurm.shrunk == []


def test_an_array_splits_a_task_off_when_it_starts() -> None:
    slurm = FakeSlurm(nodes=1)
    job = slurm.submit(gpus=4, array=range(1, 4), run_s=10)
    assert job == "1_[1-3]"
    slurm.advance(0)
    assert [j.job_id for j in slurm.jobs()] == ["1_1", "1_[2-3]"]
    slurm.advance(10)
    assert [j.job_id for j in slurm.jobs()] == ["1_2", "1_[3]"]


def test_requeue_overwrites_the_submission_and_waits_121_seconds() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=1, run_s=1000)
    slurm.advance(50)
    slurm.requeue(job)
    row = slurm.jobs([job])[0]
    assert (row.restarts, row.submit_s, row.eligible) == (1, slurm.now, False)
    slurm.advance(120)
    assert slurm.find(job).state is JobState.PENDING
    slurm.advance(1)
    assert slurm.find(job).state is JobState.RUNNING


def test_a_person_s_hold_keeps_the_job_and_priority_is_zero() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=1)
    slurm.hold(job)
    slurm.advance(10)
    row = slurm.jobs([job])[0]
    assert (row.held, row.priority, row.reason, row.eligible) == (True, 0, "JobHeldUser", False)
    assert not write(slurm, job, Priority="500")


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.HANG, Fault.TRUNCATED])
def test_an_injected_fault_is_missing_never_empty_and_only_once(fault: Fault) -> None:
    slurm = FakeSlurm()
    slurm.inject("snapshot", fault)
    with pytest.raises(SourceMissingError):
        slurm.snapshot()
    assert slurm.snapshot().nodes


def test_an_apply_that_dies_half_way_has_written_half() -> None:
    slurm = FakeSlurm()
    ids = [slurm.submit(gpus=1) for _ in range(4)]
    slurm.inject("apply", Fault.HALF)
    actions = [Action(ActionKind.FACTOR, i, (("SiteFactor", "5"),), "") for i in ids]
    with pytest.raises(SlurmCommandError):
        slurm.apply(actions)
    assert [slurm.find(i).site_factor for i in ids] == [5, 5, 0, 0]


def test_a_drained_node_gets_no_work_and_a_dead_one_requeues_it() -> None:
    slurm = FakeSlurm(nodes=1)
    job = slurm.submit(gpus=4, run_s=1000)
    slurm.advance(1)
    slurm.set_node("n01", "DOWN")
    assert slurm.find(job).restarts == 1
    assert slurm.snapshot().nodes[0].gpus_free == 0
    slurm.advance(200)
    assert slurm.find(job).state is JobState.PENDING
    slurm.set_node("n01", "IDLE")
    slurm.advance(0)
    assert slurm.find(job).state is JobState.RUNNING


def test_tasks_without_their_cpus_wait_for_ever() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=8, kind=ShapeKind.RANK_PER_GPU, cpus_per_task=2)
    assert write(slurm, job, StartTime="now+300")
    assert write(slurm, job, NumTasks="4", NumNodes="1")
    assert write(slurm, job, StartTime="now")
    slurm.advance(100)
    row = slurm.jobs([job])[0]
    assert (row.state, row.reason) == (JobState.PENDING, "BadConstraints")
    assert write(slurm, job, NumCPUs="8", NumTasks="4")
    slurm.advance(1)
    assert slurm.find(job).state is JobState.RUNNING


def test_an_array_takes_neither_nodes_nor_a_pin() -> None:
    slurm = FakeSlurm()
    job = slurm.submit(gpus=4, array=range(1, 4))
    assert not write(slurm, job, NumNodes="2")
    assert not write(slurm, job, ReqNodeList="n01")
    assert write(slurm, job, TresPerNode="gres/gpu:2", TimeLimit="30")
    assert slurm.jobs([job])[0].gpus == 2


def test_changed_tasks_refuse_the_whole_update_of_a_running_job() -> None:
    slurm = FakeSlurm(config={"SchedulerParameters": ""})
    job = slurm.submit(gpus=8, nodes=2, kind=ShapeKind.RANK_PER_GPU)
    slurm.advance(0)
    assert not write(slurm, job, NumNodes="1", NumTasks="4")
    assert slurm.shrunk == []
    # Equal values are no guard: this one takes a node and the ranks on it.
    assert write(slurm, job, NumNodes="1", NumTasks="8")
    assert slurm.shrunk == [job]


def test_nodes_min() -> None:
    """Case nodes>min: a pin of more nodes than the job may have never starts; so does the fake."""
    slurm = FakeSlurm()
    job = slurm.submit(gpus=4, nodes=1)
    assert write(slurm, job, ReqNodeList="n01,n02")
    slurm.advance(100)
    assert slurm.find(job).state is JobState.PENDING
    assert write(slurm, job, ReqNodeList="n02")
    slurm.advance(1)
    assert slurm.jobs([job])[0].node_names == ("n02",)

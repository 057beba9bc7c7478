"""What every backend must do, written once and run against each of them.

``ReadContract`` needs a backend over any queue, a recorded one too. ``WriteContract`` needs a world
in which jobs can be submitted and time passes: the in-memory Slurm, or a real one. A test class
inherits from them and provides the fixtures ``backend`` and ``world``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol

from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.job import Job, JobState, ShapeKind
from slurm_ext.slurm.backend import Backend

_ID = re.compile(r"\d+(\+\d+|_\d+|_\[\d+(-\d+)?(,\d+(-\d+)?)*\])?", re.ASCII)
GONE = "4000000"


def action(job_id: str, *fields: tuple[str, str], kind: ActionKind = ActionKind.SHAPE) -> Action:
    return Action(kind, job_id, fields, "contract")


class World(Protocol):
    """A cluster of at least two nodes with four GPUs each, partition ``main``."""

    backend: Backend

    def submit(
        self,
        *,
        gpus: int,
        nodes: int = 1,
        kind: ShapeKind = ShapeKind.LAUNCHER_PER_NODE,
        admin_comment: str = "",
        array: range | None = None,
    ) -> str:
        """A job that runs for a minute; its id as squeue prints it."""

    def cancel(self, job_id: str) -> None: ...

    def hold(self, job_id: str) -> None: ...

    def let(self, condition: Callable[[], bool], what: str) -> None:
        """Let time pass until the condition holds."""


class ReadContract:
    """Reading, over whatever queue there is; at least one job must be there."""

    def test_every_row_is_consistent_in_itself(self, backend: Backend) -> None:
        snapshot = backend.snapshot()
        partitions = {p.name for p in snapshot.partitions}
        assert snapshot.jobs
        for job in snapshot.jobs:
            assert _ID.fullmatch(job.job_id), job
            assert job.job_id.startswith(str(job.base_id)), job
            assert job.array == ("_" in job.job_id)
            assert job.user
            assert job.partitions
            assert set(job.partitions) <= partitions
            assert job.gpus >= 0
            assert job.nodes >= 1
            assert job.ntasks >= 1
            assert job.submit_s > 0
            assert job.raw_id
            if job.pending:
                assert not job.node_names
                assert not (job.eligible and job.held)
                if job.eligible:
                    assert job.eligible_s is not None
                    assert job.eligible_s <= snapshot.taken_s
            if job.state is JobState.RUNNING:
                assert job.start_s is not None
                assert len(job.node_names) == job.nodes
                assert not job.eligible

    def test_ids_are_unique(self, backend: Backend) -> None:
        ids = [job.job_id for job in backend.snapshot().jobs]
        assert len(ids) == len(set(ids))

    def test_nodes_hold_what_running_jobs_hold(self, backend: Backend) -> None:
        snapshot = backend.snapshot()
        assert snapshot.nodes
        for node in snapshot.nodes:
            assert 0 <= node.gpus_alloc <= node.gpus
            assert node.gpus_free == (node.gpus - node.gpus_alloc if node.available else 0)
        held = sum(job.gpus for job in snapshot.running())
        assert held == sum(node.gpus_alloc for node in snapshot.nodes)

    def test_partitions_name_known_nodes(self, backend: Backend) -> None:
        snapshot = backend.snapshot()
        names = {node.name for node in snapshot.nodes}
        assert sum(p.default for p in snapshot.partitions) == 1
        for partition in snapshot.partitions:
            assert set(partition.node_names) <= names
            for node in snapshot.nodes:
                assert (partition.name in node.partitions) == (node.name in partition.node_names)

    def test_jobs_by_id_are_the_rows_of_the_snapshot(self, backend: Backend) -> None:
        jobs = {job.job_id: job for job in backend.snapshot().jobs}
        for job_id in list(jobs)[::5]:
            [row] = backend.jobs([job_id])
            assert row.job_id == job_id
            assert (row.gpus, row.nodes, row.user) == (
                jobs[job_id].gpus,
                jobs[job_id].nodes,
                jobs[job_id].user,
            )
        assert {job.job_id for job in backend.jobs()} == set(jobs)

    def test_squeue_gone_id(self, backend: Backend) -> None:
        """A purged id, alone or among others, is left out; it does not fail the call."""
        present = backend.snapshot().jobs[0].job_id
        assert backend.jobs([GONE]) == ()
        assert [job.job_id for job in backend.jobs([GONE, present])] == [present]
        assert backend.jobs([]) == ()
        assert backend.admin_comments([GONE]) == {}
        assert backend.admin_comments([]) == {}
        assert set(backend.admin_comments([GONE, present])) == {present}

    def test_writing_to_a_gone_job_is_an_answer_not_an_exception(self, backend: Backend) -> None:
        [result] = backend.apply([action(GONE, ("SiteFactor", "1"))])
        assert not result.ok
        assert "nvalid job id" in result.message
        assert backend.apply([]) == []

    def test_the_configuration_is_readable(self, backend: Backend) -> None:
        config = backend.slurm_config()
        assert config.release >= (21, 8)
        assert config.multifactor
        assert config.scheduler_type == "backfill"
        assert config.site_factor_plugin == ""
        assert "disable_job_shrink" in config.scheduler_parameters
        assert config.min_job_age_s > 0

    def test_we_are_an_operator(self, backend: Backend) -> None:
        assert backend.identity().operator


class WriteContract:
    """Writing: what the daemon relies on, on a real Slurm as in memory."""

    def test_a_site_factor_moves_a_job_ahead_and_is_read_back(self, world: World) -> None:
        fill(world)
        first, second = world.submit(gpus=8, nodes=2), world.submit(gpus=8, nodes=2)
        results = world.backend.apply(
            [action(second, ("SiteFactor", "500"), kind=ActionKind.FACTOR)]
        )
        assert [r.ok for r in results] == [True]
        rows = {job.job_id: job for job in world.backend.jobs()}
        assert rows[second].site_factor == 500
        assert rows[second].priority > rows[first].priority
        # Age makes equal jobs differ by a little.
        assert abs(rows[second].priority - 500 - rows[first].priority) < 20

    def test_a_result_for_each_action_in_their_order(self, world: World) -> None:
        job = world.submit(gpus=1)
        actions = [
            action(GONE, ("SiteFactor", "5")),
            action(job, ("SiteFactor", "7")),
            action(job, ("TresPerNode", "gres/nonsense:3")),
            action(job, ("SiteFactor", "9")),
            action(job, ("Comment", "two words")),
            action(job, ("NoSuchKeyword", "1")),
        ]
        results = world.backend.apply(actions)
        assert [r.action for r in results] == actions
        assert [r.ok for r in results] == [False, True, False, True, False, False]
        assert all(r.message for r in results if not r.ok)

    def test_a_lease_holds_the_job_and_lifting_it_lets_it_go(self, world: World) -> None:
        job = world.submit(gpus=1)
        lease(world, job)
        row = one(world, job)
        assert not row.eligible
        assert row.eligible_s is not None
        assert row.eligible_s > world.backend.snapshot().taken_s + 200
        assert not row.held
        # A factor is kept while the job is leased, and known then.
        world.backend.apply([action(job, ("SiteFactor", "3"))])
        assert one(world, job).site_factor == 3
        world.backend.apply([action(job, ("StartTime", "now"), kind=ActionKind.LIFT)])
        world.let(lambda: running(world, job), f"{job} running after its lease was lifted")

    def test_a_person_s_hold_is_seen_as_one(self, world: World) -> None:
        job = world.submit(gpus=1)
        lease(world, job)
        world.hold(job)
        row = one(world, job)
        assert (row.held_by_user, row.held, row.eligible, row.priority) == (True, True, False, 0)
        # Case hold-then-priority: a held job refuses it and stays held.
        [result] = world.backend.apply([action(job, ("Priority", "500"))])
        assert not result.ok
        assert one(world, job).held_by_user

    def test_an_operator_s_priority_is_seen_as_frozen(self, world: World) -> None:
        """Case freeze: after Priority= neither fairshare nor Nice matter any more."""
        fill(world)
        job = world.submit(gpus=8, nodes=2)
        assert not one(world, job).priority_set
        world.backend.apply([action(job, ("Priority", "777"))])
        row = one(world, job)
        assert (row.priority_set, row.priority) == (True, 777)

    def test_rank_per_gpu_is_resized(self, world: World) -> None:
        job = world.submit(gpus=1, kind=ShapeKind.RANK_PER_GPU)
        resize(world, job, ("NumTasks", "8"), ("NumNodes", "2"))
        row = one(world, job)
        assert (row.gpus, row.nodes, row.ntasks) == (8, 2, 8)
        start(world, job)
        row = one(world, job)
        assert (row.gpus, len(row.node_names)) == (8, 2)

    def test_launcher_per_node_is_resized(self, world: World) -> None:
        job = world.submit(gpus=8, nodes=2)
        resize(world, job, ("NumNodes", "1"), ("TresPerNode", "gres/gpu:2"))
        start(world, job)
        row = one(world, job)
        assert (row.gpus, row.nodes, len(row.node_names)) == (2, 1, 1)
        assert sum(node.gpus_alloc for node in world.backend.snapshot().nodes) == 2

    def test_single_node_is_resized(self, world: World) -> None:
        job = world.submit(gpus=4, kind=ShapeKind.SINGLE_NODE)
        resize(world, job, ("TresPerNode", "gres/gpu:2"), ("NumTasks", "2"))
        start(world, job)
        row = one(world, job)
        assert (row.gpus, row.nodes, row.ntasks) == (2, 1, 2)

    def test_a_pin_places_the_job(self, world: World) -> None:
        job = world.submit(gpus=1)
        last = world.backend.snapshot().nodes[-1].name
        resize(world, job, ("ReqNodeList", last))
        assert one(world, job).req_nodes == (last,)
        start(world, job)
        assert one(world, job).node_names == (last,)

    def test_a_pin_is_taken_back(self, world: World) -> None:
        job = world.submit(gpus=1)
        last = world.backend.snapshot().nodes[-1].name
        resize(world, job, ("ReqNodeList", last))
        [result] = world.backend.apply([action(job, ("ReqNodeList", ""))])
        assert result.ok
        assert one(world, job).req_nodes == ()

    def test_a_running_job_is_never_shrunk(self, world: World) -> None:
        """With disable_job_shrink, which `slurm-ext check` asks for."""
        job = world.submit(gpus=8, nodes=2)
        start(world, job)
        for fields in ([("NumNodes", "1")], [("TresPerNode", "gres/gpu:1")]):
            [result] = world.backend.apply([action(job, *fields)])
            assert not result.ok
        row = one(world, job)
        assert (row.gpus, row.nodes) == (8, 2)

    def test_a_finished_job_leaves_the_snapshot(self, world: World) -> None:
        job = world.submit(gpus=1)
        start(world, job)
        world.cancel(job)
        world.let(
            lambda: not world.backend.jobs([job]) and world.backend.snapshot().job(job) is None,
            f"{job} gone",
        )

    def test_the_pending_rest_of_an_array_is_one_row(self, world: World) -> None:
        fill(world)
        job = world.submit(gpus=4, array=range(1, 6, 2))
        [row] = [j for j in world.backend.jobs() if j.array]
        assert row.job_id == job == f"{row.base_id}_[1,3,5]"
        assert (row.array_tasks, row.gpus) == (3, 4)
        [result] = world.backend.apply([action(job, ("SiteFactor", "11"))])
        assert result.ok, result.message
        [row] = [j for j in world.backend.jobs() if j.array]
        assert (row.job_id, row.site_factor) == (job, 11)

    def test_forged_rows_stay_text(self, world: World) -> None:
        text = 'x\n7|PENDING|root\x1f7\x1fPENDING\x1fend\n{"v":1} "quoted" \\ end'
        job = world.submit(gpus=1, admin_comment=text)
        other = world.submit(gpus=1)
        before = {j.job_id for j in world.backend.jobs()}
        assert before == {job, other}
        assert world.backend.admin_comments([job, other]) == {job: text, other: ""}


def one(world: World, job_id: str) -> Job:
    [row] = world.backend.jobs([job_id])
    return row


def running(world: World, job_id: str) -> bool:
    return any(j.state is JobState.RUNNING for j in world.backend.jobs([job_id]))


def fill(world: World) -> None:
    """Occupy every GPU, so that what is submitted next stays pending."""
    nodes = world.backend.snapshot().nodes
    job = world.submit(gpus=sum(n.gpus for n in nodes), nodes=len(nodes))
    start(world, job)


def lease(world: World, job_id: str) -> None:
    deadline = int(world.backend.snapshot().taken_s) + 300
    [result] = world.backend.apply(
        [action(job_id, ("StartTime", f"uts{deadline}"), kind=ActionKind.LEASE)]
    )
    assert result.ok, result.message


def resize(world: World, job_id: str, *fields: tuple[str, str]) -> None:
    lease(world, job_id)
    [result] = world.backend.apply([action(job_id, *fields)])
    assert result.ok, result.message


def start(world: World, job_id: str) -> None:
    world.backend.apply([action(job_id, ("StartTime", "now"), kind=ActionKind.LIFT)])
    world.let(lambda: running(world, job_id), f"{job_id} running")


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """For real time: poll, with a limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.1)

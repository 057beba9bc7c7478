"""The backend's contract on a real Slurm, and the facts about Slurm that the parsers build on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ci.cluster import ADMIN, Cluster
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.domain.job import ShapeKind
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.json_documents import jobs_from_json
from tests.cluster.runner import ClusterRunner
from tests.fakes.contract import (
    ReadContract,
    WriteContract,
    action,
    fill,
    lease,
    one,
    start,
    wait_until,
)

SCRIPT = "#!/bin/bash\nsleep 300\n"
_ASK: dict[ShapeKind, Callable[[int, int], list[str]]] = {
    ShapeKind.RANK_PER_GPU: lambda gpus, _n: [f"-n{gpus}", "--gpus-per-task=1"],
    ShapeKind.LAUNCHER_PER_NODE: lambda gpus, n: [
        f"-N{n}",
        "--ntasks-per-node=1",
        f"--gres=gpu:{gpus // n}",
    ],
    ShapeKind.SINGLE_NODE: lambda gpus, _n: ["-N1", f"-n{gpus}", f"--gres=gpu:{gpus}"],
}


@dataclass
class LiveWorld:
    cluster: Cluster
    backend: CliBackend

    def submit(
        self,
        *,
        gpus: int,
        nodes: int = 1,
        kind: ShapeKind = ShapeKind.LAUNCHER_PER_NODE,
        admin_comment: str = "",
        array: range | None = None,
    ) -> str:
        # Submitted held and let go at the end: a job must not start before the test has used it.
        options = [*_ask(kind, gpus, nodes), "-t", "30", "--begin=now+1hour"]
        if array is not None:
            options.append(f"--array={array.start}-{array.stop - 1}:{array.step}%2")
        raw = self.cluster.sbatch(SCRIPT, *options)
        if admin_comment:
            self.cluster.exec(
                ["scontrol", "update", f"JobId={raw}", f"AdminComment={admin_comment}"],
                user=ADMIN,
            )
        job_id = next(j.job_id for j in self.backend.jobs() if j.raw_id == raw)
        if self._full():
            self.backend.apply([action(job_id, ("StartTime", "now"))])
        return job_id

    def _full(self) -> bool:
        return all(node.gpus_free == 0 for node in self.backend.snapshot().nodes)

    def cancel(self, job_id: str) -> None:
        self.cluster.exec(["scancel", job_id])

    def hold(self, job_id: str) -> None:
        self.cluster.exec(["scontrol", "uhold", job_id], user="alice")

    def let(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, what)


def _ask(kind: ShapeKind, gpus: int, nodes: int) -> list[str]:
    return _ASK[kind](gpus, nodes)


@pytest.fixture
def world(cluster: Cluster) -> Iterator[LiveWorld]:
    backend = CliBackend(ClusterRunner(cluster))
    yield LiveWorld(cluster, backend)
    backend.close()


class TestLiveCommands(WriteContract):
    """Writing, each case with an empty queue."""


def test_the_reading_contract_over_every_kind_of_row(world: LiveWorld) -> None:
    cluster = world.cluster
    start(world, world.submit(gpus=8, nodes=2))
    start(world, world.submit(gpus=4, kind=ShapeKind.RANK_PER_GPU))
    world.submit(gpus=4, array=range(1, 10, 2))
    cluster.sbatch(SCRIPT, "--gpus=3", "-t", "1-0", "-H")
    cluster.sbatch(SCRIPT, "-p", "main,high", "--gres=gpu:v100:4", "--exclusive")
    first = cluster.sbatch(SCRIPT, "--gpus-per-node=2", "--begin=now+1hour")
    cluster.sbatch(SCRIPT, "--gres=gpu:1", "-d", f"afterok:{first}", "-N2-3")
    het = ["-N1", "--gpus=1", ":", "-N1", "--gpus=1", "--wrap=sleep 60"]
    cluster.exec(["sbatch", *het], user="bob", cwd="/home/bob")
    names = ["-J", "a\nb|\x1fc", "--comment=x\n9|y", "--gres=gpu:1", "--wrap=sleep 60"]
    cluster.exec(["sbatch", *names], user="carol", cwd="/home/carol")
    # Nothing may start between two calls of one check, which would then compare two moments.
    wait_until(lambda: _settled(world.backend), "no further job starts")
    checks = [name for name in dir(ReadContract) if name.startswith("test_")]
    assert len(checks) >= 9
    for name in checks:
        getattr(ReadContract(), name)(world.backend)


def _settled(backend: CliBackend) -> bool:
    """Whether every pending job has been looked at since the last start, and none can start."""
    snapshot = backend.snapshot()
    told = {"Resources", "Priority", "Dependency", "BeginTime", "JobHeldUser"}
    waiting = [job for job in snapshot.pending() if job.eligible]
    return all(job.reason in told or job.reason.startswith("Nodes required") for job in waiting)


def test_text_and_json_tell_the_same(world: LiveWorld) -> None:
    """The narrow columns and the JSON of the same release must give equal jobs."""
    fill(world)
    for kind, gpus in ((ShapeKind.RANK_PER_GPU, 8), (ShapeKind.SINGLE_NODE, 4)):
        lease(world, world.submit(gpus=gpus, kind=kind))
    lease(world, world.submit(gpus=4, array=range(0, 20, 3)))
    text = {job.job_id: job for job in world.backend.jobs()}
    array = next(name for name in text if "[" in name)
    [detailed] = world.backend.details([array])
    assert (detailed.job_id, detailed.array_tasks) == (array, 7)
    # 24.11 has no later one; 26.05 has these, and one that does not tell who wants whole nodes.
    old = world.backend.slurm_config().release == (24, 11)
    for parser in ("v0.0.42", "v0.0.40") if old else ("v0.0.42", "v0.0.43", "v0.0.44"):
        answer = world.cluster.exec(["squeue", f"--json={parser}"]).stdout
        for job in jobs_from_json(answer):
            ours = text[job.job_id]
            for name in (
                *("base_id", "raw_id", "user", "uid", "account", "partitions", "qos", "state"),
                *("gpus", "nodes", "ntasks", "cpus", "memory_mib", "tres_per_job", "array_tasks"),
                *("tres_per_node", "tres_per_task", "submit_s", "eligible_s", "time_limit_s"),
                *("node_names", "exclusive", "held_by_user", "held_by_admin", "gpu_type", "nice"),
            ):
                assert getattr(job, name) == getattr(ours, name), (parser, job.job_id, name)


def test_tasks_that_were_touched_by_themselves_are_jobs_of_their_own(world: LiveWorld) -> None:
    """squeue shows all pending tasks of an array in one row, sprio ranks each record.

    A snapshot with that row hid the held task, and was refused while another had a rank of its own.
    """
    begin = "--begin=now+1hour"
    raw = world.cluster.sbatch(SCRIPT, "--array=0-30:3%2", "--gres=gpu:1", begin)
    world.cluster.exec(["scontrol", "uhold", f"{raw}_0"], user="alice")
    world.backend.apply([action(f"{raw}_3", ("SiteFactor", "7"))])
    last = world.cluster.sbatch(SCRIPT, "--array=4", "--gres=gpu:1", begin)
    rest = f"{raw}_[6,9,12,15,18,21,24,27,30]"
    jobs = {job.job_id: job for job in world.backend.snapshot().jobs}
    assert set(jobs) == {f"{raw}_0", f"{raw}_3", rest, f"{last}_4"}
    assert (jobs[f"{raw}_0"].held_by_user, jobs[rest].held_by_user) == (True, False)
    assert (jobs[f"{raw}_3"].site_factor, jobs[rest].array_tasks) == (7, 9)
    assert world.backend.admin_comments([rest, f"{raw}_3"]).keys() == {rest, f"{raw}_3"}
    # Exactly these tasks: the record stays one, and its neighbours as they are.
    written = (("SiteFactor", "5"), ("StartTime", "now+1800"), ("NumTasks", "2"))
    assert all(result.ok for result in world.backend.apply([action(rest, f) for f in written]))
    assert world.backend.apply([action(f"{last}_4", ("SiteFactor", "3"))])[0].ok
    after = {job.job_id: job for job in world.backend.snapshot().jobs}
    assert set(after) == set(jobs)
    assert (after[rest].site_factor, after[rest].ntasks, after[rest].raw_id) == (5, 2, raw)
    assert after[f"{raw}_3"].eligible_s == jobs[f"{raw}_3"].eligible_s != after[rest].eligible_s
    assert {job.job_id for job in world.backend.details([rest, f"{raw}_0", f"{last}_4"])} == {
        *(rest, f"{raw}_0", f"{last}_4")
    }


def test_gpus_are_seen_where_the_site_does_not_track_them(
    make_cluster: Callable[..., Cluster],
) -> None:
    """Case gpus-not-in-%b, the whole kind: without AccountingStorageTRES no TRES names GPUs."""
    own = make_cluster(nodes=2, slurm_conf={"AccountingStorageTRES": None})
    backend = CliBackend(ClusterRunner(own))
    for options in (
        ["--gpus=4", "-N1"],
        ["-N1", "--gpus-per-node=2"],
        ["-n2", "--gpus-per-task=1"],
    ):
        own.sbatch(SCRIPT, *options)
    wait_until(lambda: sum(1 for _ in backend.snapshot().running()) == 3, "three jobs running")
    snapshot = backend.snapshot()
    assert sorted(job.gpus for job in snapshot.running()) == [2, 2, 4]
    assert sum(node.gpus_free for node in snapshot.nodes) == 0
    assert {node.gpu_type for node in snapshot.nodes} == {"v100"}
    backend.close()


def test_drained_down_and_reserved_nodes_have_no_free_gpus(world: LiveWorld) -> None:
    cluster = world.cluster
    cluster.exec(["scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=bad State=IDLE"])
    flags = ["StartTime=now", "Duration=60", "Users=root", "Nodes=n2", "Flags=MAINT"]
    cluster.exec(["scontrol", "create", "reservation", "ReservationName=m", *flags])
    # The nodes' flags follow a new reservation only with the next pass of the scheduler.
    free = {"n1": 0, "n2": 0, "n3": 4, "n4": 4}
    wait_until(
        lambda: {n.name: n.gpus_free for n in world.backend.snapshot().nodes} == free,
        "two nodes without free GPUs",
    )
    snapshot = world.backend.snapshot()
    assert snapshot.nodes[0].reason == "bad State=IDLE"
    assert [(r.name, r.node_names) for r in snapshot.reservations] == [("m", ("n2",))]


def test_an_unreachable_controller_is_an_error_not_an_empty_queue(world: LiveWorld) -> None:
    job = world.submit(gpus=1)
    # Slurm's commands try again for longer than a cycle may last: the time limit decides.
    impatient = CliBackend(ClusterRunner(world.cluster, timeout_s=2))
    world.cluster.stop_slurmctld()
    try:
        with pytest.raises(SlurmCommandError):
            impatient.snapshot()
        with pytest.raises(SlurmCommandError):
            impatient.apply([action(job, ("SiteFactor", "1"))])
    finally:
        impatient.close()
        world.cluster.start_slurmctld()
        world.cluster.await_ready()
    assert one(world, job).job_id == job


def test_five_hundred_updates_go_through_one_process(world: LiveWorld) -> None:
    raw = world.cluster.sbatch(SCRIPT, "--array=1-500", "--begin=now+1hour", "--gres=gpu:1")
    actions = [action(f"{raw}_{i}", ("SiteFactor", str(i))) for i in range(1, 501)]
    actions.insert(250, action("4000000", ("SiteFactor", "1")))
    calls: list[str] = []
    run = world.backend.runner.run

    def counted(argv, **options):  # type: ignore[no-untyped-def]
        calls.append(argv[0])
        return run(argv, **options)

    world.backend.runner.run = counted  # type: ignore[method-assign]
    results = world.backend.apply(actions)
    assert calls == ["scontrol"]
    assert [r.ok for r in results] == [i != 250 for i in range(501)]
    factors = {j.job_id: j.site_factor for j in world.backend.jobs()}
    assert factors == {f"{raw}_{i}": i for i in range(1, 501)}


def test_limits_and_the_switch_tree(make_cluster: Callable[..., Cluster]) -> None:
    own = make_cluster(
        nodes=4,
        limits=True,
        slurm_conf={"TopologyPlugin": "topology/tree"},
        etc_slurm={
            "topology.conf": "SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\n"
            "SwitchName=top Switches=s[1-2]\n"
        },
    )
    backend = CliBackend(ClusterRunner(own))
    small = backend.limits()["qos:small"]
    assert (small.max_gpus_per_job, small.max_nodes_per_job, small.grp_gpus) == (4, 2, 8)
    assert small.max_wall_s == 86400
    topology = backend.topology()
    assert topology.leaf_of == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    assert topology.parent_of == {"s1": "top", "s2": "top"}
    config = backend.slurm_config()
    assert config.enforces_limits
    assert config.accrues_always
    assert config.get("TopologyPlugin") == "topology/tree"
    assert backend.rpc_stats().by_type["REQUEST_BUILD_INFO"].count >= 1
    # Whoever has no rights is told so.
    user = CliBackend(ClusterRunner(own, user="alice"))
    assert not user.identity().operator
    raw = own.sbatch(SCRIPT, "-H", user="bob")
    [result] = user.apply([action(str(raw), ("SiteFactor", "1"))])
    assert not result.ok
    assert "Invalid user id" in result.message
    backend.close()
    user.close()

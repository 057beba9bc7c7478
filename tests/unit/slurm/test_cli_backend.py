"""The command-line adapter over recorded answers: what it reads, and what it refuses to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.domain.job import JobState
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import Answer, CommandRunner
from tests.fakes.commands import FakeCommands

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"
NOW = 1795979420.0


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    fake = FakeCommands(tmp_path, DATA / "24.11")
    monkeypatch.setenv("PATH", fake.path())
    return fake


@pytest.fixture
def backend(commands: FakeCommands) -> Iterator[CliBackend]:
    made = CliBackend(CommandRunner(timeout_s=3), clock=lambda: NOW)
    yield made
    made.close()


def test_the_recorded_queue(backend: CliBackend) -> None:
    jobs = {job.job_id: job for job in backend.snapshot().jobs}
    assert len(jobs) == 18
    running = jobs["1"]
    assert (running.state, running.gpus, running.nodes) == (JobState.RUNNING, 12, 3)
    assert running.node_names == ("n1", "n2", "n3")
    assert (running.req_nodes, running.exc_nodes, running.nice) == (("n1",), ("n4",), 5)
    assert running.partitions == ("high",)
    rank_per_gpu = jobs["14"]
    assert (rank_per_gpu.gpus, rank_per_gpu.ntasks, rank_per_gpu.cpus) == (8, 8, 16)
    assert rank_per_gpu.tres_per_task == "cpu=2,gres/gpu=1"
    # squeue's own column says 2 here, the scheduler's estimate; the job asked for at least 1.
    assert rank_per_gpu.nodes == 1
    assert rank_per_gpu.memory_mib == 16 * 1024
    assert jobs["15"].partitions == ("high", "main")
    assert jobs["15"].partition == ""
    assert jobs["7"].exclusive
    assert not jobs["5"].exclusive
    assert not jobs["17"].batch
    assert jobs["6"].gpu_type == "v100"
    assert jobs["12+1"].het_job_id == 12
    assert jobs["12+1"].base_id == 12
    assert jobs["12+1"].raw_id == 13
    assert jobs["8_[1,3,5,7,9]"].array_tasks == 5
    assert jobs["11"].dependency == "afterok:3(unfulfilled)"
    assert jobs["4"].time_limit_s == 86400
    assert jobs["7"].time_limit_s == 2 * 86400


def test_the_recorded_queue_of_26_05(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", FakeCommands(tmp_path, DATA / "26.05").path())
    backend = CliBackend(CommandRunner(timeout_s=3), clock=lambda: 1796027813.0)
    snapshot = backend.snapshot()
    jobs = {job.job_id: job for job in snapshot.jobs}
    assert {name for name, job in jobs.items() if job.exclusive} == {"47", "48"}
    # A task that was changed or held by itself, and the rest that share a record.
    assert {name: jobs[name].raw_id for name in jobs if name.startswith("50_")} == {
        "50_[1,3,7,11,13,15]": 50,
        "50_5": 51,
        "50_9": 52,
    }
    assert (jobs["50_5"].site_factor, jobs["50_9"].held_by_user) == (7, True)
    assert not jobs["50_[1,3,7,11,13,15]"].held
    # The last task of an array has the array's own number; one task alone has it from the start.
    assert (jobs["53_2"].raw_id, jobs["53_2"].site_factor, jobs["53_1"].site_factor) == (53, 4, 3)
    assert jobs["55_4"].raw_id == 55
    assert jobs["58"].partitions == ("high", "main")
    assert [(node.name, node.available) for node in snapshot.nodes] == [
        *(("n1", True), ("n2", True), ("n3", True), ("n4", False)),
    ]
    assert backend.slurm_config().release == (26, 5)
    monkeypatch.setenv("FAKE_DATA_PARSERS", "v0.0.44")
    (task,) = backend.details(["53_2"])
    assert task.raw_id == 53
    backend.close()


def test_order_and_holds_of_the_recorded_queue(backend: CliBackend) -> None:
    jobs = {job.job_id: job for job in backend.snapshot().jobs}
    assert (jobs["3"].site_factor, jobs["5"].site_factor) == (50, -20)
    assert jobs["4"].priority_set
    assert jobs["4"].priority == 500
    assert not any(job.priority_set for name, job in jobs.items() if name != "4")
    assert jobs["10"].held_by_user
    assert [name for name, job in jobs.items() if job.held] == ["10"]
    not_eligible = {name for name, job in jobs.items() if job.pending and not job.eligible}
    # A lease (6), the user's own --begin (9), a hold (10), a dependency (11).
    assert not_eligible == {"6", "9", "10", "11"}


def test_a_lease_ends_by_the_clock_though_its_row_does_not_change(
    commands: FakeCommands,
) -> None:
    now = [NOW]
    backend = CliBackend(clock=lambda: now[0])
    row = next(job for job in backend.jobs() if job.job_id == "6")
    assert not row.eligible
    assert row.eligible_s is not None
    now[0] = row.eligible_s
    assert next(job for job in backend.jobs() if job.job_id == "6").eligible
    backend.close()


def test_the_recorded_nodes(backend: CliBackend) -> None:
    snapshot = backend.snapshot()
    nodes = {node.name: node for node in snapshot.nodes}
    assert [n.gpus for n in snapshot.nodes] == [4, 4, 4, 4]
    assert {n.gpu_type for n in snapshot.nodes} == {"v100"}
    assert {name for name, node in nodes.items() if node.available} == {"n1", "n2"}
    assert nodes["n3"].state == "MIXED+DRAIN"
    assert nodes["n3"].reason == "bad gpu State=IDLE x"
    assert "MAINTENANCE" in nodes["n4"].state
    assert nodes["n1"].partitions == {"preempt", "main", "high"}
    assert {r.name: r.node_names for r in snapshot.reservations} == {
        "r1": ("n3",),
        "maint": ("n4",),
    }
    main = next(p for p in snapshot.partitions if p.name == "main")
    assert (main.default, main.priority_tier, main.max_time_s, main.max_nodes) == (
        True,
        2,
        None,
        None,
    )
    assert main.node_names == ("n1", "n2", "n3", "n4")


def test_comments_are_handed_on_unread(backend: CliBackend) -> None:
    found = backend.admin_comments(["3", "5", "7", "8_[1,3,5,7,9]"])
    assert found["3"] == '{"ft":1}'
    assert found["5"] == 'x\n5\x1f{"forged":1}\x1f@MARX@\n7|\ufffd\ufffd" \x1f'
    assert found["7"] == found["8_[1,3,5,7,9]"] == ""
    assert backend.user_comments(["1", "16"]) == {"1": "a\nb|c", "16": "x\n9|y"}


def test_limits(backend: CliBackend) -> None:
    limits = backend.limits()
    small = limits["qos:small"]
    assert (small.max_gpus_per_job, small.max_nodes_per_job, small.grp_gpus) == (4, 2, 8)
    assert small.max_wall_s == 86400
    high = limits["qos:high"]
    assert (high.max_gpus_per_user, high.max_nodes_per_user, high.min_gpus_per_job) == (12, 4, 2)
    vision = limits["assoc:vision"]
    assert (vision.grp_gpus, vision.grp_nodes, vision.max_gpus_per_job) == (24, 6, 16)
    assert limits["assoc:vision:bob"].max_gpus_per_job == 16
    # A limit on one type binds: which type a job will get is not known for every job.
    assert limits["assoc:vision:alice"].max_gpus_per_job == 8
    assert limits["assoc:vision:alice"].max_wall_s == 2 * 86400
    assert limits["qos:normal"].max_gpus_per_job is None


def test_the_rest_of_what_slurm_says_about_itself(backend: CliBackend) -> None:
    config = backend.slurm_config()
    assert (config.version, config.release, config.cluster) == ("24.11.5", (24, 11), "ft")
    assert config.preempt_mode == {"requeue"}
    assert "send_user_signal" in config.preempt_parameters
    assert config.scheduler_parameters["bf_interval"] == "5"
    assert config.accounting_enforce == {"associations", "limits", "qos"}
    assert config.enforces_limits
    assert config.accrues_always
    assert config.job_submit_plugins == frozenset()
    assert config.get("TopologyPlugin") == "topology/tree"
    stats = backend.rpc_stats()
    assert stats.by_type["REQUEST_JOB_INFO"].count > 0
    assert stats.total_us > 0
    assert stats.by_user["root"].total_us > 0
    assert stats.jobs_running == 2
    assert backend.topology().leaf_of == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    assert backend.topology().parent_of == {"s1": "root", "s2": "root"}
    identity = backend.identity()
    assert (identity.user, identity.admin_level, identity.operator) == (
        "slurm-ext",
        "Operator",
        True,
    )


@pytest.mark.parametrize("command", ["squeue", "sprio", "scontrol"])
@pytest.mark.parametrize("fault", ["fail", "cut", "signal"])
def test_a_failed_or_cut_answer_is_missing_never_empty(
    backend: CliBackend, commands: FakeCommands, command: str, fault: str
) -> None:
    commands.set_faults(**{command: fault})
    with pytest.raises(SourceMissingError) as caught:
        backend.snapshot()
    assert command in str(caught.value)
    # And it does not stick: the next whole answer is taken.
    commands.set_faults()
    assert len(backend.snapshot().jobs) == 18


def test_a_queue_that_ends_between_two_rows_is_noticed_at_the_first_look(
    backend: CliBackend, commands: FakeCommands
) -> None:
    commands.set_faults(squeue="short")
    with pytest.raises(SourceMissingError, match="cut off"):
        backend.snapshot()


def test_priorities_that_end_between_two_rows_are_noticed(
    backend: CliBackend, commands: FakeCommands
) -> None:
    commands.set_faults(sprio="short")
    with pytest.raises(SourceMissingError, match="beyond its last row"):
        backend.snapshot()


def test_nodes_that_end_between_two_lines_are_noticed(
    backend: CliBackend, commands: FakeCommands
) -> None:
    commands.set_faults(scontrol="short")
    with pytest.raises(SourceMissingError, match="version"):
        backend.snapshot()


@pytest.mark.parametrize("fault", ["hang", "hang-child"])
def test_a_hanging_squeue_ends_at_its_limit(commands: FakeCommands, fault: str) -> None:
    backend = CliBackend(CommandRunner(timeout_s=0.5), clock=lambda: NOW)
    commands.set_faults(squeue=fault)
    with pytest.raises(SlurmCommandError, match=r"no answer within 0\.5 s"):
        backend.snapshot()
    backend.close()


def test_unchanged_rows_are_not_parsed_again(backend: CliBackend) -> None:
    first = backend.snapshot().jobs
    parsed = backend.parser.parsed
    assert parsed == 18
    second = backend.snapshot().jobs
    assert backend.parser.parsed == parsed
    assert first == second
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_rpc_storm(backend: CliBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per kind and cycle, however many jobs there are; nothing is asked per job."""
    calls: list[str] = []
    run = backend.runner.run

    def counted(argv, **options):  # type: ignore[no-untyped-def]
        if argv != ["squeue", "--helpFormat"]:  # once, and answered by squeue itself
            calls.append(argv[0])
        return run(argv, **options)

    monkeypatch.setattr(backend.runner, "run", counted)
    backend.snapshot()
    assert sorted(calls) == ["scontrol", "sprio", "squeue"]
    calls.clear()
    backend.jobs([job.job_id for job in backend.jobs()])
    assert sorted(calls) == ["sprio", "sprio", "squeue", "squeue"]
    calls.clear()
    ids = ["3", "4", "5", "6"]
    backend.apply([Action(ActionKind.FACTOR, i, (("SiteFactor", "1"),), "") for i in ids])
    assert calls == ["scontrol"]


def test_a_written_factor_is_known_though_sprio_does_not_rank_the_job(
    backend: CliBackend,
) -> None:
    """Without ACCRUE_ALWAYS sprio leaves leased jobs out (here: the held one)."""
    assert next(j for j in backend.jobs() if j.job_id == "10").site_factor == 0
    backend.apply([Action(ActionKind.FACTOR, "10", (("SiteFactor", "-7"),), "")])
    assert next(j for j in backend.jobs() if j.job_id == "10").site_factor == -7


def test_an_update_that_the_command_would_not_know_fails_here(
    backend: CliBackend, commands: FakeCommands
) -> None:
    good = Action(ActionKind.SHAPE, "3", (("NumNodes", "1"), ("TresPerNode", "gres/gpu:2")), "")
    bad = Action(ActionKind.SHAPE, "3", (("NumGpus", "1"),), "")
    assert [r.ok for r in backend.apply([good, bad])] == [True, False]
    assert commands.log() == ["update JobId=3 NumNodes=1 TresPerNode=gres/gpu:2"]


@pytest.mark.parametrize("parsers", ["v0.0.42 v0.0.40", "v0.0.40"])
def test_details_come_as_json_with_the_parser_that_this_slurm_knows(
    backend: CliBackend, monkeypatch: pytest.MonkeyPatch, parsers: str
) -> None:
    monkeypatch.setenv("FAKE_DATA_PARSERS", parsers)
    ids = ["3", "8_[1,3,5,7,9]", "12+1", "4000000"]
    jobs = {job.job_id: job for job in backend.details(ids)}
    assert set(jobs) == set(ids[:3])
    rows = {job.job_id: job for job in backend.jobs(ids)}
    for name, job in jobs.items():
        assert (job.gpus, job.nodes, job.eligible_s) == (
            rows[name].gpus,
            rows[name].nodes,
            rows[name].eligible_s,
        )
    assert backend.details(["4000000"]) == ()
    assert backend.details([]) == ()


def test_details_of_a_slurm_that_knows_no_parser_of_ours_are_missing(
    backend: CliBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DATA_PARSERS", "v0.0.99")
    with pytest.raises(SlurmCommandError, match="data_parser"):
        backend.details(["3", "4"])


def test_the_last_task_of_an_array_with_a_step_is_asked_for_once_more(
    backend: CliBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks of the recorded array, made to reach farther than Slurm writes one by one."""
    asked: list[list[str]] = []
    whole = "8_[1-21:4%3]"
    run = backend.runner.run

    def stepped(argv, **options):  # type: ignore[no-untyped-def]
        if argv[0] == "squeue" and "-r" not in argv and "--helpFormat" not in argv:
            asked.append(argv)
            mark = argv[argv.index("-O") + 1].rpartition("\x1f")[2]
            return Answer(f"{whole}\x1f{mark}\n9\x1f{mark}\n", "", 0)
        answer = run(argv, **options)
        text = answer.stdout
        for task, wide in ((9, 17), (7, 13), (5, 9), (3, 5)):
            text = text.replace(f"\x1f8_{task}\x1f", f"\x1f8_{wide}\x1f")
        return Answer(text, answer.stderr, answer.rc)

    monkeypatch.setattr(backend.runner, "run", stepped)
    assert "8_[1,5,9,13,17,21]" in {job.job_id for job in backend.snapshot().jobs}
    assert [argv[-2:] for argv in asked] == [["-j", "8"]]
    whole = "8_[1,5,9,13,17,2...]"
    with pytest.raises(SourceMissingError, match="cut off"):
        backend.snapshot()

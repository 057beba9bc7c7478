"""``slurm-ext check``: each setting of Slurm that matters, right and wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_ext.cli import check
from slurm_ext.cli.backend import open_backend
from slurm_ext.cli.check import Level, cluster_questions, grace, lua, rights, slurm_questions
from slurm_ext.cli.check_requeue import (
    Victim,
    longest_save_s,
    qos_victims,
    requeue_questions,
    victims_of,
)
from slurm_ext.control.config import Config
from slurm_ext.control.heartbeat import beat
from slurm_ext.control.locks import FileLock, life_lock
from slurm_ext.domain.document import Truth
from slurm_ext.domain.errors import SlurmCommandError, SourceMissingError
from slurm_ext.slurm.facts import Identity, SlurmConfig
from slurm_ext.slurm.parse_nodes import parse_partition
from tests.fakes.slurm import FakeSlurm
from tests.unit.cli.spooled import document

GOOD = {
    "prioritytype": "priority/multifactor",
    "schedulertype": "sched/backfill",
    "accountingstoragetres": "cpu,mem,energy,node,billing,gres/gpu",
    "priorityflags": "ACCRUE_ALWAYS",
    "accountingstorageenforce": "associations,limits,qos",
    "schedulerparameters": "disable_job_shrink,bf_max_job_test=1000,default_queue_depth=2000",
    "preemptmode": "REQUEUE",
    "preempttype": "preempt/qos",
    "preemptparameters": "send_user_signal",
    "jobsubmitplugins": "lua",
}
RESIZING = Config(partitions={"main": {"act": ["order", "lease", "resize"]}})


def ask(config: Config = RESIZING, version: str = "24.11.5", **changes: str) -> dict[str, Level]:
    slurm = SlurmConfig(version, {**GOOD, **changes})
    return {line.name: line.level for line in slurm_questions(slurm, config)}


def test_a_good_cluster_is_ok_in_every_line():
    assert set(ask().values()) == {Level.OK}


@pytest.mark.parametrize(
    ("changes", "name", "level"),
    [
        ({"prioritytype": "priority/basic"}, "PriorityType", Level.MEND),
        ({"prioritysitefactorplugin": "site_factor/x"}, "site_factor", Level.MEND),
        ({"priorityflags": ""}, "leases", Level.MEND),
        ({"schedulertype": "sched/builtin"}, "SchedulerType", Level.ADVICE),
        ({"accountingstoragetres": "cpu,mem"}, "AccountingStorageTRES", Level.ADVICE),
        (
            {"schedulerparameters": "disable_job_shrink,default_queue_depth=1000"},
            "bf_max_job_test",
            Level.ADVICE,
        ),
        (
            {"schedulerparameters": "disable_job_shrink,bf_max_job_test=1000"},
            "default_queue_depth",
            Level.ADVICE,
        ),
        (
            {"schedulerparameters": "bf_max_job_test=1000,default_queue_depth=1000"},
            "disable_job_shrink",
            Level.MEND,
        ),
        ({"preemptparameters": ""}, "preemption", Level.ADVICE),
    ],
)
def test_each_wrong_setting_is_told(changes, name, level):
    found = ask(**changes)
    assert found[name] is level
    assert {n for n, v in found.items() if v is not Level.OK} == {name}


def test_what_only_leases_need_is_advice_while_nothing_is_leased():
    found = ask(
        Config(),
        priorityflags="",
        schedulerparameters="bf_max_job_test=1000,default_queue_depth=1000",
    )
    assert found["leases"] is Level.ADVICE
    assert found["disable_job_shrink"] is Level.ADVICE


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("24.11.5", Level.OK),
        ("26.05.5", Level.OK),
        ("25.11.0", Level.ADVICE),
        ("21.08.8", Level.MEND),
        ("", Level.MEND),
    ],
)
def test_releases(version, level):
    assert ask(version=version)["slurm"] is level


def test_rights():
    (line,) = rights(Identity("slurm-ext", 900, "Operator"))
    assert line.level is Level.OK
    (line,) = rights(Identity("slurm-ext", 900, "None"))
    assert line.level is Level.MEND
    assert "sacctmgr modify user where name=slurm-ext set adminlevel=Operator" in line.fix


def test_partitions_and_gpus_of_the_configuration_exist():
    snapshot = FakeSlurm(nodes=2, gpu_type="v100").snapshot()
    found = {line.name: line for line in cluster_questions(snapshot, RESIZING)}
    assert found["partitions"].level is Level.OK
    assert found["gpu_memory_gb"].level is Level.ADVICE
    config = Config(partitions={"mian": {"act": ["order"]}}, gpu_memory_gb={"V100": 16})
    found = {line.name: line for line in cluster_questions(snapshot, config)}
    assert found["partitions"].level is Level.MEND
    assert "mian" in found["partitions"].found
    assert "gpu_memory_gb" not in found
    (_, line) = cluster_questions(FakeSlurm(nodes=1, gpus_per_node=0).snapshot(), Config())
    assert (line.name, line.level) == ("GPUs", Level.MEND)


def test_the_lua_module_is_called(tmp_path):
    conf = {**GOOD, "slurm_conf": str(tmp_path / "slurm.conf")}
    script = tmp_path / "job_submit.lua"

    def levels() -> list[Level]:
        return [line.level for line in lua(SlurmConfig("24.11.5", conf), Config())]

    assert levels() == [Level.ADVICE]
    script.write_text("function slurm_job_submit() end")
    assert levels() == [Level.MEND]
    script.write_text('dofile("/etc/slurm/lua/slurm_ext.lua")')
    assert levels() == [Level.OK, Level.OK]
    conf["jobsubmitplugins"] = "(null)"
    assert levels() == [Level.MEND]


@pytest.mark.parametrize(
    ("text", "ours", "level"),
    [
        (None, 5.0, Level.OK),
        (None, 1.0, Level.MEND),
        ("return {\n  submit_grace_s = 1,\n}", 1.0, Level.OK),
        ("return { submit_grace_s = 3, tell_users = false }", 3.0, Level.OK),
        ("return {\n  -- submit_grace_s = 1,\n}", 5.0, Level.OK),
        ("return {\n  submit_grace_s = 0.5,\n}", 5.0, Level.MEND),
    ],
)
def test_the_submit_grace_is_one_number(tmp_path, text, ours, level):
    path = tmp_path / "config.lua"
    if text is not None:
        path.write_text(text)
    assert grace(path, ours).level is level


def local(tmp_path: Path) -> Config:
    return Config(
        table=tmp_path / "t.sqlite",
        journal=tmp_path / "j.sqlite",
        spool=tmp_path / "spool",
        heartbeat=tmp_path / "beat",
    )


def test_the_spool(tmp_path):
    config = local(tmp_path)
    assert check.spool(config).level is Level.MEND
    config.spool.mkdir()
    (config.spool / "plans").mkdir()
    config.spool.chmod(0o755)
    assert "chmod 1777" in check.spool(config).fix
    config.spool.chmod(0o1777)
    assert check.spool(config).level is Level.OK


def test_the_journal(tmp_path):
    config = local(tmp_path)
    assert check.journal(config).level is Level.OK
    config.journal.write_bytes(b"x" * 5000)
    assert check.journal(config).level is Level.MEND


def test_the_heartbeat_of_a_living_daemon(tmp_path):
    config = local(tmp_path)
    assert check.heartbeat(config).level is Level.ADVICE
    lock = FileLock(life_lock(config.journal))
    assert lock.acquire()
    assert check.heartbeat(config).level is Level.MEND
    beat(config.heartbeat, check.time.time(), 300.0, 7)
    assert check.heartbeat(config).level is Level.OK
    lock.release()
    assert check.heartbeat(config).level is Level.ADVICE


def test_the_file_system_of_a_path_that_does_not_exist_yet(tmp_path):
    assert check.file_system(tmp_path / "a/b/c") == check.file_system(tmp_path) != ""
    assert check.file_system(Path("/proc/self")) == "proc"


class Answers:
    """A command runner that prints what it is told."""

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, argv: list[str]) -> object:
        if not self.text:
            raise SlurmCommandError(argv, 1, "no")
        return type("Answer", (), {"stdout": self.text})()


def test_plugin_and_clock_read_what_the_commands_print():
    (line,) = check.plugin(Answers("      --ft-model=NAME  model\n"))
    assert line.level is Level.OK
    (line,) = check.plugin(Answers("  -J, --job-name\n"))
    assert line.level is Level.MEND
    now = int(check.time.time())
    (line,) = check.clock(Answers(f"sdiag output at Sun Nov 29 18:00:00 2026 ({now})\n"))
    assert line.level is Level.OK
    (line,) = check.clock(Answers(f"sdiag output at Sun Nov 29 18:00:00 2026 ({now - 60})\n"))
    assert line.level is Level.MEND
    (line,) = check.clock(Answers("?"))
    assert line.level is Level.ADVICE
    (line,) = check._asked("plugin", lambda: check.plugin(Answers("")))
    assert (line.name, line.level) == ("plugin", Level.MEND)


def test_nothing_that_check_asks_creates_a_file(tmp_path):
    config = local(tmp_path)
    list(check._local(config))
    left = {name for name in os.listdir(tmp_path) if not name.endswith(".lock")}
    assert left == set()


def test_the_backend_is_the_one_of_the_configuration():
    assert open_backend(Config()).name == "cli"
    with pytest.raises(SourceMissingError):  # no Slurm here, or no pyslurm of its release
        open_backend(Config(backend="pyslurm", command_timeout_s=1))


LOW = Victim("of low", frozenset({"requeue"}), 120.0)


def requeue(
    *victims: Victim, save_s: float | None = 10.0, lifts: bool = True, **changes: str
) -> dict[str, Level]:
    settings = {
        "preempttype": "preempt/partition_prio",
        "maxbatchrequeue": "10000",
    }
    slurm = SlurmConfig("24.11.5", {**GOOD, **settings, **changes})
    lines = requeue_questions(slurm, victims or (LOW,), save_s, lifts=lifts)
    return {line.name: line.level for line in lines}


def test_a_cluster_whose_jobs_come_back_is_ok_in_every_line():
    found = requeue()
    assert set(found.values()) == {Level.OK}
    assert set(found) == {
        "JobRequeue",
        "MaxBatchRequeue",
        "PreemptMode of low",
        "GraceTime of low",
        "KillWait",
        "KillOnBadExit",
        "WaitTime",
        "requeue delay",
    }


@pytest.mark.parametrize(
    ("changes", "victim", "name"),
    [
        ({"jobrequeue": "0"}, LOW, "JobRequeue"),
        ({}, Victim("of low", frozenset({"cancel"}), 120.0), "PreemptMode of low"),
        ({}, Victim("of low", frozenset({"suspend"}), 0.0), "PreemptMode of low"),
        ({}, Victim("of low", frozenset({"requeue"}), 0.0), "GraceTime of low"),
        ({}, Victim("of low", frozenset({"requeue"}), 19.0), "GraceTime of low"),
        ({"killwait": "15 sec"}, LOW, "KillWait"),
        ({"killonbadexit": "1"}, LOW, "KillOnBadExit"),
        ({"waittime": "30 sec"}, LOW, "WaitTime"),
        ({"maxbatchrequeue": "5"}, LOW, "MaxBatchRequeue"),
        # Slurm takes this without a complaint, and goes by its own parameter.
        (
            {"maxbatchrequeue": "5", "schedulerparameters": "max_batch_requeue=10000"},
            LOW,
            "MaxBatchRequeue",
        ),
        ({"maxbatchrequeue": ""}, LOW, "MaxBatchRequeue"),
        ({"authinfo": "cred_expire=5"}, LOW, "requeue delay"),
    ],
)
def test_each_setting_that_loses_work_is_told(changes, victim, name):
    found = requeue(victim, **changes)
    assert found[name] is Level.ADVICE
    assert {n for n, level in found.items() if level is not Level.OK} == {name}


@pytest.mark.parametrize("text", ["0 sec", "120 sec", "3600 sec", "", "(null)"])
def test_a_wait_that_is_long_enough_or_none_is_ok(text):
    assert requeue(waittime=text)["WaitTime"] is Level.OK


def test_preempt_cancel_cluster_the_fix_names_the_mode():
    """Field case preempt-cancel-cluster: what is cancelled never comes back, --requeue or not."""
    victim = Victim("of low", frozenset({"cancel"}), 120.0)
    slurm = SlurmConfig("24.11.5", {**GOOD})
    (line,) = [
        line
        for line in requeue_questions(slurm, [victim], None, lifts=True)
        if line.name == "PreemptMode of low"
    ]
    assert "does not come back" in line.found
    assert "PreemptMode=REQUEUE" in line.fix


def test_without_preemption_and_measured_saves_little_is_asked():
    assert "GraceTime of low" not in requeue(preempttype="preempt/none")
    unknown = requeue(Victim("of low", frozenset({"requeue"}), 1.0), save_s=None)
    assert unknown["GraceTime of low"] is Level.OK  # nobody knows that it is too short
    assert requeue(lifts=False)["requeue delay"] is Level.ADVICE
    off = requeue(Victim("of high", frozenset({"off"}), 0.0))
    assert not [name for name in off if "of high" in name]


def test_partitions_and_qos_are_read_as_slurm_prints_them():
    low = parse_partition(
        "PartitionName=low Nodes=n[1-2] MaxTime=UNLIMITED PreemptMode=REQUEUE GraceTime=90 State=UP"
    )
    assert (low.preempt_mode, low.grace_s) == ("REQUEUE", 90.0)
    config = SlurmConfig("24.11.5", {**GOOD, "preempttype": "preempt/partition_prio"})
    asked = Answers("")
    assert victims_of(config, [low], asked) == [Victim("of low", frozenset({"requeue"}), 90.0)]
    by_qos = SlurmConfig("24.11.5", {**GOOD, "preempttype": "preempt/qos"})
    asked = Answers("normal|cluster|00:00:00\nlow|cancel|00:02:00\n")
    assert victims_of(by_qos, [low], asked) == [
        Victim("of QOS normal", frozenset({"requeue"}), 0.0),
        Victim("of QOS low", frozenset({"cancel"}), 120.0),
    ]
    with pytest.raises(SourceMissingError, match="columns"):
        qos_victims("normal|cluster\n", frozenset())


def test_the_longest_save_of_running_jobs_counts():
    def saved(job: int, state: str, save_s: float | None) -> object:
        return document(job, state=state, truth=Truth(1.0, 0, 1, 1, 1.0, save_s=save_s))

    documents = [
        saved(1, "RUNNING", 4.0),
        saved(2, "RUNNING", None),
        saved(3, "PENDING", 99.0),
        document(4, state="RUNNING"),
    ]
    assert longest_save_s(documents) == 4.0
    assert longest_save_s([]) is None


@pytest.mark.parametrize(
    ("version", "values", "hold_s"),
    [
        ("24.11.5", {}, 121.0),
        ("24.11.5", {"authinfo": "cred_expire=5"}, 6.0),
        ("24.11.5", {"authinfo": "socket=/run/munge,cred_expire=300"}, 301.0),
        ("24.11.5", {"authinfo": "cred_expire=soon"}, 121.0),
        ("24.11.5", {"schedulerparameters": "bf_continue,requeue_delay=7"}, 121.0),
        ("26.05.5", {}, 121.0),
        ("26.05.5", {"authinfo": "cred_expire=30"}, 31.0),
        ("26.05.5", {"schedulerparameters": "bf_continue,requeue_delay=7"}, 8.0),
        ("26.05.5", {"schedulerparameters": "requeue_delay=200"}, 201.0),
        ("26.05.5", {"schedulerparameters": "requeue_delay=x"}, 1.0),
        ("26.05.5", {"slurmctldparameters": "requeue_delay=9"}, 121.0),
    ],
)
def test_how_long_slurm_keeps_a_requeued_job_back(version, values, hold_s):
    """Each as Slurm did it, but for the lifetimes of a credential other than 30 and 120 s."""
    assert SlurmConfig(version, values).requeue_hold_s == hold_s

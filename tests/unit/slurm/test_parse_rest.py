"""Priorities, configuration, statistics and limits."""

from __future__ import annotations

import pytest

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.facts import Identity, SlurmConfig, split_parameters
from slurm_ext.slurm.parse_config import parse_config, parse_sdiag
from slurm_ext.slurm.parse_limits import (
    has_budget,
    parse_associations,
    parse_qos,
    with_usage,
)
from slurm_ext.slurm.parse_priorities import Ranking, parse_priorities


def test_freeze() -> None:
    """Case freeze: a written priority shows by its missing parts, a computed one by its parts."""
    found = parse_priorities(
        "3 11150 50 0 0 0 10000 0 100 1000 \n"
        "4 500 0 0 0 0 0 0 0 0 \n"
        "5 1 0 0 0 0 0 0 0 0 \n"
        "6 120 0 -120 0 0 0 0 0 0 \n"
        "7 40 0 0 0 0 0 0 0 0 gres/gpu=40\n"
        "8 30 0 0 30 0 0 0 0 0 cpu=0,gres/gpu=0\n",
        {},
    )
    assert {job: rank.priority_set for job, rank in found.items()} == {
        **dict.fromkeys((3, 5, 6, 7, 8), False),
        4: True,
    }
    assert found[3].site_factor == 50


def test_a_job_in_two_partitions_has_two_rows_and_one_factor() -> None:
    text = "15 12000 9 0 0 0 10000 0 1000 1000 \n15 11100 9 0 0 0 10000 0 100 1000 \n"
    assert parse_priorities(text, {})[15].site_factor == 9


@pytest.mark.parametrize(
    "text",
    ["3 11150 50 0 0 0 10000 0 100", "3 11150\n", "3 11150 50 0 0 0 10000 0 100 x \n", "error\n"],
)
def test_priorities_cut_off(text: str) -> None:
    with pytest.raises(SourceMissingError, match="sprio"):
        parse_priorities(text, {})


def test_rows_of_the_last_answer_are_reused_and_then_forgotten() -> None:
    known: dict[str, tuple[int, Ranking]] = {}
    first = parse_priorities("3 11150 50 0 0 0 1 0 1 1 \n4 500 0 0 0 0 0 0 0 0 \n", known)
    again = parse_priorities("3 11150 50 0 0 0 1 0 1 1 \n5 9 2 0 0 0 1 0 1 1 \n", known)
    assert again[3] is first[3]
    assert set(again) == {3, 5}
    assert len(known) == 2
    changed = parse_priorities("3 11151 51 0 0 0 1 0 1 1 \n", known)
    assert changed[3].site_factor == 51


def test_no_pending_job_is_an_empty_answer() -> None:
    assert parse_priorities("", {}) == {}


def test_a_configuration_without_its_version_was_cut_off() -> None:
    with pytest.raises(SourceMissingError, match="SLURM_VERSION"):
        parse_config("PriorityType = priority/multifactor\n")


def test_the_questions_that_are_asked_of_a_configuration() -> None:
    config = parse_config(
        "PrioritySiteFactorPlugin = site_factor/ours\nPriorityType = priority/basic\n"
        "AccountingStorageEnforce = safe\nPriorityFlags = ACCRUE_ALWAYS,FAIR_TREE\n"
        "PreemptType = preempt/none\nPreemptMode = GANG,SUSPEND\nMinJobAge = 30 sec\n"
        "SchedulerParameters = bf_interval=30,defer\nSLURM_VERSION = 23.02.6\n"
    )
    assert config.release == (23, 2)
    assert config.site_factor_plugin == "ours"
    assert not config.multifactor
    assert config.enforces_limits
    assert config.accrues_always
    assert config.preempt_type == ""
    assert config.preempt_mode == {"gang", "suspend"}
    assert config.min_job_age_s == 30
    assert config.scheduler_parameters == {"bf_interval": "30", "defer": ""}
    assert config.get("NoSuchKey") == ""
    assert SlurmConfig("").release == (0, 0)
    assert split_parameters("(null)") == {}


@pytest.mark.parametrize(
    ("uid", "level", "operator"),
    [
        (0, None, True),
        (900, "Operator", True),
        (900, "Administrator", True),
        (900, "None", False),
        (900, None, False),
    ],
)
def test_rights(uid: int, level: str | None, operator: bool) -> None:
    assert Identity("x", uid, level).operator is operator


def test_sdiag_cut_off() -> None:
    with pytest.raises(SourceMissingError, match="sdiag"):
        parse_sdiag("Server thread count:  1\n")


def test_limits_of_one_partition_bind_with_the_others() -> None:
    limits = parse_associations(
        "vision|||root||gres/gpu=24||||\nvision|alice|||gres/gpu=16||2-00:00:00|||\n"
        "vision|alice|main||gres/gpu=8|||||\nvision|bob|main||gres/gpu=8|||||\n"
    )
    assert limits["assoc:vision"].grp_gpus == 24
    alice = limits["assoc:vision:alice"]
    assert (alice.max_gpus_per_job, alice.max_wall_s) == (8, 172800.0)
    # In another partition they may have more.
    assert limits["assoc:vision"].exact
    assert not alice.exact
    assert not limits["assoc:vision:bob"].exact


def test_every_limit_that_binds_a_resized_job_is_read() -> None:
    limits = parse_associations(
        "root|||||||||\nlab|||root||cpu=64,mem=1G,gres/gpu=4|||gres/gpu=90|cpu=1000,gres/gpu=500\n"
        "lab1|||lab||||gres/gpu=120||\nlab1|alice||||||gres/gpu=120||\n"
    )
    lab = limits["assoc:lab"]
    assert (lab.grp_gpus, lab.grp_cpus, lab.grp_memory_mib, lab.parent) == (
        4,
        64,
        1024,
        "assoc:root",
    )
    assert (lab.grp_gpu_run_minutes, lab.grp_gpu_minutes, lab.grp_cpu_minutes) == (90, 500, 1000)
    assert limits["assoc:lab1"].parent == "assoc:lab"
    assert limits["assoc:lab1:alice"].parent == "assoc:lab1"
    assert limits["assoc:lab1:alice"].max_gpu_minutes_per_job == 120
    qos = parse_qos("small|DenyOnLimit,OverPartQOS|mem=8G||cpu=8|cpu=16,gres/gpu=6|||||\n")
    small = qos["qos:small"]
    assert small.over_partition
    assert small.waives == frozenset()
    flags = "PartitionMaxNodes,PartitionMinNodes,PartitionTimeLimit,NoDecay"
    free = parse_qos(f"free|{flags}|||||||||\n")["qos:free"]
    assert free.waives == {"max_nodes", "min_nodes", "max_time_s"}
    assert not free.over_partition
    # Some other type may be free of a limit on one, some other partition of one of an association.
    typed = parse_qos("a||gres/gpu:a100=2||||||||\nb||gres/gpu=2||||||||\n")
    assert [typed[f"qos:{name}"].exact for name in "ab"] == [False, True]
    assert (small.max_memory_mib_per_job, small.max_cpus_per_user) == (8192, 8)
    assert (small.max_cpus_per_account, small.max_gpus_per_account) == (16, 6)


def test_used_minutes_of_a_budget_are_read_from_slurmctld() -> None:
    """As printed by 24.11.5, shortened."""
    limits = parse_associations("lab|||root||||||gres/gpu=500,cpu=1000\nlab|bob||||||||cpu=9\n")
    assert has_budget(limits)
    text = (
        "Current Association Manager state\nAssociation Records\n"
        "ClusterName=ft Account=lab UserName= Partition= Priority=0 ID=12 GrpWall=N(0.00)"
        " GrpTRES=cpu=N(7),gres/gpu=4(2) GrpTRESMins=cpu=1000(12),mem=N(3),gres/gpu=500(33.5),"
        "gres/gpu:v100=N(34) GrpTRESRunMins=cpu=N(99) MaxJobs=\n"
        "ClusterName=ft Account=lab UserName=bob(2002) Partition= GrpTRESMins=cpu=9(8) MaxJobs=\n"
        "ClusterName=ft Account=other UserName= Partition= GrpTRESMins=cpu=9(8) MaxJobs=\n"
    )
    known = with_usage(limits, text)
    assert (known["assoc:lab"].used_gpu_minutes, known["assoc:lab"].used_cpu_minutes) == (33, 12)
    assert known["assoc:lab:bob"].used_cpu_minutes == 8
    qos = parse_qos("small||||||||||cpu=5\n")
    text = "QOS=small(3) UsageRaw=0.0 GrpTRESMins=cpu=5(4),gres/gpu=N(2) GrpTRESRunMins=cpu=N(0)\n"
    assert with_usage(qos, text)["qos:small"].used_cpu_minutes == 4


@pytest.mark.parametrize("text", ["small|gres/gpu=4", "small|gres/gpu=4\n"])
def test_limits_cut_off(text: str) -> None:
    """A limit that was lost would let us exceed it."""
    with pytest.raises(SourceMissingError, match="qos"):
        parse_qos(text)

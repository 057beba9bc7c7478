"""Lines of scontrol to nodes, partitions, reservations and the switch tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.parse_nodes import (
    pairs,
    parse_node,
    parse_partition,
    parse_reservation,
    parse_topology,
)

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"
NODE = (
    "NodeName=g01 Arch=x86_64 CPUAlloc=8 CPUEfctv=62 CPUTot=64 ActiveFeatures=nvlink,ib "
    "Gres=gpu:h100:2,gpu:h200:4 GresUsed=gpu:h100:1(IDX:0),gpu:h200:0(IDX:N/A) "
    "OS=Linux 6.1 #1 SMP RealMemory=512000 AllocMem=64000 State=MIXED Partitions=a,b "
    "CfgTRES=cpu=62,mem=500G,billing=62 AllocTRES=cpu=8,mem=62.50G"
)


def test_gpus_of_a_site_that_does_not_track_them() -> None:
    """Without gres/gpu in AccountingStorageTRES the TRES hold none: all would look free."""
    node = parse_node(NODE)
    assert (node.gpus, node.gpus_alloc, node.gpus_free) == (6, 1, 5)
    assert node.gpu_type == ""  # two types in one node
    assert (node.cpus, node.cpus_alloc, node.memory_alloc_mib) == (62, 8, 64000)
    assert node.features == {"nvlink", "ib"}
    assert node.partitions == {"a", "b"}


def test_the_larger_count_of_held_gpus_is_believed() -> None:
    line = NODE.replace("AllocTRES=cpu=8", "AllocTRES=cpu=8,gres/gpu=3")
    assert parse_node(line).gpus_alloc == 3


def test_what_an_administrator_types_changes_no_field() -> None:
    line = NODE + " Reason=bad State=IDLE Gres=gpu:64 [root@1795978963] Comment=CfgTRES=gres/gpu=9"
    node = parse_node(line)
    assert (node.state, node.gpus) == ("MIXED", 6)
    assert node.reason == "bad State=IDLE Gres=gpu:64"


@pytest.mark.parametrize("state", ["DOWN*", "IDLE+DRAIN", "IDLE+MAINTENANCE+RESERVED", "MIXED*"])
def test_gpu_vanished(state: str) -> None:
    """Case gpu-vanished: a node that is drained or down gets no more work from us."""
    node = parse_node(NODE.replace("State=MIXED", f"State={state}"))
    assert not node.available
    assert node.gpus_free == 0


def test_a_line_cut_off_is_refused_wherever_it_ends() -> None:
    for end in range(len("NodeName=g01"), NODE.index("AllocTRES=")):
        with pytest.raises(SourceMissingError):
            parse_node(NODE[:end])


def test_a_real_site_s_lines_give_their_tres() -> None:
    lines = (DATA / "text" / "rug_scontrol_show_nodes.txt").read_text().splitlines()
    assert len(lines) == 40
    for line in lines:
        found = pairs(line)
        assert found["NodeName"].startswith("mycluster")
        assert found["CfgTRES"].startswith("cpu=")


def test_a_partition() -> None:
    line = (
        "PartitionName=main AllowQos=ALL Default=YES QoS=part_limits MaxNodes=8 MaxTime=2-00:00:00 "
        "Nodes=g[01-04],h1 PriorityTier=3 PreemptMode=REQUEUE State=UP TotalNodes=5"
    )
    partition = parse_partition(line)
    assert partition.node_names == ("g01", "g02", "g03", "g04", "h1")
    assert (partition.max_time_s, partition.max_nodes) == (172800.0, 8)
    assert partition.min_nodes is None
    assert parse_partition(line.replace("MaxNodes=8", "MinNodes=2")).min_nodes == 2
    # Slurm's default of 0 binds nobody.
    assert parse_partition(line.replace("MaxNodes=8", "MinNodes=0")).min_nodes is None
    assert (partition.priority_tier, partition.preempt_mode) == (3, "REQUEUE")
    assert (partition.default, partition.available, partition.qos) == (True, True, "part_limits")
    closed = parse_partition(
        line.replace("State=UP", "State=DRAIN").replace("=part_limits", "=N/A")
    )
    assert (closed.available, closed.qos) == (False, "")


def test_a_reservation_without_nodes_closes_none() -> None:
    line = (
        "ReservationName=lic StartTime=1796065685 EndTime=1796069285 Duration=01:00:00 "
        "Nodes=(null) NodeCnt=0 Licenses=matlab:4 State=ACTIVE"
    )
    assert parse_reservation(line).node_names == ()
    with pytest.raises(SourceMissingError):
        parse_reservation(line[:40])


def test_the_switch_tree_of_slurm_s_own_form() -> None:
    """Slurm lists the nodes of a higher switch too; leaves are those without switches below."""
    topology = parse_topology(
        [
            "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]",
            "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4]",
            "SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[1-2]",
        ]
    )
    assert topology.leaf_of == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2"}
    assert topology.parent_of == {"s1": "top", "s2": "top"}
    blocks = parse_topology(["BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2"])
    assert blocks.leaf_of == {"n1": "b1", "n2": "b1"}
    assert parse_topology(["No topology information available"]).leaf_of == {}

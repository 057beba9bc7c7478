"""Pending reasons of Slurm that mean: not as it is, whatever becomes free.

Slurm looks at a waiting job again and again, so each reason holds for the present only: a limit
that is lifted, a partition that is opened or a job that is changed shows in the next reason, and
nothing is remembered here. Left out on purpose is every limit that frees itself when other jobs
end (QOSGrpGRES, AssocMaxJobsLimit, QOSMaxGRESPerUser ...), what a later time brings (BeginTime,
Licenses, QOSUsageThreshold ...), and the collective names (AccountingPolicy, QOSTimeLimit ...),
which say too little.

The choice a reader would question: PartitionConfig counts as mended by no size. It stands for
everything about a partition that has no reason of its own, mostly who may use it. Right after a
submission it stands for the other limits of the partition too; the true reason comes a moment
later (seen on 24.11.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Bar:
    """What one reason means.

    ``why`` is told to the owner. ``by_size`` says that the same job on another number of GPUs or
    nodes may be free of it. ``anywhere`` says that it holds in every partition and QOS of a job
    that names several: of such a job Slurm shows the reason of one of them, while it may start in
    another. ``opens`` says that it is not about the job: somebody has to open what is closed.
    """

    why: str
    by_size: bool = False
    anywhere: bool = False
    opens: bool = False


_SINGLE = {
    "PartitionTimeLimit": Bar("its time limit is above the partition's: ask for less --time"),
    "PartitionNodeLimit": Bar(
        "it asks for more or fewer nodes than the partition allows one job", by_size=True
    ),
    "PartitionConfig": Bar("the partition does not take it as it is"),
    "PartitionDown": Bar("the partition is down", opens=True),
    "PartitionInactive": Bar("the partition is inactive", opens=True),
    # Slurm holds such a job until somebody changes or releases it, so no size of ours helps.
    "BadConstraints": Bar("no node has what it asks for"),
    "AccountNotAllowed": Bar("the partition is closed to its account"),
    "InvalidAccount": Bar("its account does not exist", anywhere=True),
    "QOSNotAllowed": Bar("the partition or the account is closed to its QOS"),
    "InvalidQOS": Bar("its QOS does not exist"),
    "MaxMemPerLimit": Bar(
        "it asks for more memory per node or CPU than the partition allows", by_size=True
    ),
    "DependencyNeverSatisfied": Bar("what it depends on can never come to be", anywhere=True),
}
# Resources of which a job takes more on more GPUs, as reasons of associations and QOS name them.
_WITH_SIZE = ("GRES", "Billing")
# And those that stay as they were asked for.
_WITHOUT_SIZE = ("Energy", "BB", "License", "Unknown")


def _per_holder(owner: str, words: str, memory: str) -> Iterator[tuple[str, Bar]]:
    """Limits of one job that associations and QOS both have, with their irregular names."""
    more = f"it asks for more than {words} allows one job"
    on_node = f"it asks for more on one node than {words} allows"
    minutes = f"it asks for more, times its time limit, than {words} allows one job"
    yield (
        f"{owner}MaxWallDurationPerJobLimit",
        Bar(f"its time limit is above that of {words}: ask for less --time"),
    )
    for name in ("CpuPerJobLimit", "NodePerJobLimit"):
        yield f"{owner}Max{name}", Bar(more, by_size=True)
    yield f"{owner}MaxCpuPerNode", Bar(on_node, by_size=True)
    yield f"{owner}MaxCpuMinutesPerJobLimit", Bar(minutes, by_size=True)
    yield f"{owner}MaxNodeMinutesPerJob", Bar(minutes, by_size=True)
    for what in (memory, *_WITH_SIZE, *_WITHOUT_SIZE):
        by_size = what not in _WITHOUT_SIZE
        yield f"{owner}Max{what}PerJob", Bar(more, by_size)
        if what != "License":
            yield f"{owner}Max{what}PerNode", Bar(on_node, by_size)
        # Slurm shows the limit of a QOS on burst buffer minutes under the association's name.
        holder = "Assoc" if what == "BB" else owner
        yield f"{holder}Max{what}MinutesPerJob", Bar(minutes, by_size)


def _least() -> Iterator[tuple[str, Bar]]:
    """What a QOS asks of each job at least."""
    why = "it asks for less than its QOS asks of one job"
    yield "QOSMinCpuNotSatisfied", Bar(why, by_size=True)
    for what in ("Memory", "Node", *_WITH_SIZE, *_WITHOUT_SIZE):
        yield f"QOSMin{what}", Bar(why, what not in _WITHOUT_SIZE)


BARS = MappingProxyType(
    {
        **_SINGLE,
        **dict(_per_holder("QOS", "its QOS", "Memory")),
        **dict(_per_holder("Assoc", "its account", "Mem")),
        **dict(_least()),
    }
)
"""What bars a job, by the name that squeue shows."""

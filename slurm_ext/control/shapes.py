"""The table of shapes: which fields give a job another GPU count, and how to see that it worked.

Each row was run on Slurm 24.11.5:

==================  =============================  ===========================================
kind                as submitted                   written
==================  =============================  ===========================================
rank-per-gpu        ``-n N --gpus-per-task=1``     ``NumTasks=g NumNodes=n``
launcher-per-node   ``-N n --gres=gpu:k``          ``NumTasks=n NumNodes=n TresPerNode=gres/gpu:k``
single-node         ``-N1 -n k --gres=gpu:k``      ``NumTasks=k TresPerNode=gres/gpu:k``
tasks-per-node      ``--ntasks-per-node=t``        ``NumTasks=t*n NumNodes=n``
==================  =============================  ===========================================

and with each of them CPUs (``NumTasks=`` alone would count one CPU per task), memory per node where
it does not follow CPUs or GPUs, the time limit, and the node list last. ``NumTasks=`` comes first
in every transaction: slurmctld checks it before the others, and where it changes the size of a
job that has just started it refuses the whole update, before ``NumNodes=`` could shrink the job or
``TimeLimit=`` cut it (seen). A node list is not guarded by it, only the lease is.

scontrol takes no ``NumNodes=`` and no node list for a part of an array, so an array keeps its node
count. Success is judged by reading back, never by the answer to the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_ext.control.submitted import Frame, same_limit, same_size
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.nodelist import fold

Fields = tuple[tuple[str, str], ...]
_MEASURED = frozenset({Source.MEASURED, Source.INTERPOLATED})


@dataclass(frozen=True, slots=True)
class Counts:
    """GPU counts that may be taken, and for each other one why not."""

    ok: tuple[int, ...]
    refused: Mapping[int, str]


def possible_counts(frame: Frame, counts: Iterable[int], gpus_per_node: int) -> Counts:
    """Which GPU counts the job's form can take on nodes with ``gpus_per_node`` GPUs."""
    ok: list[int] = []
    refused: dict[int, str] = {}
    for count in sorted(set(counts)):
        reason = _why_impossible(frame, count, gpus_per_node)
        if reason:
            refused[count] = reason
        else:
            ok.append(count)
    return Counts(tuple(ok), refused)


def _why_impossible(frame: Frame, count: int, gpus_per_node: int) -> str:
    if count < 1:
        return "a job needs at least one GPU"
    if count == frame.gpus:
        return ""
    if frame.kind is ShapeKind.FIXED:
        return "its shape cannot be changed"
    if gpus_per_node < 1:
        return "no node of its pool has GPUs"
    if frame.kind is ShapeKind.SINGLE_NODE and count > gpus_per_node:
        return f"its form keeps to one node, which has {gpus_per_node} GPUs"
    nodes = -(-count // gpus_per_node)
    if nodes > 1 and count % gpus_per_node:
        return f"{count} GPUs do not fill whole nodes of {gpus_per_node}"
    if count % frame.gpus_per_task:
        return f"each of its tasks takes {frame.gpus_per_task} GPUs, which do not divide {count}"
    if frame.kind is ShapeKind.TASKS_PER_NODE:
        if frame.gpus_per_node not in (count, gpus_per_node):
            return f"its ranks take {frame.gpus_per_node} of {gpus_per_node} GPUs on each node"
        if count % frame.gpus_per_node:
            return f"it takes {frame.gpus_per_node} GPUs on each node, which do not divide {count}"
    if frame.nodes_max and nodes > frame.nodes_max:
        return f"it takes {nodes} nodes and at most {frame.nodes_max} were asked for"
    if frame.nodes_max > frame.nodes > nodes:
        return f"it fits on {nodes} nodes and at least {frame.nodes} were asked for"
    if frame.array and not _same_nodes(frame, nodes):
        return "the node count of an array's pending tasks cannot be changed"
    return ""


def _same_nodes(frame: Frame, nodes: int) -> bool:
    """Whether the job can run on so many nodes without a word to Slurm about it."""
    if not leaves_nodes_open(frame):
        return nodes == frame.nodes
    return frame.nodes <= nodes and (frame.nodes_max == 0 or nodes <= frame.nodes_max)


def shape_for(frame: Frame, configuration: Configuration) -> Shape | None:
    """The shape that gives the job this configuration; ``None`` where its form cannot take it."""
    gpus, nodes = configuration.gpus, configuration.nodes
    even = len(set(configuration.placement)) == 1
    if frame.nodes_max > frame.nodes > nodes:
        # A range of nodes has a lower end, which the submitted count keeps by spreading.
        return frame.shape if gpus == frame.gpus else None
    if gpus % frame.gpus_per_task or (frame.nodes_max and nodes > frame.nodes_max):
        return None
    match frame.kind:
        case ShapeKind.RANK_PER_GPU:
            return Shape(frame.kind, gpus, nodes, gpus // frame.gpus_per_task)
        case ShapeKind.LAUNCHER_PER_NODE if even:
            return Shape(frame.kind, gpus, nodes, nodes)
        case ShapeKind.SINGLE_NODE if nodes == 1:
            return Shape(frame.kind, gpus, 1, gpus)
        case ShapeKind.TASKS_PER_NODE if even and gpus == nodes * frame.gpus_per_node:
            return Shape(frame.kind, gpus, nodes, frame.ntasks // frame.nodes * nodes)
    return None


def resize_fields(
    frame: Frame,
    wanted: Shape,
    *,
    limit_s: float | None = None,
    nodes: tuple[str, ...] | None = None,
    memory_cap_mib: int | None = None,
) -> Fields:
    """One transaction that gives the job ``wanted``.

    ``limit_s`` is the new time limit (``None`` leaves it), ``nodes`` the node list to pin to, the
    empty one to take a pin away (``None`` leaves it). ``memory_cap_mib`` is what a node has.
    """
    found: list[tuple[str, str]] = [("NumTasks", str(wanted.ntasks))]
    if not frame.array:
        found.append(("NumNodes", str(wanted.nodes)))
    return _with_the_rest(found, frame, wanted, limit_s, nodes, memory_cap_mib)


def restore_fields(frame: Frame, entry: LedgerEntry) -> Fields:
    """The transaction that gives the job back what was submitted."""
    found: list[tuple[str, str]] = [("NumTasks", str(frame.ntasks))]
    if not frame.array:
        found.append(("NumNodes", _node_range(frame)))
    limit_s = entry.submitted_limit_s if entry.written_limit_s is not None else None
    nodes = entry.submitted_req_nodes if entry.pinned else None
    return _with_the_rest(found, frame, frame.shape, limit_s, nodes, None)


def _node_range(frame: Frame) -> str:
    """``NumNodes=`` as submitted.

    Ranks that asked for no node count may spread: a maximum of 0 takes ours away (seen).
    """
    if frame.nodes_max > frame.nodes:
        return f"{frame.nodes}-{frame.nodes_max}"
    if leaves_nodes_open(frame):
        return f"{frame.nodes}-0"
    return str(frame.nodes)


def leaves_nodes_open(frame: Frame) -> bool:
    """Whether Slurm may spread the submitted job over more nodes than the least number."""
    if frame.nodes_max > frame.nodes:
        return True
    return frame.kind is ShapeKind.RANK_PER_GPU and frame.nodes == 1 and frame.nodes_max == 0


def _with_the_rest(
    found: list[tuple[str, str]],
    frame: Frame,
    wanted: Shape,
    limit_s: float | None,
    nodes: tuple[str, ...] | None,
    memory_cap_mib: int | None,
) -> Fields:
    if frame.kind in (ShapeKind.LAUNCHER_PER_NODE, ShapeKind.SINGLE_NODE):
        gpu_type = f"{frame.gpu_type}:" if frame.gpu_type else ""
        found.append(("TresPerNode", f"gres/gpu:{gpu_type}{wanted.gpus_per_node}"))
    if frame.cpus_per_task > 1:
        found.append(("NumCPUs", str(wanted.ntasks * frame.cpus_per_task)))
    memory_mib = memory_of(frame, wanted, memory_cap_mib)
    if memory_mib is not None:
        found.append(("MinMemoryNode", str(memory_mib)))
    if limit_s is not None:
        found.append(("TimeLimit", str(math.ceil(limit_s / 60))))
    if nodes is not None:
        found.append(("ReqNodeList", fold(nodes)))
    return tuple(found)


def memory_of(frame: Frame, wanted: Shape, cap_mib: int | None = None) -> int | None:
    """Memory per node in MiB, in proportion to the GPUs on it; ``None`` where it follows anyway."""
    if not frame.memory_node_mib:
        return None
    per_gpu = frame.memory_node_mib / max(1, frame.gpus_per_node)
    memory_mib = math.ceil(per_gpu * wanted.gpus_per_node)
    return memory_mib if cap_mib is None else min(memory_mib, cap_mib)


@dataclass(frozen=True, slots=True)
class LimitChoice:
    """A time limit for a configuration, or the reason why it has none."""

    limit_s: float | None
    refusal: str = ""


def scaled_limit(
    submitted_s: float | None,
    chosen: Estimate | None,
    at_submitted: Estimate | None,
    max_s: float | None,
) -> LimitChoice:
    """The time limit for a configuration, in whole minutes, from the one that the user asked for.

    The user's limit is stretched by ``chosen.high / at_submitted.value``, so that the slack which
    the user gave stays in proportion and the estimate's error is on the safe side. It is never
    below ``chosen.high``, never above ``max_s`` (partition, QOS, association), and shortened only
    where both times rest on measurements: a guess must not kill a job earlier than its owner said.
    """
    if submitted_s is None or chosen is None:
        return LimitChoice(None)
    stretch = chosen.high / at_submitted.value if at_submitted and at_submitted.value > 0 else 1.0
    sure = (
        at_submitted is not None and chosen.source in _MEASURED and at_submitted.source in _MEASURED
    )
    wanted = submitted_s * (stretch if sure else max(1.0, stretch))
    # A hair below the next minute is that minute: 3600.0000001 s must not become 61 minutes.
    limit_s = math.ceil(max(wanted, chosen.high) / 60 - 1e-6) * 60.0
    if max_s is None or limit_s <= max_s:
        return LimitChoice(limit_s)
    floor_s = math.floor(max_s / 60) * 60.0
    if chosen.high > floor_s:
        return LimitChoice(
            None,
            f"it may take {chosen.high / 3600:.1f} h and the longest allowed time is"
            f" {max_s / 3600:.1f} h",
        )
    return LimitChoice(floor_s)


def read_back_matches(
    job: Job,
    wanted: Shape,
    *,
    limit_s: float | None = None,
    nodes: tuple[str, ...] | None = None,
) -> str | None:
    """Why what Slurm shows is not what was wanted; ``None`` when it is.

    ``limit_s`` and ``nodes`` are compared only where given.
    """
    present = Shape(wanted.kind, job.gpus, job.nodes, job.ntasks)
    if not same_size(present, wanted):
        return f"Slurm shows {_words(present)} and not {_words(wanted)}"
    if limit_s is not None and not same_limit(job.time_limit_s, limit_s):
        return f"Slurm shows a time limit of {job.time_limit_s} s and not {limit_s:g} s"
    if nodes is not None and set(job.req_nodes) != set(nodes):
        return f"Slurm shows the node list {fold(job.req_nodes)!r} and not {fold(nodes)!r}"
    return None


def _words(shape: Shape) -> str:
    return f"{shape.gpus} GPUs, {shape.nodes} nodes, {shape.ntasks} tasks"

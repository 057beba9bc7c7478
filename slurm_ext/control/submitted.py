"""The submitted shape of a job: what has to be given back, and what stays the same in a resize.

The first source is what job_submit.lua recorded in the directive; the ledger's own note of it wins
once it exists, because it follows later changes by the owner. *Restore* means the last values that
we did not write: when the job carries a value that is neither the submitted one nor one of ours,
somebody else wrote it, and it becomes the value to give back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from slurm_ext.domain.directive import Directive, RequestedShape
from slurm_ext.domain.job import Job, Shape, ShapeKind
from slurm_ext.domain.journal import LedgerEntry

_SAME_LIMIT_S = 59.0  # Slurm keeps whole minutes


@dataclass(frozen=True, slots=True)
class Frame:
    """What a resize needs to know about a job besides the wanted size.

    ``nodes_max`` is the greatest node count that the user's form allows (0 = open).
    ``gpus_per_node`` are the GPUs on each node as submitted, to which the memory of a node
    (``memory_node_mib``, 0 = follows CPUs or GPUs) is scaled. ``array`` jobs take neither node
    counts nor node lists from scontrol.
    """

    kind: ShapeKind
    gpus: int
    nodes: int
    ntasks: int
    gpu_type: str = ""
    nodes_max: int = 0
    gpus_per_node: int = 0
    memory_node_mib: int = 0
    gpus_per_task: int = 1
    cpus_per_task: int = 1
    array: bool = False

    @property
    def shape(self) -> Shape:
        """The submitted shape."""
        return Shape(self.kind, self.gpus, self.nodes, self.ntasks)


def shape_from(kind: ShapeKind, req: RequestedShape) -> Shape:
    """The submitted shape as job_submit.lua recorded it."""
    return Shape(kind, req.gpus, max(1, req.nodes), max(1, req.ntasks))


def present_shape(job: Job, kind: ShapeKind) -> Shape:
    """The shape in which Slurm would start the job now."""
    return Shape(kind, job.gpus, job.nodes, job.ntasks)


def frame_of(job: Job, directive: Directive | None, entry: LedgerEntry) -> Frame | None:
    """The job's frame; ``None`` where its shape cannot be changed."""
    submitted = entry.submitted
    if submitted is None or submitted.kind is ShapeKind.FIXED:
        return None
    req = directive.req if directive is not None else None
    if req is None:
        return None
    nodes_max = req.nodes_max
    if entry.resized_by_hand and nodes_max > req.nodes != submitted.nodes:
        nodes_max = submitted.nodes  # the range is gone: scontrol was told one number
    return Frame(
        kind=submitted.kind,
        gpus=submitted.gpus,
        nodes=submitted.nodes,
        ntasks=submitted.ntasks,
        gpu_type=req.gpu_type or job.gpu_type,
        nodes_max=nodes_max,
        gpus_per_node=req.gpus_per_node or submitted.gpus_per_node,
        memory_node_mib=req.memory_node_mib,
        gpus_per_task=max(1, req.gpus_per_task),
        cpus_per_task=max(1, req.cpus_per_task),
        array=job.array,
    )


def first_sight(job: Job, directive: Directive | None, entry: LedgerEntry | None) -> LedgerEntry:
    """The entry of a job with its submitted values filled in, where they are not yet known.

    With a lost ledger the job may already carry our shape; then what job_submit.lua recorded is
    right and what Slurm shows is not, except for the limit, which only Slurm can tell.
    """
    if entry is None:
        entry = LedgerEntry(job.job_id, job.submit_s, attempt=job.restarts)
    if entry.submitted is not None:
        return entry
    if directive is None or directive.req is None or directive.shape is None:
        shape = present_shape(job, ShapeKind.FIXED)
    else:
        shape = shape_from(directive.shape, directive.req)
    present = present_shape(job, shape.kind)
    if shape.kind is not ShapeKind.FIXED and not same_size(present, shape):
        entry = replace(entry, written=present)
    return replace(
        entry,
        submitted=shape,
        submitted_limit_s=job.time_limit_s,
        submitted_req_nodes=() if entry.pinned else job.req_nodes,
        first_nodes=job.nodes,
        first_cpus=None if entry.written is not None else job.cpus,
    )


def notice_others(job: Job, entry: LedgerEntry) -> LedgerEntry:
    """The entry after taking over what somebody else wrote to the job since we looked last.

    Also settles our own writes: once the job carries the submitted shape again, nothing of ours is
    left in it.
    """
    entry = _notice_shape(job, entry)
    entry = _notice_limit(job, entry)
    if entry.pinned and not job.req_nodes:
        entry = replace(entry, pinned=False)
    elif not entry.pinned and job.req_nodes != entry.submitted_req_nodes:
        entry = replace(entry, submitted_req_nodes=job.req_nodes)
    return entry


def _notice_shape(job: Job, entry: LedgerEntry) -> LedgerEntry:
    submitted = entry.submitted
    if submitted is None:
        return entry
    present = present_shape(job, submitted.kind)
    ours = [s for s in (entry.written, entry.written_before) if s is not None]
    known = (submitted, *ours)
    if any(same_size(present, shape) for shape in known) and not (
        _more_nodes(job, entry, known) or _other_cpus(job, entry)
    ):
        return entry
    if ours and _half_written(present, known):
        return entry
    if submitted.kind is ShapeKind.FIXED:
        return replace(entry, submitted=present)
    return replace(
        entry,
        submitted=present,
        written=None,
        written_before=None,
        given_back=False,
        resized_by_hand=True,
        notes=_noted(entry, "its shape was changed by somebody else and is kept"),
    )


def _more_nodes(job: Job, entry: LedgerEntry, known: Collection[Shape]) -> bool:
    """Whether somebody gave ranks that may spread another number of nodes.

    `same_size` cannot tell. A job that never ran shows the number that was asked for (seen on
    24.11.5: 1 where none was); after a requeue it may be the one that it ran on.
    """
    return (
        entry.first_nodes is not None
        and job.nodes != entry.first_nodes
        and not job.restarts
        and not job.array
        and all(shape.kind is ShapeKind.RANK_PER_GPU for shape in known)
        and all(job.nodes != shape.nodes for shape in known)
    )


def _other_cpus(job: Job, entry: LedgerEntry) -> bool:
    """Whether somebody gave a job of the submitted size other CPUs, which a resize would undo.

    After a requeue Slurm may show the CPUs that the job ran on, and a size of ours brings others.
    """
    return (
        entry.first_cpus is not None
        and job.cpus != entry.first_cpus
        and not job.restarts
        and entry.written is None
        and entry.written_before is None
    )


def _notice_limit(job: Job, entry: LedgerEntry) -> LedgerEntry:
    present = job.time_limit_s
    if present is None or entry.submitted_limit_s is None:
        return entry if present is None else replace(entry, submitted_limit_s=present)
    known = (entry.submitted_limit_s, entry.written_limit_s, entry.written_limit_before_s)
    if any(same_limit(present, limit) for limit in known):
        return entry
    return replace(
        entry, submitted_limit_s=present, written_limit_s=None, written_limit_before_s=None
    )


def same_limit(left: float | None, right: float | None) -> bool:
    """Whether two time limits are one to Slurm, which keeps minutes."""
    if left is None or right is None:
        return left is right
    return abs(left - right) <= _SAME_LIMIT_S


def same_size(left: Shape, right: Shape) -> bool:
    """Whether Slurm would show the two shapes alike.

    With one rank per GPU and no node count of the user's, Slurm shows a node count that it
    derived (seen on 24.11.5), so it tells nothing there; where tasks follow nodes, nodes tell all.
    """
    if left.gpus != right.gpus:
        return False
    if left.kind is ShapeKind.RANK_PER_GPU:
        return left.ntasks == right.ntasks
    if left.kind in (ShapeKind.LAUNCHER_PER_NODE, ShapeKind.TASKS_PER_NODE):
        return left.nodes == right.nodes
    return (left.nodes, left.ntasks) == (right.nodes, right.ntasks)


def _half_written(present: Shape, known: Iterable[Shape]) -> bool:
    """Whether each field has a value that it had in one of the known shapes.

    Several fields of one update are not atomic, so a refused resize can leave such a mixture.
    """
    shapes = list(known)
    return (
        any(present.gpus_per_node == s.gpus_per_node for s in shapes)
        and any(present.nodes == s.nodes for s in shapes)
        and any(present.ntasks == s.ntasks for s in shapes)
    )


def carries_ours(job: Job, entry: LedgerEntry) -> bool:
    """Whether the job's shape, limit or node list is one that we wrote."""
    submitted = entry.submitted
    if entry.pinned or submitted is None:
        return entry.pinned
    if entry.written is not None:
        return True
    return entry.written_limit_s is not None and not same_limit(
        job.time_limit_s, entry.submitted_limit_s
    )


def offered_counts(
    directive: Directive, entry: LedgerEntry | None, job: Job, *, resizable: bool, maximum: int
) -> tuple[int, ...]:
    """GPU counts that may be considered for the job, ascending.

    A job that may not be resized keeps its present count; one whose owner pinned it, that count.
    """
    if not resizable:
        return (job.gpus,)
    requested = _requested(directive, entry, job)
    if entry is not None and entry.veto:
        return (entry.veto_gpus if entry.veto_gpus is not None else requested,)
    return directive.resolve_gpu_counts(requested, maximum)


def _requested(directive: Directive, entry: LedgerEntry | None, job: Job) -> int:
    if entry is not None and entry.submitted is not None:
        return entry.submitted.gpus
    return directive.req.gpus if directive.req is not None else job.gpus


def _noted(entry: LedgerEntry, note: str, keep: int = 8) -> tuple[str, ...]:
    return _appended(entry.notes, note)[-keep:]


def _appended(notes: Collection[str], note: str) -> tuple[str, ...]:
    return tuple(notes) if note in notes else (*notes, note)

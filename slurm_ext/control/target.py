"""The size that a job shall have: the planned one where every guard agrees, else the submitted one.

Guards, in this order: the permit, the job's form, a shape that Slurm failed to take or to start
before, the longest allowed time, reservations, and jobs that are not ours and would be delayed. A
refused plan is never a reason
to keep a job waiting: it falls back to what its owner submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slurm_ext.control.case import Case
from slurm_ext.control.offers import Offers
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.shapes import (
    Fields,
    leaves_nodes_open,
    read_back_matches,
    resize_fields,
    restore_fields,
    shape_for,
)
from slurm_ext.control.submitted import Frame
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.job import Shape
from slurm_ext.domain.plan import Decision

Refuse = Callable[[Case, str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A size and the transaction that brings it. ``limit_s`` and ``nodes`` of ``None`` stay."""

    shape: Shape
    fields: Fields
    limit_s: float | None
    nodes: tuple[str, ...] | None
    submitted: bool
    reason: str


def submitted_target(case: Case, reason: str) -> Target | None:
    """What was submitted; ``None`` where the job is in the size that it shall wait in."""
    entry = case.entry
    if case.frame is None or case.at_home:
        return None
    return Target(
        case.frame.shape,
        restore_fields(case.frame, entry),
        entry.submitted_limit_s if entry.written_limit_s is not None else None,
        entry.submitted_req_nodes if entry.pinned else None,
        submitted=True,
        reason=reason,
    )


def has_size(case: Case, target: Target) -> bool:
    """Whether Slurm shows the target, and by our own record nothing else can be behind it."""
    if read_back_matches(case.job, target.shape, limit_s=target.limit_s, nodes=target.nodes):
        return False
    written = case.entry.written
    if target.submitted:
        # What is left of a half-written transaction, or a node count that was made exact, does
        # not always show: it is over when the write that restores has been seen to arrive.
        return written is None
    if written is not None or case.frame is None:
        return written == target.shape
    # Ranks whose node count was left open could be spread over more nodes than planned.
    several = target.shape.ntasks > 1 and not case.frame.array
    return not (several and leaves_nodes_open(case.frame))


class Planner:
    """Targets of one observation. ``refuse`` is told why a planned size is not taken."""

    def __init__(
        self,
        index: PoolIndex,
        offers: Offers,
        at_submitted: Mapping[str, Estimate],
        refuse: Refuse,
    ) -> None:
        self._index = index
        self._offers = offers
        self._at_submitted = at_submitted
        self._refuse = refuse

    def target(self, case: Case) -> Target | None:
        """The size in which the job shall start; ``None`` where it has it anyway."""
        decision = case.decision
        planned = decision.configuration if decision is not None else None
        if decision is None or planned is None or case.frame is None or not case.permit.resize:
            return submitted_target(case, "it may not be resized any more")
        target = self._planned(case, decision, planned, case.frame)
        if isinstance(target, Target):
            return target
        self._refuse(case, target)
        return submitted_target(case, f"as submitted: {target}")

    def _planned(
        self, case: Case, decision: Decision, planned: Configuration, frame: Frame
    ) -> Target | str:
        """The planned target, or why not."""
        shape = shape_for(frame, planned)
        if shape is None:
            return f"its form cannot take {planned.gpus} GPUs as {planned.placement}"
        partition = self._index.partition(case.job)
        least = partition.min_nodes if partition is not None else None
        if least is not None and shape.nodes < least:
            # As submitted it may name no number of nodes, and Slurm then makes it as many.
            return f"partition {case.job.partition} asks for at least {least} nodes per job"
        if shape == case.entry.failed and not case.requeued:
            return f"Slurm failed to take {shape.gpus} GPUs on {shape.nodes} nodes in this attempt"
        unstarted = () if case.requeued else case.entry.unstarted
        if shape.gpus in unstarted and shape.gpus != frame.gpus:
            return f"Slurm did not start it on {shape.gpus} GPUs in this attempt"
        choice = self._offers.limit(
            case.job,
            case.entry,
            frame,
            shape,
            decision.remaining_s,
            self._at_submitted.get(case.job_id),
        )
        if choice.refusal:
            return choice.refusal
        limit_s = choice.limit_s
        nodes = self._nodes(case, decision, shape, frame)
        pool = self._index.pool_of(case.job)
        memory = [n.memory_mib for n in pool.nodes if n.memory_mib] if pool is not None else []
        fields = resize_fields(
            frame, shape, limit_s=limit_s, nodes=nodes, memory_cap_mib=min(memory, default=None)
        )
        reason = f"{shape.gpus} GPUs on {shape.nodes} nodes: {decision.reason}"
        return Target(shape, fields, limit_s, nodes, submitted=False, reason=reason)

    def _nodes(
        self, case: Case, decision: Decision, shape: Shape, frame: Frame
    ) -> tuple[str, ...] | None:
        """The node list to write; the owner's own one takes a pin of ours away."""
        back = case.entry.submitted_req_nodes if case.entry.pinned else None
        if not case.permit.pin or not decision.nodes or frame.array:
            return back
        if len(decision.nodes) > shape.nodes:
            self._refuse(
                case, f"{len(decision.nodes)} nodes are planned for {shape.nodes}: not pinned"
            )
            return back
        return decision.nodes

"""Why a larger and faster GPU count has no room now, in words. Pure.

Free GPUs are not all that a start needs: they have to lie on nodes as the placement wants them,
with free CPUs and memory beside them. Said only of counts that are not larger than the free GPUs
and find no seat even where nothing else starts: all else is told by the solver's comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurm_ext.domain.plan import Term
from slurm_ext.domain.policy import View
from slurm_ext.domain.spans import counted
from slurm_ext.policy.opened import Start
from slurm_ext.policy.placement import Request, TopologyRule, seat
from slurm_ext.policy.queue import Field, request_for

# It costs a few seatings per count: worked out for this many starts per field.
TOLD = 8
_MIB_PER_GIB = 1024


def term_name(gpus: int) -> str:
    """Name of the term that says why so many GPUs have no room now."""
    return f"no room for {gpus}"


def with_roomless(
    view: View, part: Field, start: Start, rank: int, rule: TopologyRule
) -> tuple[Term, ...]:
    """The terms of a start, and one for each count that would end the job sooner than the chosen
    one and has no room now."""
    if view.brief or rank >= TOLD:
        return start.terms
    job, fact, chosen = start.open.job, start.open.fact, start.candidate
    found = list(start.terms)
    for candidate in fact.candidates:
        larger = chosen.gpus < candidate.gpus <= part.gpus_free
        faster = candidate.remaining_s.value < chosen.remaining_s.value
        if not larger or not faster or candidate.job_ids != (job.job_id,):
            continue
        request = request_for(job, candidate, view.pools[fact.pool])
        if words := _lacking(request, part, view, rule):
            found.append(Term(term_name(candidate.gpus), 0.0, words))
    return tuple(found)


def _lacking(request: Request, part: Field, view: View, rule: TopologyRule) -> str:
    """What the nodes lack for the request; empty where it finds a seat."""

    def seated(asked: Request, topology: TopologyRule = TopologyRule.IGNORE) -> bool:
        return not seat([asked], part.nodes, view.snapshot.topology, topology).unseated

    nodes, most = len(request.placement), max(request.placement)
    bare = replace(request, cpus=0.0, memory_mib=0.0, exclusive=False)
    if not seated(bare):
        return f"there {_are(nodes)} with {_shares(request.placement)} free"
    if not seated(replace(bare, cpus=request.cpus)):
        cpus = counted(round(request.cpus * most), "free CPU")
        return f"there {_are(nodes)} with {cpus} beside {counted(most, 'free GPU')}"
    if not seated(replace(request, exclusive=False)):
        gib = request.memory_mib * most / _MIB_PER_GIB
        return f"there {_are(nodes)} with {gib:.4g} GiB of free memory beside the GPUs and CPUs"
    if not seated(request):
        return f"there {_are(nodes)} on which nothing runs"
    if not seated(request, rule):
        return "its nodes would not be below one switch"
    return ""


def _are(nodes: int) -> str:
    return "is no node" if nodes == 1 else f"are not {nodes} nodes"


def _shares(placement: Sequence[int]) -> str:
    if len(set(placement)) == 1:
        return counted(placement[0], "GPU")
    return " + ".join(map(str, placement)) + " GPUs"

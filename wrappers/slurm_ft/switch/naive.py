"""The switch without overlap, the baseline: everybody saves, everybody loads, new groups.

The same bytes in the same memory as the overlapped switch, so that a comparison of the two
compares order and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slurm_ft.comm import Comm
from slurm_ft.switch.links import Link
from slurm_ft.switch.overlap import HostBuffers
from slurm_ft.switch.plan import StagePlan, Way
from slurm_ft.switch.storages import Held, address
from slurm_ft.switch.timeline import Kind, Recorder


def switch_naively(
    plan: StagePlan,
    held: Sequence[Held],
    incoming: Mapping[str, Tensor],
    link: Link,
    buffers: HostBuffers,
    recorder: Recorder,
    comm: Comm,
    save: Callable[[Mapping[int, Tensor]], None],
    rebuild: Callable[[], None],
) -> None:
    """Switch this stage; collective.

    ``save`` makes the old task durable from the host twins of its storages (see
    `StageSwitch.drained`) and returns when it is; ``rebuild`` makes the process groups anew.
    """
    entries = {entry.key: entry for entry in held}
    with recorder.span(Kind.WAIT, label="all stages drained"):
        comm.barrier()
    twins: dict[int, Tensor] = {}
    with torch.no_grad():
        for move in plan.moves:
            if move.leaves:
                entry = entries[move.block.key]
                buffer = twins[address(entry.bytes)] = buffers.take(entry.nbytes)
                with recorder.span(Kind.OUT, entry.nbytes, entry.key):
                    link.outward(buffer, entry.bytes)
    with recorder.span(Kind.SAVE, sum(len(buffer) for buffer in twins.values())):
        save(twins)
    with recorder.span(Kind.WAIT, label="all stages saved"):
        comm.barrier()
    with torch.no_grad():
        for move in plan.moves:
            entry = entries[move.block.key]
            if move.comes:
                with recorder.span(Kind.IN, entry.nbytes, entry.key):
                    link.inward(entry.bytes, incoming[entry.key])
            elif move.way in (Way.STORE, Way.CLEAR):
                entry.bytes.zero_()
    with recorder.span(Kind.WAIT, label="all stages loaded"):
        comm.barrier()
    with recorder.span(Kind.GROUP):
        rebuild()
    for buffer in twins.values():
        buffers.give(buffer)

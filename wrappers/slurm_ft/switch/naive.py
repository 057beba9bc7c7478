"""The switch without overlap, the baseline: everybody saves, everybody loads, new groups.

The same bytes in the same memory as the overlapped switch, so that a comparison of the two
compares order and nothing else. A rank whose host memory does not take what leaves would save from
the device and compare something else, so it is an error, and one of all ranks: those that have room
must not be left waiting at a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slurm_ft.comm import Comm
from slurm_ft.switch.links import Link
from slurm_ft.switch.overlap import HostBuffers, SwitchError
from slurm_ft.switch.plan import Mode, StagePlan, Way
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
    """Switch this stage; collective. Raises SwitchError on all ranks where one has no room.

    ``save`` makes the old task durable from the host twins of its storages (see
    `StageSwitch.drained`) and returns when it is; ``rebuild`` makes the process groups anew.
    """
    entries = {entry.key: entry for entry in held}
    with recorder.span(Kind.WAIT, label="all stages drained"):
        _check_room(plan, comm)
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


def _check_room(plan: StagePlan, comm: Comm) -> None:
    """Return when every rank is here and has room for what leaves; a barrier that also asks."""
    short = plan.mode is not Mode.OVERLAPPED
    # One small exchange where all is well, as a barrier would be: the comparison stays fair.
    if not comm.start_max(int(short)).result():
        return
    told = comm.gather(plan.leaves if short else None)
    words = "; ".join(
        f"rank {rank} has no room for the {leaves} bytes that leave it"
        for rank, leaves in enumerate(told or ())
        if leaves is not None
    )
    raise SwitchError(
        f"the naive switch needs host memory on every rank, and {comm.broadcast(words)}: give the"
        " job more memory, or use --switch=overlapped, which can do with less"
    )

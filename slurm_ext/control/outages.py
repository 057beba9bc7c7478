"""Which nodes are out of use, and how that is told. Pure.

Policies see only that such nodes have no free GPUs. The person whose job waits for them has to be
told their names: else "enough GPUs are free" reads as if the plan were wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_ext.domain.node import Node
from slurm_ext.domain.nodelist import fold
from slurm_ext.slurm.state import node_flags

_FAILED = frozenset({"DOWN", "FAIL", "FAILING", "ERROR", "NOT_RESPONDING"})
_DRAINED = frozenset({"DRAIN", "DRAINED", "DRAINING"})


def failed(state: str) -> bool:
    """Whether a node in this state has failed, as far as Slurm knows.

    One that is on its way up does not respond yet, and is not down for that.
    """
    base, flags = node_flags(state)
    if "POWERING_UP" in flags:
        flags -= {"NOT_RESPONDING"}
    return base in _FAILED or not _FAILED.isdisjoint(flags)


def out_of_use(nodes: Iterable[Node]) -> str:
    """``n2 is down, n[5-6] are drained``; empty where none is.

    Nodes that are reserved or being switched off to save power are no outage and not named.
    """
    down: list[str] = []
    drained: list[str] = []
    for node in nodes:
        if node.available:
            continue
        base, flags = node_flags(node.state)
        if failed(node.state):
            down.append(node.name)
        elif not _DRAINED.isdisjoint({base, *flags}):
            drained.append(node.name)
    return ", ".join(
        f"{fold(names)} {'is' if len(names) == 1 else 'are'} {word}"
        for names, word in ((down, "down"), (drained, "drained"))
        if names
    )

"""Which bytes of a stage move when one task gives way to the next. Pure: no torch, no clock.

Four things decide what a block does: whether its old content must be kept (trained, and this
replica is the one that keeps it), whether its new content is already there (the same hash: a
frozen backbone), whether the new content is only zeros (a fresh optimizer), and whether there is
spare device memory to bring it in before the old one has left.

Spare memory goes to the first layers: a training pipeline drains at stage 0 last and starts there
first, so its first layers are what everything waits for. On the stages behind, the drain itself
hides the move, and spare memory helps less; on a data-parallel layout nothing drains early, so
spare memory is all that helps. `predicted_s` knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Way(StrEnum):
    """What happens to one block.

    KEEP      nothing: the same content stays
    SWAP      the old content leaves, the new one takes its place
    LOAD      the new content replaces an old one that need not be kept
    CLEAR     the new content is zeros, the old one need not be kept
    STORE     the old content leaves, zeros take its place
    PREFETCH  the new content comes into spare memory while the old task still runs; the old one,
              where it is to be kept, leaves behind the new task's first step
    """

    KEEP = "keep"
    SWAP = "swap"
    LOAD = "load"
    CLEAR = "clear"
    STORE = "store"
    PREFETCH = "prefetch"


class Mode(StrEnum):
    """How a stage switches.

    OVERLAPPED  both directions at once, layer by layer
    SERIAL      the old task is saved from the device, then the new one loaded: host memory does
                not hold what leaves
    COLD        not in place at all: the tasks' shapes differ
    """

    OVERLAPPED = "overlapped"
    SERIAL = "serial"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Block:
    """One storage of a stage, old and new. Sizes in bytes.

    ``layer`` counts within the stage, in forward order. ``keep`` tells that the old content must
    become durable. ``old`` and ``new`` are content hashes, ``None`` where unknown; ``fresh`` that
    the new content is zeros.
    """

    key: str
    layer: int
    nbytes: int
    keep: bool
    old: str | None = None
    new: str | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """What is done with one block."""

    block: Block
    way: Way

    @property
    def leaves(self) -> int:
        """Bytes from device to host."""
        out = self.way in (Way.SWAP, Way.STORE) or (self.way is Way.PREFETCH and self.block.keep)
        return self.block.nbytes if out else 0

    @property
    def comes(self) -> int:
        """Bytes from host to device."""
        return self.block.nbytes if self.way in (Way.SWAP, Way.LOAD, Way.PREFETCH) else 0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """All moves of a stage, in the order of its layers, with the reason for its mode."""

    mode: Mode
    moves: tuple[Move, ...]
    words: str = ""

    @property
    def leaves(self) -> int:
        """Bytes from device to host."""
        return sum(move.leaves for move in self.moves)

    @property
    def comes(self) -> int:
        """Bytes from host to device."""
        return sum(move.comes for move in self.moves)

    @property
    def prefetched(self) -> int:
        """Bytes that come before the old task has ended."""
        return sum(move.comes for move in self.moves if move.way is Way.PREFETCH)


def in_place(plan: StagePlan) -> StagePlan:
    """The same moves where nothing was brought in early after all."""
    moves = tuple(
        replace(move, way=Way.SWAP if move.block.keep else Way.LOAD)
        if move.way is Way.PREFETCH
        else move
        for move in plan.moves
    )
    return replace(plan, moves=moves)


def plan_stage(
    blocks: Sequence[Block], *, spare_bytes: int = 0, host_bytes: int | None = None
) -> StagePlan:
    """The moves of one stage.

    ``spare_bytes`` is free device memory that the switch may use, ``host_bytes`` free host memory
    for what leaves (``None`` = enough). Blocks may come in any order.
    """
    ordered = sorted(blocks, key=lambda block: (block.layer, block.key))
    ways = [_way(block) for block in ordered]
    leaves = sum(Move(block, way).leaves for block, way in zip(ordered, ways, strict=True))
    if host_bytes is not None and leaves > host_bytes:
        words = (
            f"{leaves} bytes leave the device and host memory takes {host_bytes}: the old task is"
            " saved before the new one is loaded"
        )
        return StagePlan(Mode.SERIAL, tuple(map(Move, ordered, ways)), words)
    left = spare_bytes
    for index, block in enumerate(ordered):
        if ways[index] not in (Way.SWAP, Way.LOAD):
            continue
        if block.nbytes > left:
            # Later blocks are not tried: what comes early must be what is needed first.
            break
        left -= block.nbytes
        ways[index] = Way.PREFETCH
    return StagePlan(Mode.OVERLAPPED, tuple(map(Move, ordered, ways)))


def _way(block: Block) -> Way:
    if block.old is not None and block.old == block.new:
        return Way.KEEP
    if block.fresh:
        return Way.STORE if block.keep else Way.CLEAR
    return Way.SWAP if block.keep else Way.LOAD


def cold_plan(reason: str) -> StagePlan:
    """A switch that cannot be made in place."""
    return StagePlan(Mode.COLD, (), reason)


def difference(
    old: Sequence[tuple[str, tuple[int, ...], str]], new: Sequence[tuple[str, tuple[int, ...], str]]
) -> str | None:
    """Why two tasks cannot share a stage's storages, or ``None`` where they can.

    Each entry is a tensor's name, shape and number format.
    """
    mine = {name: (shape, form) for name, shape, form in old}
    other = {name: (shape, form) for name, shape, form in new}
    for name in sorted(mine.keys() ^ other.keys()):
        whose = "only the old task" if name in mine else "only the new task"
        return f"{whose} has {name}"
    for name, (shape, form) in mine.items():
        if other[name] != (shape, form):
            then, now = other[name]
            return f"{name} was {form}{list(shape)} and is {now}{list(then)} in the new task"
    return None


@dataclass(frozen=True, slots=True)
class Drain:
    """How a step ends on the stages: seconds of one micro-batch forward and backward.

    ``stages`` of 1 is a data-parallel layout: all ranks end their step at the same moment.
    """

    stages: int
    forward_s: float
    backward_s: float
    micro_batches: int

    def step_s(self) -> float:
        """An ideal step, filled and drained."""
        pairs = self.micro_batches + self.stages - 1
        return pairs * (self.forward_s + self.backward_s)

    def early_s(self, stage: int) -> float:
        """How long before the whole pipeline a stage has done its last backward."""
        return stage * self.backward_s

    def late_s(self, stage: int) -> float:
        """How long after stage 0 a stage has to begin the next task."""
        return stage * self.forward_s


def predicted_s(
    plan: StagePlan, drain: Drain, stage: int, *, out_rate: float, in_rate: float
) -> float:
    """Seconds by which this stage delays the new task's first step.

    Rates in bytes per second. What comes early costs nothing as long as one step of the old task
    covers it. A move in both directions takes as long as the longer one, plus one block of the
    other, since a block cannot come before it has left.
    """
    if plan.mode is Mode.COLD:
        raise ValueError("the cost of a cold start is measured, not predicted from bytes")
    early = max(0.0, plan.prefetched / in_rate - drain.step_s())
    later = [move for move in plan.moves if move.way is not Way.PREFETCH]
    out_s = sum(move.leaves for move in later) / out_rate
    in_s = sum(move.comes for move in later) / in_rate
    if plan.mode is Mode.SERIAL:
        moving = out_s + in_s
    else:
        first = max((move.leaves / out_rate for move in later if move.comes), default=0.0)
        moving = max(out_s, in_s + first) if in_s else 0.0
    hidden = drain.early_s(stage) + drain.late_s(stage)
    return max(0.0, early + moving - hidden)

"""Moves one stage from the old task to the new one while the pipeline drains and fills.

Two threads, one per direction. A block comes in as soon as its old content has left; the new
task's forward waits per layer, in `ready`. A stage starts by itself when its own last backward and
update are done: nothing here waits for another stage. An error in a mover reaches whoever waits
next, and no waiter waits for ever.

What has left stays in host memory until the caller has made it durable and says `released`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.switch.links import Link
from slurm_ft.switch.plan import Mode, Move, StagePlan, Way, in_place
from slurm_ft.switch.storages import Held, address
from slurm_ft.switch.timeline import Kind, Recorder


class SwitchError(SlurmExtError):
    """A switch could not be finished; both tasks go on from their last complete checkpoints."""


class HostBuffers:
    """Host memory for what leaves, kept from one switch to the next."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly this size."""
        free = self._free.get(nbytes)
        return free.pop() if free else self._link.host(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        self._free.setdefault(len(buffer), []).append(buffer)

    def reserve(self, plan: StagePlan) -> None:
        """Make ready, ahead of time, what a plan will take."""
        wanted = [self.take(move.leaves) for move in plan.moves if move.leaves]
        for buffer in wanted:
            self.give(buffer)


class StageSwitch:
    """One switch of one stage.

    ``incoming`` gives the host bytes of the new content by block key, for each block that comes.
    Call `prefetch` (before the old task ends, or never), `drained` after the stage's own last
    update, `ready(layer)` before a layer's first use by the new task, `gone` to wait until all old
    content is in host memory, `released` when that is durable.
    """

    def __init__(
        self,
        plan: StagePlan,
        held: Sequence[Held],
        incoming: Mapping[str, Tensor],
        link: Link,
        buffers: HostBuffers,
        recorder: Recorder,
        limit_s: float = 600.0,
    ) -> None:
        if plan.mode is Mode.COLD:
            raise SwitchError(f"this switch is a cold start ({plan.words}): start the task anew")
        self._plan = plan
        self._held = {entry.key: entry for entry in held}
        self._incoming = incoming
        self._link, self._buffers, self._recorder = link, buffers, recorder
        self._limit_s = limit_s
        self._spares: dict[str, Tensor] = {}
        self._old: dict[str, Tensor] = {}
        self._host: dict[str, Tensor] = {}
        self._twins: dict[int, Tensor] = {}
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._early: threading.Thread | None = None
        self._serial = plan.mode is Mode.SERIAL
        leaving = () if self._serial else tuple(move for move in plan.moves if move.leaves)
        self._left = {move.block.key: threading.Event() for move in leaving}
        layers = {entry.layer for entry in held}
        self._ready = {layer: threading.Event() for layer in layers}
        self._missing = {
            move.block.key for move in plan.moves if move.comes and move.block.key not in incoming
        }
        if self._missing:
            raise SwitchError(f"no new content for {', '.join(sorted(self._missing)[:3])}")

    @property
    def serial(self) -> bool:
        """Whether the old task is saved before the new one comes."""
        return self._serial

    @property
    def words(self) -> str:
        """The plan's reason for its mode."""
        return self._plan.words

    def prefetch(self) -> None:
        """Begin to bring in what fits into spare memory; the old task goes on meanwhile."""
        moves = [move for move in self._plan.moves if move.way is Way.PREFETCH]
        for move in moves:
            self._spares[move.block.key] = self._link.spare(
                move.block.nbytes, self._held[move.block.key].bytes
            )
        if moves:
            self._early = self._start("switch-early", lambda: self._bring_early(moves))

    def drained(self, before: Callable[[Mapping[int, Tensor]], None] | None = None) -> None:
        """The stage has done its last update of the old task: move.

        ``before`` is called, before anything is overwritten, with the host twin of each storage
        that leaves, by the address of the storage: what `storages.mirror` wants. In serial mode
        there are no twins, and ``before`` makes the old task durable from the device.
        """
        if self._early is None:
            self._plan = in_place(self._plan)
        for move in self._plan.moves:
            if move.leaves and not self._serial:
                entry = self._held[move.block.key]
                buffer = self._buffers.take(entry.nbytes)
                self._host[entry.key] = buffer
                self._twins[address(entry.bytes)] = buffer
        if before is not None:
            before(self._twins)
        for entry in self._held.values():
            self._old[entry.key] = entry.bytes
        self._adopt_early()
        if not self._serial:
            self._start("switch-out", self._out)
        self._start("switch-in", self._in)

    def ready(self, layer: int) -> None:
        """Return when the new task may use this layer (counted within the stage)."""
        event = self._ready.get(layer)
        if event is None or (event.is_set() and self._failure is None):
            return
        with self._recorder.span(Kind.WAIT, label=f"layer {layer}"):
            self._wait(event, f"layer {layer} of the new task")

    def all_ready(self) -> None:
        """Return when the whole stage is the new task's."""
        for layer in sorted(self._ready):
            self.ready(layer)

    def early_over(self, limit_s: float) -> bool:
        """Wait until nothing is being prefetched any more; False past the limit."""
        if self._early is not None:
            self._early.join(limit_s)
        return self._early is None or not self._early.is_alive()

    def gone(self) -> Mapping[str, Tensor]:
        """Host bytes of the old content by block key, when all of it has arrived there."""
        for key, event in self._left.items():
            self._wait(event, f"block {key} of the old task")
        # Device memory under what was prefetched: the new task may need it from now on.
        self._old, self._spares = {}, {}
        return self._host

    def released(self) -> None:
        """The old content is durable: its host memory may be used again."""
        for thread in self._threads:
            thread.join(self._limit_s)
        self._incoming = {}
        for buffer in self._host.values():
            self._buffers.give(buffer)
        self._host = {}

    def _adopt_early(self) -> None:
        if self._early is None:
            return
        self._early.join(self._limit_s)
        if self._early.is_alive():
            raise SwitchError(f"prefetching took longer than {self._limit_s:g} s")
        self._check()
        for key, spare in self._spares.items():
            self._held[key].adopt(spare)

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            # Inference mode is per thread; without it every copy would be seen by autograd.
            with torch.no_grad():
                work()
        except BaseException as exc:  # handed over to whoever waits next
            self._failure = exc
            for event in (*self._left.values(), *self._ready.values()):
                event.set()

    def _wait(self, event: threading.Event, what: str) -> None:
        if not event.wait(self._limit_s):
            raise SwitchError(f"{what} has not arrived within {self._limit_s:g} s")
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise SwitchError(f"moving a stage failed: {self._failure}") from self._failure

    def _bring_early(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._bring(move, self._spares[move.block.key])

    def _bring(self, move: Move, target: Tensor) -> None:
        with self._recorder.span(Kind.IN, move.block.nbytes, move.block.key):
            self._link.inward(target, self._incoming[move.block.key])

    def _take_out(self, move: Move) -> None:
        key = move.block.key
        with self._recorder.span(Kind.OUT, move.block.nbytes, key):
            self._link.outward(self._host[key], self._old[key])
        self._left[key].set()

    def _out(self) -> None:
        # What a new block waits for goes first; what lies in a storage of its own now can follow.
        for early in (False, True):
            for move in self._plan.moves:
                if move.leaves and (move.way is Way.PREFETCH) is early:
                    self._check()
                    self._take_out(move)

    def _in(self) -> None:
        last = {move.block.layer: index for index, move in enumerate(self._plan.moves)}
        self._announce_still(last)
        for index, move in enumerate(self._plan.moves):
            if move.block.key in self._left and move.way is not Way.PREFETCH:
                self._wait(self._left[move.block.key], f"block {move.block.key}")
            target = self._held[move.block.key].bytes
            if move.way in (Way.SWAP, Way.LOAD):
                self._bring(move, target)
            elif move.way in (Way.STORE, Way.CLEAR):
                target.zero_()
            if last[move.block.layer] == index:
                self._ready[move.block.layer].set()

    def _announce_still(self, last: Mapping[int, int]) -> None:
        """Layers of which nothing moves any more are ready at once."""
        busy = {
            move.block.layer
            for move in self._plan.moves
            if move.way not in (Way.KEEP, Way.PREFETCH)
        }
        for layer, event in self._ready.items():
            if layer not in busy:
                event.set()

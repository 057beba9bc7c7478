"""What a rank of a chain moves when one task gives way to the next: planned, begun early, done.

The next task has the same form, so its bytes take the places of the old one's. Which task that is,
when the old one is at its end and how it becomes durable is the caller's to say; nothing here makes
checkpoints, results or records.

A switch that begins before the old task's last step is planned on what is frozen holding what it
holds then. That is looked at again when the step is made, and where it is not so, what was brought
in early is thrown away and the switch is planned anew: one late switch is cheaper than a task that
trains on another's weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from slurm_ft.comm import Comm
from slurm_ft.switch.beside import LIMIT_S, Beside
from slurm_ft.switch.incoming import Incoming, blocks_of, frozen_in, held_by, marks_of
from slurm_ft.switch.leaving import Leaving
from slurm_ft.switch.links import CudaLink, EmulatedLink, Link
from slurm_ft.switch.memory import device_free, host_free
from slurm_ft.switch.naive import switch_naively
from slurm_ft.switch.overlap import HostBuffers, StageSwitch, SwitchError
from slurm_ft.switch.plan import StagePlan, plan_stage
from slurm_ft.switch.storages import Held
from slurm_ft.switch.timeline import Recorder
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.trainer import Trainer

_log = logging.getLogger(__name__)

# Makes the old task durable from the state that is given, once it has one; in the thread beside.
Durable = Callable[[Leaving], None]


class Handover:
    """One rank's switches, one at a time. ``how`` is overlapped or naive; of cold tasks there is
    no switch.

    ``local`` is the number of ranks on the node, ``comm`` the training thread's, ``group_s`` the
    time-out of groups that a naive switch makes.
    """

    def __init__(
        self,
        how: str,
        ranks: Ranks,
        local: int,
        comm: Comm,
        group_s: float,
        beside: Beside,
        say: Callable[[str], None],
    ) -> None:
        self._how, self._ranks, self._local = how, ranks, local
        self._comm, self._group_s, self._beside, self._say = comm, group_s, beside, say
        cuda = ranks.device.type == "cuda"
        self._link: Link = CudaLink(ranks.device) if cuda else EmulatedLink()
        self._buffers = HostBuffers(self._link)
        # The one by which the present task comes, until all of it is here.
        self._switch: StageSwitch | None = None
        # The one by which the next task will come, where it has begun.
        self._prepared: StageSwitch | None = None
        # What the present task came as; None where it was started cold.
        self._came_as: Incoming | None = None
        # Of the frozen storages, when the last switch was planned.
        self._marks: dict[str, int] = {}

    def forget(self) -> None:
        """The present task ends without a switch: nothing of it is needed beside a cold start."""
        self._switch = self._prepared = self._came_as = None

    def wait_layer(self, index: int) -> None:
        """Return when the present task may use this layer of its stage."""
        if self._switch is not None:
            self._switch.ready(index)

    def all_here(self) -> None:
        """The present task has come in whole, also what no forward has waited for."""
        if self._switch is not None:
            self._switch.all_ready()
            self._switch = None

    def early_over(self, limit_s: float) -> bool:
        """Wait until nothing is being prefetched any more; False past the limit."""
        until = time.monotonic() + limit_s
        under_way = (switch for switch in (self._switch, self._prepared) if switch is not None)
        return all(switch.early_over(max(0.0, until - time.monotonic())) for switch in under_way)

    def prefetch(self, trainer: Trainer, incoming: Incoming, recorder: Recorder) -> None:
        """Bring in what fits beside the present task, which has a step to make yet."""
        if self._how != "overlapped":
            return
        # A task of one step may be the last before its own layers have all come.
        self.all_here()
        held = held_by(trainer)
        plan = self._plan(trainer, held, incoming)
        self._buffers.reserve(plan)
        self._prepared = self._stage_switch(plan, held, incoming, recorder)
        self._prepared.prefetch()

    def switch(
        self, trainer: Trainer, incoming: Incoming, recorder: Recorder, durable: Durable
    ) -> None:
        """The present task goes and this one comes, all steps of the present one being made.

        Returns when the trainer may be told of the new task, whose layers may still be coming (see
        `wait_layer`) while the old one becomes ``durable`` beside.
        """
        # A task that came with all its steps made has perhaps not used all of its layers.
        self.all_here()
        held, frozen = held_by(trainer), frozen_in(trainer)
        if self._how == "naive":
            plan = self._plan(trainer, held, incoming)
            self._naively(plan, held, incoming, recorder, self._leaving(trainer, held), durable)
            incoming.keep_only(frozen)
        else:
            switch = self._still_good(held)
            if switch is None:
                plan = self._plan(trainer, held, incoming)
                switch = self._stage_switch(plan, held, incoming, recorder)
            leaving = self._leaving(trainer, held)
            if switch.serial:
                self._say(
                    f"{trainer.task.name} is saved before {incoming.task.name} comes:"
                    f" {switch.words}"
                )
                self._one_after_the_other(switch, leaving, incoming, frozen, durable)
            else:
                self._overlapped(switch, leaving, incoming, frozen, durable)
            self._switch = switch
        self._came_as = incoming

    # --- what moves -------------------------------------------------------------------------------

    def _plan(self, trainer: Trainer, held: Sequence[Held], incoming: Incoming) -> StagePlan:
        self._marks = marks_of(held, frozen_in(trainer))
        blocks = blocks_of(held, self._marks, self._came_as, incoming)
        spare = 0
        if self._how == "overlapped":
            spare = device_free(self._ranks.device, self._local)
        return plan_stage(blocks, spare_bytes=spare, host_bytes=host_free(self._local))

    def _leaving(self, trainer: Trainer, held: Sequence[Held]) -> Leaving:
        return Leaving(trainer.task.name, trainer.state, held, self._came_as, self._marks)

    def _stage_switch(
        self, plan: StagePlan, held: Sequence[Held], incoming: Incoming, recorder: Recorder
    ) -> StageSwitch:
        return StageSwitch(plan, held, incoming.content, self._link, self._buffers, recorder)

    def _still_good(self, held: Sequence[Held]) -> StageSwitch | None:
        """The prepared switch, if there is one and what it was planned on is still so."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        if self._marks == {entry.key: entry.mark() for entry in held if entry.key in self._marks}:
            return prepared
        _log.warning("rank %d: the last step has changed what is frozen", self._ranks.rank)
        if not prepared.early_over(LIMIT_S):
            raise SwitchError(f"prefetching took longer than {LIMIT_S:g} s")
        return None

    # --- how it moves -----------------------------------------------------------------------------

    def _overlapped(
        self,
        switch: StageSwitch,
        leaving: Leaving,
        incoming: Incoming,
        frozen: set[str],
        durable: Durable,
    ) -> None:
        def when_gone() -> None:
            switch.gone()
            durable(leaving)
            switch.released()
            incoming.keep_only(frozen)

        switch.drained(leaving.note)
        self._beside.do(when_gone, f"making {leaving.name} durable")

    def _one_after_the_other(
        self,
        switch: StageSwitch,
        leaving: Leaving,
        incoming: Incoming,
        frozen: set[str],
        durable: Durable,
    ) -> None:
        def when_here() -> None:
            switch.all_ready()
            switch.released()
            incoming.keep_only(frozen)

        switch.drained(self._saving(leaving, durable))
        self._beside.do(when_here, f"bringing {incoming.task.name} in")

    def _naively(
        self,
        plan: StagePlan,
        held: Sequence[Held],
        incoming: Incoming,
        recorder: Recorder,
        leaving: Leaving,
        durable: Durable,
    ) -> None:
        def rebuild() -> None:
            if self._ranks.group:
                dist.new_group(backend="gloo", timeout=timedelta(seconds=self._group_s))

        switch_naively(
            plan,
            held,
            incoming.content,
            self._link,
            self._buffers,
            recorder,
            self._comm,
            self._saving(leaving, durable),
            rebuild,
        )

    def _saving(self, leaving: Leaving, durable: Durable) -> Callable[[Mapping[int, Tensor]], None]:
        """Makes the old task durable, given its host twins, before anything else is done."""

        def save(twins: Mapping[int, Tensor]) -> None:
            leaving.note(twins)
            # In the thread beside also here, whose communicator and store are meant.
            work = self._beside.do(lambda: durable(leaving), f"making {leaving.name} durable")
            work.result()

        return save

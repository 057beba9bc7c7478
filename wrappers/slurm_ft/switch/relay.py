"""Tasks one after the other on warm ranks: what ``ft-run --chain`` runs.

One session, one set of groups and one trainer see the whole chain. While a task trains, the next
one's first state is made ready in host memory by the thread beside. At its end each stage moves by
itself (:mod:`slurm_ft.switch.overlap`), the thread beside makes the old task durable, writes its
result and its record, and the ranks go on with the new task, whose layers they wait for one by one.

A task whose form differs from the one before starts cold on the same ranks: a new model and
engine, said so. The record of a task is written after everything that it vouches for; until then a
crash brings the task back from its last complete checkpoint. What fails beside training fails the
chain, on all ranks at the same step: nobody trains on behind a task that was lost.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import slurm_ft
from slurm_ext.domain.errors import ConfigError, SlurmExtError
from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.layout import examine
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.comm import Comm
from slurm_ft.session.agreement import Kind as Wish
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.beside import Beside, Job
from slurm_ft.switch.chain import ChainState, Done, read_chain
from slurm_ft.switch.following import Following
from slurm_ft.switch.gathering import Marks, gathering
from slurm_ft.switch.incoming import (
    Incoming,
    blocks_of,
    frozen_in,
    held_by,
    make_ready,
    marks_of,
)
from slurm_ft.switch.leaving import Leaving
from slurm_ft.switch.links import CudaLink, EmulatedLink, Link
from slurm_ft.switch.memory import device_free, host_free
from slurm_ft.switch.naive import switch_naively
from slurm_ft.switch.overlap import HostBuffers, StageSwitch, SwitchError
from slurm_ft.switch.plan import Mode, StagePlan, plan_stage
from slurm_ft.switch.spread import layout_for, ranks_on_node
from slurm_ft.switch.standing import End, Teller
from slurm_ft.switch.storages import Held
from slurm_ft.switch.timeline import Kind, Recorder
from slurm_ft.train.engine import substitute
from slurm_ft.train.layout import Layout, stages_of
from slurm_ft.train.options import Options
from slurm_ft.train.output import fault
from slurm_ft.train.program import (
    Records,
    check_position,
    position_of,
    sayer,
    write_result,
)
from slurm_ft.train.ranks import Ranks, fix_workspace, joined, prepare_device
from slurm_ft.train.results import ResultError
from slurm_ft.train.task import Task
from slurm_ft.train.trainer import Trainer, metrics_of

_log = logging.getLogger(__name__)

# A first step, a save of everything: what the thread beside may wait for before it gives up.
LIMIT_S = 1800.0
# Of a rank that was told to leave, for what the thread beside still does.
LEAVE_S = 20.0
# A failure was agreed on: until the thread beside of every rank has met it.
FAIL_S = 30.0


def run_chain(options: Options, environ: Mapping[str, str], path: Path, how: str) -> None:
    """Train the chain of a file to its end. ``how`` is overlapped, naive or cold."""
    if options.checkpoint == "none":
        raise ConfigError(
            "checkpoint=none",
            "a task of a chain is done when its last checkpoint is there",
            "write async or sync",
        )
    fix_workspace()
    if options.threads:
        torch.set_num_threads(options.threads)
    given = read_chain(path)
    with joined(environ, options.device) as ranks:
        Relay(options, environ, ranks, path, given, how).run()


class _Present:
    """The state of whatever task trains now, for a pause that gives its memory back."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.trainer is None else self.trainer.state.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if self.trainer is not None:
            self.trainer.state.load_state_dict(saved)


class Relay:
    """One rank's part of a chain."""

    def __init__(
        self,
        options: Options,
        environ: Mapping[str, str],
        ranks: Ranks,
        file: Path,
        given: Sequence[Task],
        how: str,
    ) -> None:
        self._options, self._environ, self._ranks = options, environ, ranks
        self._file, self._given, self._how = file, given, how
        self._say = sayer(ranks)
        self._switch: StageSwitch | None = None
        self._prepared: StageSwitch | None = None
        self._came_as: Incoming | None = None
        # Of the frozen storages, when the switch was planned.
        self._marks: dict[str, int] = {}
        self._present = _Present()
        self._local = ranks_on_node(environ)
        cuda = ranks.device.type == "cuda"
        self._link: Link = CudaLink(ranks.device) if cuda else EmulatedLink()
        self._buffers = HostBuffers(self._link)
        self._beside = Beside("switch-beside")

    def run(self) -> None:
        """All tasks that are not done yet."""
        with slurm_ft.session(
            state={"task": self._present}, checkpoint=self._options.checkpoint
        ) as ft:
            self._ft = ft
            settings = ft.settings
            self._chain = ChainState(
                settings.state_dir or settings.checkpoint_dir, settings.checkpoint_dir
            )
            if ft.rank == 0:
                self._chain.announce(self._file)
            self._following = Following(
                self._chain, self._given, ft.comm, self._unfit, self._unwritable
            )
            self._standing = Teller(
                self._chain.folder,
                writes=ft.rank == 0,
                attempt=ft.attempt,
                ranks=self._ranks.world,
                wish=self._options.wish,
                environ=self._environ,
            )
            self._side, self._store = self._exchange()
            ft.on_agreed[Wish.FAIL] = self._fail_together
            self._pause = ft.on_agreed.get(Wish.PAUSE)
            if self._pause is not None:
                ft.on_agreed[Wish.PAUSE] = self._paused
            try:
                self._all_tasks()
                self._beside.finish(LIMIT_S)
                self._beside.close()
            except SystemExit:
                # Told to leave. What is on its way to the disk is worth a moment.
                if not self._beside.idle(LEAVE_S) or self._beside.failed is not None:
                    why = self._beside.failed or f"not over within {LEAVE_S:g} s"
                    self._say(f"left before everything of the last switch was durable: {why}")
                self._tell(End.LEFT)
                raise
            except Exception as exc:
                self._tell(End.FAILED, str(exc))
                raise
            self._tell(End.OVER)
            self._following.check_all_trained()

    def _tell(self, end: End | None = None, why: str = "") -> None:
        """Where the chain stands, for people."""
        self._standing.outcomes(self._following.left_out, self._following.failed)
        if end is not None:
            self._standing.ends(end, why)

    # --- the chain ------------------------------------------------------------------------------

    def _all_tasks(self) -> None:
        task = self._following.first() or self._following.last(None)
        if task is None:
            self._say("no task of the chain is left to train")
            return
        trainer, step = self._cold(task)
        marks: Marks | None = None
        came, goes = Recorder(self._stage(trainer)), Recorder(self._stage(trainer))
        while True:
            step, incoming = self._train(trainer, step, came, goes, marks)
            counts = trainer.count().tolist()
            following = incoming.task if incoming else self._following.last(trainer.task)
            if following is None:
                self._end(trainer, step, counts)
                return
            old = trainer.task.name
            marks = Marks(last_step_s=time.monotonic())
            came, goes = goes, Recorder(self._stage(trainer))
            why = "asked for" if self._how == "cold" else trainer.differs(following)
            if why:
                self._say(f"{following.name} starts cold after {trainer.task.name}: {why}")
                self._end(trainer, step, counts)
                marks.durable_s = time.monotonic()
                came.add(Kind.SAVE, marks.last_step_s, marks.durable_s, label=old)
                del trainer
                trainer, step = self._cold(following)
                came.add(Kind.START, marks.durable_s, time.monotonic(), label=following.name)
            else:
                incoming = incoming or self._ready(trainer, following).result(LIMIT_S)
                step = self._hand_over(trainer, step, incoming, counts, came, marks)
            gather = gathering(
                self._side,
                self._chain,
                came,
                marks,
                how="cold" if why else self._how,
                model=self._environ.get("FT_MODEL", ""),
                old=old,
                new=following.name,
                limit_s=LIMIT_S,
            )
            self._beside.do(gather)

    def _train(
        self,
        trainer: Trainer,
        step: int,
        came: Recorder,
        goes: Recorder,
        marks: Marks | None,
    ) -> tuple[int, Incoming | None]:
        """Steps of the present task to its end; also the next task, where one was made ready.

        Its first step belongs to the switch that brought it (``came``, ``marks``), its last one to
        the next (``goes``).
        """
        task, options = trainer.task, self._options
        self._standing.begins(task.name)
        following = self._following.after(task)
        self._tell()
        job: Job[Incoming] | None = None
        asked = False
        if following is not None and self._how != "cold" and not trainer.differs(following):
            job = self._ready(trainer, following)
        with Records(options, self._ranks, self._ft.attempt, task=task.name) as records:
            while step < task.steps:
                if self._beside.failed is not None:
                    self._ft.want(Wish.FAIL)
                if step == task.steps - 1 and following is not None and job is not None:
                    # Here, since between two tasks nobody waits for the others.
                    job = self._wanted_still(following, job)
                    asked = True
                    if job is not None and job.well():
                        self._prefetch(trainer, job.result(), goes)
                began, began_s = time.perf_counter(), time.monotonic()
                made = trainer.step(step + 1, options.emulate_step_s)
                step += 1
                label = f"{task.name} step {step}"
                if marks is not None and not marks.first_step_s:
                    marks.first_step_s = time.monotonic()
                    came.add(Kind.COMPUTE, began_s, marks.first_step_s, label=label)
                if step == task.steps:
                    goes.add(Kind.COMPUTE, began_s, time.monotonic(), label=label)
                wanted = options.loss_log is not None or step % options.log_every == 0
                loss = trainer.mean_loss(made) if wanted else None
                records.step(step, loss, time.perf_counter() - began, made.compute_s)
                if loss is not None and step % options.log_every == 0:
                    self._say(f"{task.name} step {step} loss {loss:.6f}")
                self._ft.step(
                    step,
                    samples=trainer.layout.global_batch,
                    position=position_of(step, trainer.layout, task),
                    compute_s=made.compute_s,
                )
        if marks is not None and not marks.first_step_s:
            marks.first_step_s = time.monotonic()  # it came with all of its steps made
        if job is not None and following is not None and not asked:
            job = self._wanted_still(following, job)
        if job is None:
            return step, None
        return step, job.result(LIMIT_S)

    def _wanted_still(self, task: Task, job: Job[Incoming]) -> Job[Incoming] | None:
        """The task that was made ready, unless it was taken out meanwhile. Collective."""
        if self._following.begins(task):
            return job
        self._say(f"{task.name} was taken out of the chain")
        return None

    def _fail_together(self, _: int) -> None:
        """All ranks are at the same step, and beside training something failed on some of them."""
        self._beside.idle(FAIL_S)
        # The present task loses nothing that can still be saved.
        with contextlib.suppress(SlurmExtError):
            self._ft.save()
        failed = self._beside.failed
        raise failed or SwitchError("what another rank did beside training has failed: see there")

    def _paused(self, epoch: int) -> None:
        """A pause moves the task's memory: nothing else may be moving it then.

        The wait is bounded by what the others wait for this rank. Past it the pause is not
        answered, and whoever asked takes it back.
        """
        assert self._pause is not None
        until = time.monotonic() + self._ft.settings.collective_timeout_s / 4
        still = True
        for switch in (self._switch, self._prepared):
            if switch is not None:
                still = still and switch.early_over(until - time.monotonic())
        if self._beside.failed is None and still and self._beside.idle(until - time.monotonic()):
            if self._switch is not None:
                self._switch.all_ready()
            self._pause(epoch)
        else:
            _log.warning("rank %d: no pause: a task is still being moved", self._ft.rank)

    # --- beginning and ending a task --------------------------------------------------------------

    def _layout(self, task: Task) -> Layout:
        return layout_for(task, self._options.wish, self._environ, self._ranks.world)

    def _unwritable(self, output: str) -> str:
        """On each rank: why its part of a result could not be written there; "" = it could."""
        # The first replica's ranks write, the manifest's among them.
        wish = self._options.wish
        return fault(output) if self._ranks.rank < stages_of(self._environ, wish) else ""

    def _unfit(self, task: Task) -> str:
        """On rank 0: why a task cannot be trained here, or not be gone on with; "" = it can."""
        try:
            layout = self._layout(task)
            found = examine(self._chain.checkpoints_of(task)).complete
            if found:
                check_position(found[0].step, found[0].manifest.position, layout, task)
        except ConfigError as exc:
            return str(exc)
        return ""

    def _cold(self, task: Task) -> tuple[Trainer, int]:
        """A trainer made anew, the session's checkpoints in the task's own directory, its step."""
        # What the task before leaves on the device is not needed beside the new one, and an engine
        # and its model refer to each other.
        self._present.trainer = self._switch = self._prepared = self._came_as = None
        gc.collect()
        layout = self._layout(task)
        prepare_device(layout, self._ranks.device)
        self._say(
            f"{task.name}: {task.model}, {layout.local_batch} samples x {layout.gpus} x"
            f" {layout.accumulation}, {layout.stages} stages, {layout.precision},"
            f" frozen {task.frozen}"
        )
        if words := substitute(layout, self._ranks.device):
            self._say(words)
        trainer = Trainer(task, layout, self._ranks)
        torch.manual_seed(task.seed)
        for index, layer in enumerate(trainer.model.layers.values()):
            layer.register_forward_pre_hook(self._gate(index))
        self._go_on(trainer, 0, {})
        step = self._ft.restore()
        check_position(step, self._ft.position, layout, task)
        if step:
            self._say(f"{task.name} goes on after step {step}")
        return trainer, step

    def _go_on(self, trainer: Trainer, step: int, position: Mapping[str, Any]) -> None:
        self._present.trainer = trainer
        self._ft.next_task(
            self._chain.checkpoints_of(trainer.task),
            state={"task": trainer.state},
            step=step,
            position=position,
            total_steps=self._following.total_steps,
            steps_before=self._following.before(trainer.task),
        )

    def _end(self, trainer: Trainer, step: int, counts: Sequence[float]) -> None:
        """Finish a task without a switch: everything durable before this returns."""
        task = trainer.task
        self._ft.settle()
        if self._ft.last_saved_step != step:
            self._ft.save(step)
        weights = trainer.state.state_dict()["model"]
        job = self._beside.do(lambda: self._result(trainer.layout, task, step, counts, weights))
        job.result(LIMIT_S)

    def _result(
        self,
        layout: Layout,
        task: Task,
        step: int,
        counts: Sequence[float],
        weights: Mapping[str, Tensor],
    ) -> None:
        """In the thread beside: result and record. The checkpoint is durable already."""
        side = self._side
        told = side.gather(list(counts))
        sums = None if told is None else [sum(column) for column in zip(*told, strict=True)]
        metrics = metrics_of(task, side.broadcast(sums))
        try:
            write_result(task, layout, side, step, metrics, weights, self._say)
        except ResultError as exc:
            # Every rank has it. Neither the tasks behind nor the next start's need it.
            self._following.unwritten(task, str(exc))
            self._tell()
            return
        problem = ""
        if side.rank == 0:
            try:
                self._chain.record(Done(task.name, step, metrics, self._ft.attempt, time.time()))
            except OSError as exc:
                problem = str(exc)
        if problem := side.broadcast(problem):
            raise SwitchError(f"that {task.name} is done cannot be recorded: {problem}")

    # --- the switch -------------------------------------------------------------------------------

    def _gate(self, index: int) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._switch is not None:
                self._switch.ready(index)

        return wait

    def _ready(self, trainer: Trainer, task: Task) -> Job[Incoming]:
        """Make a task's first state in host memory, beside training."""
        frozen, layout = frozen_in(trainer), trainer.layout
        return self._beside.do(
            lambda: make_ready(
                task,
                layout=layout,
                ranks=self._ranks,
                store=self._store,
                directory=self._chain.checkpoints_of(task),
                frozen=frozen,
            )
        )

    def _plan(self, trainer: Trainer, held: Sequence[Held], incoming: Incoming) -> StagePlan:
        self._marks = marks_of(held, frozen_in(trainer))
        blocks = blocks_of(held, self._marks, self._came_as, incoming)
        device = self._ranks.device
        spare = device_free(device, self._local) if self._how == "overlapped" else 0
        return plan_stage(blocks, spare_bytes=spare, host_bytes=host_free(self._local))

    def _prefetch(self, trainer: Trainer, incoming: Incoming, recorder: Recorder) -> None:
        if self._how != "overlapped":
            return
        # A task of one step may be the last before its own layers have all come.
        self._all_here()
        held = held_by(trainer)
        plan = self._plan(trainer, held, incoming)
        self._buffers.reserve(plan)
        self._prepared = StageSwitch(
            plan, held, incoming.content, self._link, self._buffers, recorder
        )
        self._prepared.prefetch()

    def _all_here(self) -> None:
        """The present task has come in whole, also what no forward has waited for."""
        if self._switch is not None:
            self._switch.all_ready()
            self._switch = None

    def _still_holds(self, prepared: StageSwitch | None, held: Sequence[Held]) -> bool:
        """Whether what a switch was prepared on is still so."""
        if prepared is None:
            return False
        if self._marks == {entry.key: entry.mark() for entry in held if entry.key in self._marks}:
            return True
        _log.warning("rank %d: the last step has changed what is frozen", self._ft.rank)
        if not prepared.early_over(LIMIT_S):
            raise SwitchError(f"prefetching took longer than {LIMIT_S:g} s")
        return False

    def _hand_over(
        self,
        trainer: Trainer,
        step: int,
        incoming: Incoming,
        counts: Sequence[float],
        recorder: Recorder,
        marks: Marks,
    ) -> int:
        """The old task goes, the new one comes; returns the new one's step."""
        old, layout = trainer.task, trainer.layout
        self._ft.settle()
        # A task that came with all its steps made has perhaps not used all of its layers.
        self._all_here()
        saved = self._ft.last_saved_step == step
        states, meta = random_states.capture(), self._ft.meta()
        prepared, self._prepared = self._prepared, None
        held, frozen = held_by(trainer), frozen_in(trainer)
        if not self._still_holds(prepared, held):
            prepared = None
        plan = None if prepared is not None else self._plan(trainer, held, incoming)
        leaving = Leaving(trainer.state, held, self._came_as, self._marks)

        def durable() -> None:
            began = time.monotonic()
            if not saved:
                self._store.move(self._chain.checkpoints_of(old))
                self._store.save(step, {"task": leaving}, meta, random=states)
            self._result(layout, old, step, counts, leaving.state_dict()["model"])
            marks.durable_s = time.monotonic()
            recorder.add(Kind.SAVE, began, marks.durable_s, label=old.name)

        if self._how == "naive":
            assert plan is not None
            self._naively(plan, held, incoming, recorder, leaving, durable)
            incoming.keep_only(frozen)
        else:
            if prepared is None:
                assert plan is not None
                prepared = StageSwitch(
                    plan, held, incoming.content, self._link, self._buffers, recorder
                )
            switch = prepared
            if switch.serial:

                def save_first(twins: Mapping[int, Tensor]) -> None:
                    leaving.note(twins)
                    self._beside.do(durable).result(LIMIT_S)

                self._say(f"{old.name} is saved before {incoming.task.name} comes: {switch.words}")
                switch.drained(save_first)

                def when_here() -> None:
                    switch.all_ready()
                    switch.released()
                    incoming.keep_only(frozen)

                self._beside.do(when_here)
            else:
                switch.drained(leaving.note)

                def when_gone() -> None:
                    switch.gone()
                    durable()
                    switch.released()
                    incoming.keep_only(frozen)

                self._beside.do(when_gone)
            self._switch = switch
        trainer.adopt(incoming.task, fill=False, moments=False)
        incoming.seed()
        self._came_as = incoming
        self._go_on(trainer, incoming.step, incoming.position)
        if incoming.step:
            self._say(f"{incoming.task.name} goes on after step {incoming.step}")
        return incoming.step

    def _naively(
        self,
        plan: StagePlan,
        held: Sequence[Held],
        incoming: Incoming,
        recorder: Recorder,
        leaving: Leaving,
        durable: Callable[[], None],
    ) -> None:
        if plan.mode is not Mode.OVERLAPPED:
            raise SwitchError(f"the naive switch needs the host memory too: {plan.words}")

        def save(twins: Mapping[int, Tensor]) -> None:
            leaving.note(twins)
            self._beside.do(durable).result(LIMIT_S)

        def rebuild() -> None:
            if self._ranks.group:
                limit = timedelta(seconds=self._ft.settings.collective_timeout_s)
                dist.new_group(backend="gloo", timeout=limit)

        switch_naively(
            plan,
            held,
            incoming.content,
            self._link,
            self._buffers,
            recorder,
            self._ft.comm,
            save,
            rebuild,
        )

    # --- beside -----------------------------------------------------------------------------------

    def _exchange(self) -> tuple[Comm, CheckpointStore]:
        """Communicator and store for the thread beside. Collective.

        Made once, here: groups are numbered in the order in which they are made, so the thread
        must make none while the training thread may.
        """
        side: Comm = SoloComm()
        group = None
        if self._ranks.group:
            from slurm_ft.session.comms.torch_group import TorchComm, new_gloo_group

            side, group = TorchComm(LIMIT_S), new_gloo_group(None)
        settings = self._ft.settings
        store = CheckpointStore(
            settings.checkpoint_dir, side, group=group, blocks=settings.block_store
        )
        return side, store

    def _stage(self, trainer: Trainer) -> int:
        return trainer.layout.place_of(self._ranks.rank)[1]

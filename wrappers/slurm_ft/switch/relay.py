"""Tasks one after the other on warm ranks: what ``ft-run --chain`` runs.

One session, one set of groups and one trainer see the whole chain. While a task trains, the next
one's first state is made ready in host memory by the thread beside. At its end each stage moves by
itself (:mod:`slurm_ft.switch.handover`), the thread beside makes the old task durable, writes its
result and its record (:mod:`slurm_ft.switch.finishing`), and the ranks go on with the new task,
whose layers they wait for one by one. This module is the order of these things and no more: it
moves no bytes and writes no file.

A task whose form differs from the one before starts cold on the same ranks: a new model and
engine, said so. What fails beside training fails the chain, on all ranks at the same step, even
where the task that trains then has nothing to do with it: nobody trains on behind a task that was
lost.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import slurm_ft
from slurm_ext.domain.errors import ConfigError
from slurm_ft.checkpoint import random_states
from slurm_ft.session.agreement import Kind as Wish
from slurm_ft.session.session import Session
from slurm_ft.switch.agreed import Agreed, Present
from slurm_ft.switch.beside import LIMIT_S, Beside, Job
from slurm_ft.switch.chain import ChainState, read_chain
from slurm_ft.switch.finishing import Finisher, Trained, exchange
from slurm_ft.switch.fitness import Fitness
from slurm_ft.switch.following import Following
from slurm_ft.switch.gathering import Marks, gathering
from slurm_ft.switch.handover import Handover
from slurm_ft.switch.incoming import Incoming, frozen_in, make_ready
from slurm_ft.switch.leaving import Leaving
from slurm_ft.switch.spread import ranks_on_node
from slurm_ft.switch.standing import End, Teller
from slurm_ft.switch.timeline import Kind, Recorder
from slurm_ft.train.engine import substitute
from slurm_ft.train.options import Options
from slurm_ft.train.program import Records, check_position, position_of, sayer
from slurm_ft.train.ranks import Ranks, fix_workspace, joined, prepare_device
from slurm_ft.train.task import Task
from slurm_ft.train.trainer import Trainer

# Of a rank that was told to leave, for what the thread beside still does.
LEAVE_S = 20.0


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
        self._present = Present()
        self._beside = Beside("switch-beside")

    def run(self) -> None:
        """All tasks that are not done yet."""
        with slurm_ft.session(
            state={"task": self._present}, checkpoint=self._options.checkpoint
        ) as ft:
            self._open(ft)
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

    def _open(self, ft: Session) -> None:
        """What the chain needs of its session. Collective."""
        self._ft = ft
        settings = ft.settings
        self._chain = ChainState(
            settings.state_dir or settings.checkpoint_dir, settings.checkpoint_dir
        )
        if ft.rank == 0:
            self._chain.announce(self._file)
        self._fitness = Fitness(self._chain, self._options.wish, self._environ, self._ranks)
        self._following = Following(
            self._chain, self._given, ft.comm, self._fitness.unfit, self._fitness.unwritable
        )
        self._standing = Teller(
            self._chain.folder,
            writes=ft.rank == 0,
            attempt=ft.attempt,
            ranks=self._ranks.world,
            wish=self._options.wish,
            environ=self._environ,
        )
        self._side, self._store = exchange(
            self._ranks.group, settings.checkpoint_dir, settings.block_store
        )
        self._finisher = Finisher(
            self._side, self._store, self._chain, ft.attempt, self._say, self._unwritten
        )
        self._handover = Handover(
            self._how,
            self._ranks,
            ranks_on_node(self._environ),
            ft.comm,
            settings.collective_timeout_s,
            self._beside,
            self._say,
        )
        self._agreed = Agreed(ft, self._beside, self._handover)

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
        # Of the switches by which the present task came (none, yet) and will go.
        came, goes = self._recorder(trainer), self._recorder(trainer)
        while True:
            step, incoming = self._train(trainer, step, came, goes, marks)
            counts = trainer.count().tolist()
            following = incoming.task if incoming else self._following.last(trainer.task)
            if following is None:
                self._end(trainer, step, counts)
                return
            old = trainer.task.name
            marks = Marks(last_step_s=time.monotonic())
            came, goes = goes, self._recorder(trainer)
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
                incoming = incoming or self._ready(trainer, following).result()
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
            self._beside.do(gather, f"the time line of the switch to {following.name}")

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
                        self._handover.prefetch(trainer, job.result(), goes)
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
        return step, job.result()

    def _wanted_still(self, task: Task, job: Job[Incoming]) -> Job[Incoming] | None:
        """The task that was made ready, unless it was taken out meanwhile. Collective."""
        if self._following.begins(task):
            return job
        self._say(f"{task.name} was taken out of the chain")
        return None

    # --- beginning and ending a task --------------------------------------------------------------

    def _cold(self, task: Task) -> tuple[Trainer, int]:
        """A trainer made anew, the session's checkpoints in the task's own directory, its step."""
        # What the task before leaves on the device is not needed beside the new one, and an engine
        # and its model refer to each other.
        self._present.trainer = None
        self._handover.forget()
        gc.collect()
        layout = self._fitness.layout(task)
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

    def _gate(self, index: int) -> Callable[..., None]:
        return lambda *_: self._handover.wait_layer(index)

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
            ),
            f"making {task.name} ready",
        )

    def _end(self, trainer: Trainer, step: int, counts: Sequence[float]) -> None:
        """Finish a task without a switch: everything durable before this returns."""
        # A task that came with all its steps made has perhaps not used all of its layers, and they
        # must not be on their way any more when it is taken apart.
        self._handover.all_here()
        trained = Trained(trainer.task, trainer.layout, step, tuple(counts))
        self._ft.settle()
        if self._ft.last_saved_step != step:
            self._ft.save(step)
        weights = trainer.state.state_dict()["model"]
        job = self._beside.do(
            lambda: self._finisher.result(trained, weights), f"the result of {trained.task.name}"
        )
        job.result()

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
        trained = Trained(trainer.task, trainer.layout, step, tuple(counts))
        self._ft.settle()
        # Here, since the session and the random states are the new task's before this is durable.
        saved = self._ft.last_saved_step == step
        states, meta = random_states.capture(), self._ft.meta()

        def durable(leaving: Leaving) -> None:
            began = time.monotonic()
            if not saved:
                self._finisher.save(trained, leaving, meta, states)
            self._finisher.result(trained, leaving.state_dict()["model"])
            marks.durable_s = time.monotonic()
            recorder.add(Kind.SAVE, began, marks.durable_s, label=trained.task.name)

        self._handover.switch(trainer, incoming, recorder, durable)
        trainer.adopt(incoming.task, fill=False, moments=False)
        incoming.seed()
        self._go_on(trainer, incoming.step, incoming.position)
        if incoming.step:
            self._say(f"{incoming.task.name} goes on after step {incoming.step}")
        return incoming.step

    def _unwritten(self, task: Task, why: str) -> None:
        """In the thread beside: a task was trained in vain, so far."""
        self._following.unwritten(task, why)
        self._tell()

    def _recorder(self, trainer: Trainer) -> Recorder:
        return Recorder(trainer.layout.place_of(self._ranks.rank)[1])

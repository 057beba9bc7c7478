"""Tasks one after the other on warm ranks: what ``ft-run --chain`` runs.

One session, one set of groups and one trainer see the whole chain. While a task trains, the next
one's first state is made ready in host memory by the thread beside. At its end each stage moves by
itself (:mod:`slurm_ft.switch.overlap`), the thread beside makes the old task durable, writes its
result and its record, and the ranks go on with the new task, whose layers they wait for one by one.

A task whose form differs from the one before starts cold on the same ranks: a new model and
engine, said so. The record of a task is written after everything that it vouches for; until then a
crash brings the task back from its last complete checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import slurm_ft
from slurm_ext.domain.errors import ConfigError
from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.store import CheckpointStore
from slurm_ft.comm import Comm
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.beside import Beside, Job
from slurm_ft.switch.chain import ChainState, Done, read_chain, remaining, replace_durably
from slurm_ft.switch.links import CudaLink, EmulatedLink, Link
from slurm_ft.switch.memory import device_free, host_free
from slurm_ft.switch.naive import switch_naively
from slurm_ft.switch.overlap import HostBuffers, StageSwitch, SwitchError
from slurm_ft.switch.plan import Block, StagePlan, plan_stage
from slurm_ft.switch.storages import Held, address, collect, mirror
from slurm_ft.switch.timeline import Kind, Recorder, Span, Timeline
from slurm_ft.train.layout import Layout, resolve_layout
from slurm_ft.train.models import build_model
from slurm_ft.train.options import Options
from slurm_ft.train.program import Records, check_position, sayer, write_result
from slurm_ft.train.ranks import Ranks, fix_workspace, joined, prepare_device
from slurm_ft.train.state import TaskState
from slurm_ft.train.task import Task
from slurm_ft.train.trainer import Trainer

# A first step, a save of everything: what the thread beside may wait for before it gives up.
LIMIT_S = 1800.0
# Of a rank that was told to leave, for what the thread beside still does.
LEAVE_S = 20.0


@dataclass(slots=True)
class Incoming:
    """A task's first state in host memory: bytes by block key, and where it stands."""

    task: Task
    content: dict[str, Tensor]
    digests: dict[str, str]
    step: int = 0
    position: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Marks:
    """Moments of one switch on one rank, on the monotonic clock."""

    last_step_s: float = 0.0
    durable_s: float = 0.0
    first_step_s: float = 0.0


def run_chain(options: Options, environ: Mapping[str, str], path: Path, how: str) -> None:
    """Train the chain of a file to its end. ``how`` is overlapped, naive or cold."""
    fix_workspace()
    if options.threads:
        torch.set_num_threads(options.threads)
    given = read_chain(path)
    with joined(environ, options.device) as ranks:
        Relay(options, environ, ranks, path, given, how).run()


def _ranks_on_node(environ: Mapping[str, str]) -> int:
    """As torchrun or Slurm says; memory is shared out by it."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
        number = environ.get(name, "").split("(")[0].split(",")[0]
        if number.isdecimal():
            return max(1, int(number))
    return 1


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
        self._present: Incoming | None = None
        self._local = _ranks_on_node(environ)
        cuda = ranks.device.type == "cuda"
        self._link: Link = CudaLink(ranks.device) if cuda else EmulatedLink()
        self._buffers = HostBuffers(self._link)
        self._beside = Beside("switch-beside")

    def run(self) -> None:
        """All tasks that are not done yet."""
        layout = self._layout(self._given[0])
        prepare_device(layout, self._ranks.device)
        with slurm_ft.session(state={}, checkpoint=self._options.checkpoint) as ft:
            self._ft = ft
            settings = ft.settings
            self._chain = ChainState(
                settings.state_dir or settings.checkpoint_dir, settings.checkpoint_dir
            )
            if ft.rank == 0:
                self._chain.announce(self._file)
            self._side, self._store = self._exchange()
            try:
                self._all_tasks(layout)
            except SystemExit:
                # Told to leave. What is on its way to the disk is worth a moment.
                self._quietly_finish()
                raise
            self._beside.finish(LIMIT_S)
            self._beside.close()

    # --- the chain ------------------------------------------------------------------------------

    def _all_tasks(self, layout: Layout) -> None:
        task = self._following(None)
        if task is None:
            self._say("every task of the chain is done")
            return
        trainer = self._cold(task, layout)
        step = self._ft.restore()
        check_position(step, self._ft.position, trainer.layout)
        marks: Marks | None = None
        came, goes = Recorder(self._stage(trainer)), Recorder(self._stage(trainer))
        while True:
            step, incoming = self._train(trainer, step, came, goes, marks)
            metrics = trainer.evaluate()
            following = incoming.task if incoming is not None else self._following(trainer.task)
            if following is None:
                self._end(trainer, step, metrics)
                return
            marks = Marks(last_step_s=time.monotonic())
            came, goes = goes, Recorder(self._stage(trainer))
            why = "asked for" if self._how == "cold" else trainer.differs(following)
            if why:
                self._say(f"{following.name} starts cold after {trainer.task.name}: {why}")
                self._end(trainer, step, metrics)
                marks.durable_s = time.monotonic()
                trainer = self._cold(following, layout)
                step = self._ft.restore()
                check_position(step, self._ft.position, trainer.layout)
            else:
                incoming = incoming or self._ready(trainer, following).result(LIMIT_S)
                step = self._hand_over(trainer, incoming, metrics, came, marks)
            self._note_timeline(came, marks, "cold" if why else self._how)

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
        following = self._following(task)
        job: Job[Incoming] | None = None
        if following is not None and self._how != "cold" and not trainer.differs(following):
            job = self._ready(trainer, following)
        with Records(options, self._ranks, self._ft.attempt, task=task.name) as records:
            while step < task.steps:
                self._beside.check()
                if step == task.steps - 1 and job is not None and job.done():
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
                    position={"samples": step * trainer.layout.global_batch},
                    compute_s=made.compute_s,
                )
        if marks is not None and not marks.first_step_s:
            marks.first_step_s = time.monotonic()  # it came with all of its steps made
        if job is None:
            return step, None
        return step, job.result(LIMIT_S)

    def _following(self, after: Task | None) -> Task | None:
        """The first task that is neither done nor ``after``; rank 0's answer holds. Collective."""
        answer: Any = None
        if self._ft.rank == 0:
            try:
                tasks = self._chain.all_tasks(self._given)
                left = remaining(tasks, self._chain.done())
                index = next((i for i, t in enumerate(left) if after and t.name == after.name), -1)
                names = [task.name for task in left[index + 1 :]]
                answer = {"name": names[0] if names else "", "error": ""}
            except ConfigError as exc:
                answer = {"name": "", "error": str(exc)}
        answer = self._ft.comm.broadcast(answer)
        if answer["error"]:
            raise ConfigError("chain", answer["error"], "mend it; the job goes on from here")
        if not answer["name"]:
            return None
        tasks = self._chain.all_tasks(self._given)
        return next(task for task in tasks if task.name == answer["name"])

    # --- beginning and ending a task --------------------------------------------------------------

    def _layout(self, task: Task) -> Layout:
        return resolve_layout(
            self._environ,
            self._options.wish,
            world=self._ranks.world,
            global_batch=task.global_batch,
        )

    def _cold(self, task: Task, layout: Layout) -> Trainer:
        """A trainer made anew, and the session's checkpoints in the task's own directory."""
        if task.global_batch != layout.global_batch:
            layout = self._layout(task)
        trainer = Trainer(task, layout, self._ranks)
        torch.manual_seed(task.seed)
        self._present = None
        for index, layer in enumerate(trainer.model.layers.values()):
            layer.register_forward_pre_hook(self._gate(index))
        self._go_on(trainer, 0, {})
        return trainer

    def _go_on(self, trainer: Trainer, step: int, position: Mapping[str, Any]) -> None:
        task = trainer.task
        self._ft.next_task(
            self._chain.checkpoints_of(task),
            state={"task": trainer.state},
            step=step,
            position=position,
            total_steps=task.steps,
        )

    def _end(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Finish a task without a switch: everything durable before this returns."""
        task = trainer.task
        if self._ft.last_saved_step != step:
            self._ft.save(step)
        weights = trainer.state.state_dict()["model"]
        job = self._beside.do(lambda: self._result(trainer.layout, task, step, metrics, weights))
        job.result(LIMIT_S)

    def _result(
        self,
        layout: Layout,
        task: Task,
        step: int,
        metrics: Mapping[str, float],
        weights: Mapping[str, Tensor],
    ) -> None:
        """In the thread beside: result and record. The checkpoint is durable already."""
        write_result(task, layout, self._side, step, metrics, weights, self._say)
        if self._side.rank == 0:
            self._chain.record(Done(task.name, step, metrics, self._ft.attempt, time.time()))
        self._side.barrier()

    # --- the switch -------------------------------------------------------------------------------

    def _gate(self, index: int) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            if self._switch is not None:
                self._switch.ready(index)

        return wait

    def _held(self, trainer: Trainer) -> list[Held]:
        return collect(list(trainer.model.layers.values()), trainer.state.optimizer)

    def _ready(self, trainer: Trainer, task: Task) -> Job[Incoming]:
        """Make a task's first state in host memory, beside training."""
        frozen = self._frozen(trainer)
        layout = trainer.layout

        def make() -> Incoming:
            stage = self._stage(trainer)
            model = build_model(task, stage, layout.stages)
            state = TaskState(task, model)
            self._store.move(self._chain.checkpoints_of(task))
            loaded = self._store.load({"task": state}, random=False)
            optimizer = state.optimizer if loaded is not None else None
            held = collect(list(model.layers.values()), optimizer)
            content = {entry.key: entry.bytes for entry in held}
            if self._ranks.device.type == "cuda":
                content = {key: value.pin_memory() for key, value in content.items()}
            digests = {entry.key: entry.digest() for entry in held if entry.key in frozen}
            step = 0 if loaded is None else loaded.step
            return Incoming(task, content, digests, step, {} if loaded is None else loaded.position)

        return self._beside.do(make)

    def _frozen(self, trainer: Trainer) -> set[str]:
        return {
            entry.key
            for entry in collect(list(trainer.model.layers.values()), None)
            if not any(getattr(user, "requires_grad", False) for user in entry.users)
        }

    def _plan(self, trainer: Trainer, held: Sequence[Held], incoming: Incoming) -> StagePlan:
        frozen = self._frozen(trainer)
        clean = self._present.content if self._present is not None else {}
        blocks = []
        for entry in held:
            still = entry.key in frozen
            old = None
            if still:
                known = self._present.digests if self._present is not None else {}
                old = known.get(entry.key) or entry.digest()
            new = incoming.digests.get(entry.key)
            # A frozen block whose clean copy the host still has need not leave.
            keep = not still or (old != new and entry.key not in clean)
            fresh = entry.key not in incoming.content
            blocks.append(Block(entry.key, entry.layer, entry.nbytes, keep, old, new, fresh))
        device = self._ranks.device
        spare = device_free(device, self._local) if self._how == "overlapped" else 0
        return plan_stage(blocks, spare_bytes=spare, host_bytes=host_free(self._local))

    def _prefetch(self, trainer: Trainer, incoming: Incoming, recorder: Recorder) -> None:
        if self._how != "overlapped":
            return
        held = self._held(trainer)
        plan = self._plan(trainer, held, incoming)
        self._buffers.reserve(plan)
        self._switch = None
        self._prepared = StageSwitch(
            plan, held, incoming.content, self._link, self._buffers, recorder
        )
        self._prepared.prefetch()

    def _hand_over(
        self,
        trainer: Trainer,
        incoming: Incoming,
        metrics: Mapping[str, float],
        recorder: Recorder,
        marks: Marks,
    ) -> int:
        """The old task goes, the new one comes; returns the new one's step."""
        old, layout, step = trainer.task, trainer.layout, trainer.task.steps
        saved = self._ft.last_saved_step == step
        self._ft.settle()
        states, meta = random_states.capture(), self._ft.meta()
        present = self._present
        state: dict[str, Any] = {}

        def note(twins: Mapping[int, Tensor]) -> None:
            known = dict(twins)
            if present is not None:
                for entry in held:
                    if address(entry.bytes) not in known and entry.key in present.content:
                        known[address(entry.bytes)] = present.content[entry.key]
            state.update(mirror(trainer.state.state_dict(), known))

        def durable() -> None:
            began = time.monotonic()
            if not saved:
                self._store.move(self._chain.checkpoints_of(old))
                self._store.save(step, {"task": state}, meta, random=states)
            self._result(layout, old, step, metrics, state["model"])
            marks.durable_s = time.monotonic()
            recorder.add(Kind.SAVE, began, marks.durable_s, label=old.name)

        prepared, self._prepared = self._prepared, None
        held = self._held(trainer)
        if self._how == "naive":
            self._naively(held, incoming, trainer, recorder, note, durable)
        else:
            switch = prepared or StageSwitch(
                self._plan(trainer, held, incoming),
                held,
                incoming.content,
                self._link,
                self._buffers,
                recorder,
            )
            if switch.serial:

                def save_first(twins: Mapping[int, Tensor]) -> None:
                    note(twins)
                    self._beside.do(durable).result(LIMIT_S)

                self._say(f"{old.name} is saved before {incoming.task.name} comes: {switch.words}")
                switch.drained(save_first)
            else:
                switch.drained(note)

                def when_gone() -> None:
                    switch.gone()
                    durable()
                    switch.released()

                self._beside.do(when_gone)
            self._switch = switch
        trainer.adopt(incoming.task, fill=False, moments=False)
        torch.manual_seed(incoming.task.seed)
        self._present = incoming
        self._go_on(trainer, incoming.step, incoming.position)
        return incoming.step

    def _naively(
        self,
        held: Sequence[Held],
        incoming: Incoming,
        trainer: Trainer,
        recorder: Recorder,
        note: Callable[[Mapping[int, Tensor]], None],
        durable: Callable[[], None],
    ) -> None:
        plan = self._plan(trainer, held, incoming)
        if plan.mode != "overlapped":
            raise SwitchError(f"the naive switch needs the host memory too: {plan.words}")

        def save(twins: Mapping[int, Tensor]) -> None:
            note(twins)
            self._beside.do(durable).result(LIMIT_S)

        def rebuild() -> None:
            if self._ranks.group:
                dist.new_group(backend="gloo")

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

    def _quietly_finish(self) -> None:
        try:
            self._beside.finish(LEAVE_S)
        except (Exception, TimeoutError) as exc:
            self._say(f"left before everything of the last switch was durable: {exc}")

    def _note_timeline(self, recorder: Recorder, marks: Marks, how: str) -> None:
        """Beside training: when the first step is done, gather what the stages did, and write."""
        # Monotonic clocks of two nodes have nothing in common; their clocks of day nearly agree.
        offset = time.time() - time.monotonic()
        model = self._environ.get("FT_MODEL", "")

        def gather() -> None:
            deadline = time.monotonic() + LIMIT_S
            while not marks.first_step_s and time.monotonic() < deadline:
                time.sleep(0.02)
            mine = {
                "last": marks.last_step_s + offset,
                "durable": marks.durable_s + offset,
                "first": marks.first_step_s + offset,
                "spans": [
                    [s.stage, s.kind.value, s.start_s, s.end_s, s.nbytes, s.label]
                    for s in recorder.spans(-offset)
                ],
            }
            rows = self._side.gather(mine)
            if rows is None:
                return
            origin = max(row["last"] for row in rows)
            spans = tuple(
                replace(Span(a, Kind(k), b, c, n, t), start_s=b - origin, end_s=c - origin)
                for row in rows
                for a, k, b, c, n, t in row["spans"]
            )
            line = Timeline(
                how,
                1 + max(span.stage for span in spans),
                spans,
                last_step_s=0.0,
                durable_s=max(row["durable"] for row in rows) - origin,
                first_step_s=max(row["first"] for row in rows) - origin,
                model=model,
                gpus=self._ranks.world,
            )
            path = self._chain.next_timeline()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(path, line.to_json().encode() + b"\n")

        self._beside.do(gather)

"""Forward and backward of one optimizer step, over replicas and stages.

Two forms with one surface: :class:`Replicated` (DistributedDataParallel) and :class:`Pipelined`
(torch.distributed.pipelining, replicas of a stage summing their gradients themselves, because the
schedule and DDP would each want to decide which micro-batch is the last). Both leave the mean
gradient over the global batch in ``.grad`` and give the mean loss over it. No optimizer here.

Both make one practice step when they are built, its gradients dropped. DDP lays its buckets out
anew after its first backward, which changes the order of sums between three ranks and more: a
resumed run would differ from an undisturbed one in its last bits, if its first real step were the
first one ever. A shortage of memory shows before a checkpoint is loaded.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from slurm_ft import variables
from slurm_ft.train.layout import Layout
from slurm_ft.train.models import Stage, loss_of, stage_layers, trained
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.task import ModelKind, Task

Rounds = Callable[[int], tuple[Tensor, Tensor]]


class Engine(Protocol):
    """What the trainer drives."""

    model: Stage

    def step(self, rounds: Rounds, delay_s: float = 0.0) -> tuple[Tensor | None, float]:
        """Gradients of one global batch; ``rounds`` gives the samples of round 0, 1, ...

        Returns this rank's part of the mean loss (``None`` where it sees no loss) and the seconds
        that it computed before it first waited for another replica. ``delay_s`` stands for
        computing that takes longer.
        """
        ...

    def mean_loss(self, part: Tensor | None) -> float:
        """The mean loss over the global batch, from all ranks' parts. Collective."""
        ...

    def scores(self, inputs: Tensor) -> Tensor | None:
        """Scores of some samples without gradients; ``None`` on all but the last stage."""
        ...


def build_engine(task: Task, layout: Layout, ranks: Ranks, model: Stage) -> Engine:
    """The engine for a model that `build_model` made for this rank's stage. Collective."""
    if layout.stages > 1:
        return Pipelined(task, layout, ranks, model)
    return Replicated(layout, ranks, model)


def autocast(layout: Layout, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bf16 where the layout says so."""
    if layout.precision != "bf16":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.autocast(device.type, dtype=torch.bfloat16)
    return context


class Replicated:
    """The whole model on every rank."""

    def __init__(self, layout: Layout, ranks: Ranks, model: Stage) -> None:
        self.model = model
        self._layout, self._ranks = layout, ranks
        self._ready_at = 0.0
        self._parallel: Any = model
        if ranks.group:
            on_gpu = ranks.device.type == "cuda"
            self._parallel = DistributedDataParallel(
                model, device_ids=[ranks.device.index] if on_gpu else None
            )
            for _, parameter in trained(model):
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _parameter: Tensor) -> None:
        # The last call of a step comes when the last gradient is there and the last bucket has
        # not yet been sent: from here on this rank depends on the others.
        self._ready_at = time.perf_counter()

    def step(self, rounds: Rounds, delay_s: float = 0.0) -> tuple[Tensor | None, float]:
        began = time.perf_counter()
        count = self._layout.accumulation
        device = self._ranks.device
        total = torch.zeros((), device=device)
        for index in range(count):
            inputs, targets = rounds(index)
            last = index == count - 1
            quiet = self._ranks.group and not last
            inputs, targets = inputs.to(device), targets.to(device)
            with self._parallel.no_sync() if quiet else nullcontext():
                with autocast(self._layout, device):
                    loss = loss_of(self._parallel(inputs), targets) / count
                if last and delay_s:
                    time.sleep(delay_s)
                loss.backward()
            total += loss.detach()
        ended = self._ready_at if self._ranks.group else time.perf_counter()
        return total, max(0.0, ended - began)

    def mean_loss(self, part: Tensor | None) -> float:
        assert part is not None
        if self._ranks.group:
            part = part.clone()
            dist.all_reduce(part)
        return float(part) / self._ranks.world

    def scores(self, inputs: Tensor) -> Tensor | None:
        with torch.no_grad(), autocast(self._layout, self._ranks.device):
            scores: Tensor = self.model(inputs.to(self._ranks.device))
        return scores


class Pipelined:
    """One stage of the model on every rank; a pipeline of neighbours is one replica."""

    def __init__(self, task: Task, layout: Layout, ranks: Ranks, model: Stage) -> None:
        self.model = model
        self._layout, self._ranks, self._task = layout, ranks, task
        self._replica, self._stage = layout.place_of(ranks.rank)
        self._last = self._stage == layout.stages - 1
        self._group, self._peers = _groups(layout, ranks)
        self._losses: list[Tensor] = []
        self._schedule = self._build_schedule()

    def _build_schedule(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        layout, device = self._layout, self._ranks.device
        stage = PipelineStage(
            self.model,
            self._stage,
            layout.stages,
            device,
            input_args=self._passed(self._stage),
            output_args=self._passed(self._stage + 1),
            group=self._group,
        )
        wanted_1f1b = layout.schedule == "1f1b" and loses_no_sends(device)
        kind = Schedule1F1B if wanted_1f1b else ScheduleGPipe
        scaled = "scale_grads" in inspect.signature(kind.__init__).parameters
        # Losses are scaled here, since a step may be several rounds of the schedule.
        options = {"scale_grads": False} if scaled else {}
        return kind(stage, layout.micro_batches, loss_fn=self._loss, **options)

    def _passed(self, stage: int) -> Tensor:
        """An example of what enters a stage, or leaves the last one."""
        task, rows = self._task, self._layout.micro_samples
        if stage < self._layout.stages:
            example = _example(task, rows, first=stage == 0)
        elif task.model is ModelKind.VIT:
            example = torch.zeros(rows, task.classes)
        else:
            example = torch.zeros(rows, task.length, task.vocab)
        example = example.to(self._ranks.device)
        # Gradients come back as far as the first stage that trains something, and no further.
        before = sum(len(stage_layers(task, i, self._layout.stages)) for i in range(stage))
        return example.requires_grad_(before > task.frozen_layers)

    def _loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        rounds = self._layout.micro_batches * self._layout.accumulation
        loss = loss_of(scores, targets) / rounds
        self._losses.append(loss.detach())
        return loss

    def step(self, rounds: Rounds, delay_s: float = 0.0) -> tuple[Tensor | None, float]:
        began = time.perf_counter()
        device = self._ranks.device
        self._losses = []
        for index in range(self._layout.accumulation):
            if delay_s and index == 0:
                time.sleep(delay_s)
            self._round(rounds(index), device)
        computed_s = time.perf_counter() - began
        self._sum_gradients()
        return (torch.stack(self._losses).sum() if self._last else None), computed_s

    def _round(self, samples: tuple[Tensor, Tensor], device: torch.device) -> None:
        inputs, targets = samples
        with autocast(self._layout, device):
            first = (inputs.to(device),) if self._stage == 0 else ()
            if self._last:
                self._schedule.step(*first, target=targets.to(device), losses=[])
            else:
                self._schedule.step(*first)

    def _sum_gradients(self) -> None:
        """The mean over replicas, in one buffer whose order the model fixes."""
        if self._layout.replicas == 1:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._peers)
        flat /= self._layout.replicas
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def mean_loss(self, part: Tensor | None) -> float:
        value = torch.zeros((), device=self._ranks.device) if part is None else part.clone()
        dist.all_reduce(value)
        return float(value) / self._layout.replicas

    def scores(self, inputs: Tensor) -> Tensor | None:
        """By plain sends between neighbours: a schedule wants batches of its own size."""
        rank, device = self._ranks.rank, self._ranks.device
        if self._stage == 0:
            x = inputs.to(device)
        else:
            x = _example(self._task, len(inputs), first=False).to(device)
            dist.recv(x, rank - 1, group=self._group)
        with torch.no_grad(), autocast(self._layout, device):
            x = self.model(x)
        if self._last:
            return x
        dist.send(x.contiguous(), rank + 1, group=self._group)
        return None


def loses_no_sends(device: torch.device) -> bool:
    """Whether 1F1B works on the device with this torch.

    Of a batch of sends and receives older releases (2.6) wait for the last one only. That is the
    whole batch with NCCL, but one of several with gloo, whose unawaited sends get lost: the
    schedule hangs. GPipe, which never has two at once, gives the same gradients.
    """
    from torch.distributed.pipelining import schedules

    return device.type == "cuda" or hasattr(schedules, "_wait_batch_p2p")


def substitute(layout: Layout, device: torch.device) -> str:
    """What to say where another schedule than the wished one is taken; "" where it is not."""
    if layout.stages > 1 and layout.schedule == "1f1b" and not loses_no_sends(device):
        return "1F1B hangs on gloo with this torch: GPipe does the same with more memory"
    return ""


def practise(engine: Engine, rounds: Rounds) -> None:
    """One step whose gradients are dropped; see the module's docstring. Collective."""
    engine.step(rounds)
    for parameter in engine.model.parameters():
        parameter.grad = None


def _example(task: Task, rows: int, *, first: bool) -> Tensor:
    """A tensor of the form that enters a stage."""
    if not first:
        length = task.length
        if task.model is ModelKind.VIT:
            length = (task.image // task.patch) ** 2
        return torch.zeros(rows, length, task.dim)
    if task.model is ModelKind.VIT:
        return torch.zeros(rows, 3, task.image, task.image)
    return torch.zeros(rows, task.length, dtype=torch.long)


def _groups(layout: Layout, ranks: Ranks) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's pipeline, and the ranks that hold the same stage. Every rank makes all."""
    stages, mine = layout.stages, layout.place_of(ranks.rank)
    form = (stages, layout.replicas)
    if form in ranks.parts:
        return ranks.parts[form]
    # A peer that died meanwhile is missed here at once, by its closed connections. A new group has
    # none yet and would wait for it until the time-out.
    dist.all_reduce(torch.zeros(1, device=ranks.device))
    # Not inherited from the world's group: a peer that dies now would be waited for by torch's own.
    limit = timedelta(seconds=float(os.environ.get(variables.COLLECTIVE_TIMEOUT_S) or 600))
    found: dict[str, Any] = {}
    for replica in range(layout.replicas):
        group = dist.new_group([replica * stages + stage for stage in range(stages)], timeout=limit)
        if replica == mine[0]:
            found["pipeline"] = group
    for stage in range(stages):
        group = dist.new_group(
            [replica * stages + stage for replica in range(layout.replicas)], timeout=limit
        )
        if stage == mine[1]:
            found["peers"] = group
    ranks.parts[form] = found["pipeline"], found["peers"]
    return ranks.parts[form]

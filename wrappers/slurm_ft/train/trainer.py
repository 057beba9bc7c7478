"""One set of ranks training one task, which can be exchanged for another of the same form.

A trainer knows nothing of checkpoints, sessions or files: it makes steps and answers questions.
`adopt` puts another task in the place of the present one inside the same tensors, process groups
and engine, which is what a switch between tasks builds on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from slurm_ft.train.data import Data
from slurm_ft.train.engine import build_engine, practise
from slurm_ft.train.layout import Layout
from slurm_ft.train.models import Stage, build_model, loss_of, stage_layers
from slurm_ft.train.ranks import Ranks
from slurm_ft.train.state import StateMismatchError, TaskState
from slurm_ft.train.task import ModelKind, Task, differs

# Of an evaluation: bounded, whatever the number of samples.
_EVAL_BATCH = 64


def metrics_of(task: Task, sums: Sequence[float]) -> dict[str, float]:
    """The metrics from loss, right answers and answers, summed over all ranks."""
    total_loss, total_right, answers = sums
    mean, accuracy = total_loss / answers, total_right / answers
    if task.model is ModelKind.VIT:
        return {"top1": accuracy, "loss": mean}
    perplexity = math.exp(min(mean, 700.0))  # e^700 is nearly the largest number there is
    return {"token_accuracy": accuracy, "loss": mean, "perplexity": perplexity}


@dataclass(frozen=True, slots=True)
class Step:
    """What a step left: this rank's part of the loss, seconds before it waited for others."""

    loss_part: Tensor | None
    compute_s: float


class Trainer:
    """Makes the steps of a task on this rank. Every method but `differs` is collective."""

    def __init__(self, task: Task, layout: Layout, ranks: Ranks) -> None:
        self.task, self.layout, self.ranks = task, layout, ranks
        self._replica, stage = layout.place_of(ranks.rank)
        self.layers = stage_layers(task, stage, layout.stages)
        model = build_model(
            task, stage, layout.stages, grad_checkpointing=layout.grad_checkpointing
        ).to(ranks.device)
        self.state = TaskState(task, model)
        self.data = Data(task)
        self._stage = stage
        self._engine = build_engine(task, layout, ranks, model)
        practise(self._engine, lambda index: self._round(1, index))

    def step(self, number: int, delay_s: float = 0.0) -> Step:
        """Step ``number`` (from 1), its update included."""
        part, compute_s = self._engine.step(lambda index: self._round(number, index), delay_s)
        self.state.update(self.task.learning_rate_at(number))
        return Step(part, compute_s)

    def mean_loss(self, step: Step) -> float:
        """Of the global batch, the same on every rank."""
        return self._engine.mean_loss(step.loss_part)

    def evaluate(self) -> dict[str, float]:
        """The metrics of the task on its validation samples, the same on every rank."""
        sums = self.count()
        if self.ranks.group:
            sums = sums.to(self.ranks.device)
            dist.all_reduce(sums)
        return metrics_of(self.task, sums.tolist())

    def count(self) -> Tensor:
        """This rank's share of an evaluation, to be summed over all ranks: see `metrics_of`."""
        sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, answers
        total, replicas = self.task.eval_samples, self.layout.replicas
        for first in range(self._replica * _EVAL_BATCH, total, replicas * _EVAL_BATCH):
            inputs, targets = self.data.validation(first, min(_EVAL_BATCH, total - first))
            scores = self._engine.scores(inputs)
            if scores is not None:
                scores = scores.cpu()
                count = targets.numel()
                # Of scores that are no numbers argmax takes one all the same.
                numbers = scores.isfinite().all(dim=-1)
                right = int(((scores.argmax(dim=-1) == targets) & numbers).sum())
                loss = float(loss_of(scores, targets))
                sums += torch.tensor([loss * count, right, count], dtype=torch.float64)
        return sums

    def differs(self, task: Task) -> str:
        """Why ``task`` cannot take this one's place in the same tensors; "" = it can."""
        return differs(self.task, task)

    @property
    def model(self) -> Stage:
        """This rank's part of the model."""
        return self._engine.model

    def adopt(self, task: Task, *, fill: bool = True, moments: bool = True) -> None:
        """Go on with another task. Its weights are its first ones, unless somebody else brings
        them into `state` (``fill=False``); its moments begin at zero, unless somebody else brings
        those as well (``moments=False``)."""
        if why := self.differs(task):
            raise StateMismatchError(f"task {task.name} cannot follow {self.task.name}: {why}")
        if fill:
            fresh = build_model(task, self._stage, self.layout.stages)
            with torch.no_grad():
                for (_, live), (_, new) in zip(
                    self._engine.model.named_parameters(), fresh.named_parameters(), strict=True
                ):
                    live.copy_(new)
        self.state.begin(task, clear=moments)
        self.task, self.data = task, Data(task)

    def _round(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        return self.data.training(self.layout.samples_of(step, self._replica, index))

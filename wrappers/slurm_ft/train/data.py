"""Data that the program makes itself, one sample from its number, and learnable.

Images are a pattern of their class under noise; texts follow a random grammar in which each token
has a few successors. The row of samples is endless: every pass over the data set has its own
order, and a sample's place in the row fixes its content, whichever rank asks for it. That is what
makes a global batch the same on any number of ranks, and a resumed run a continuation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from slurm_ft.train.task import ModelKind, Task

# Noise beside the class pattern (standard deviations), and successors of a token: chosen so that a
# small model needs some tens of steps, which leaves tests something to see.
_NOISE = 1.5
_SUCCESSORS = 3
_GOLDEN = 0x9E3779B97F4A7C15


class Data:
    """The samples of a task, made on demand on the CPU."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._base = _seed(f"data:{task.model}:{task.seed}")
        maker = torch.Generator().manual_seed(self._base)
        if task.model is ModelKind.VIT:
            shape = (task.classes, 3, task.image, task.image)
            self._patterns = torch.randn(shape, generator=maker)
        else:
            successors = torch.randint(task.vocab, (task.vocab, _SUCCESSORS), generator=maker)
            self._successors: list[list[int]] = successors.tolist()
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def training(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets at these places of the endless row."""
        return self._batch([self._index(number) for number in numbers])

    def validation(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Samples that no training sees."""
        return self._batch(range(-first - 1, -first - count - 1, -1))

    def _index(self, number: int) -> int:
        turn, place = divmod(number, self._task.samples)
        return int(self._order(turn)[place])

    def _shuffled(self, turn: int) -> Tensor:
        generator = torch.Generator().manual_seed(_seed(f"order:{self._task.seed}:{turn}"))
        return torch.randperm(self._task.samples, generator=generator)

    def _batch(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        pairs = [self._sample(index) for index in indices]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def _sample(self, index: int) -> tuple[Tensor, Tensor]:
        task = self._task
        generator = torch.Generator().manual_seed((self._base ^ (index * _GOLDEN)) % 2**63)
        if task.model is ModelKind.VIT:
            label = torch.randint(task.classes, (), generator=generator)
            noise = torch.randn((3, task.image, task.image), generator=generator)
            return self._patterns[label] + _NOISE * noise, label
        # One token more than is read: the target of each place is the token after it.
        tokens = [int(torch.randint(task.vocab, (), generator=generator))]
        for way in torch.randint(_SUCCESSORS, (task.length,), generator=generator).tolist():
            tokens.append(self._successors[tokens[-1]][way])
        row = torch.tensor(tokens)
        return row[:-1], row[1:]


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

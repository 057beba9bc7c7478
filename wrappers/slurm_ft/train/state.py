"""Everything of a task that a checkpoint holds: weights and optimizer state, under global names.

Names, not the optimizer's own numbers: number 0 is another parameter on every pipeline stage, and
a checkpoint keeps one value per key. With names any number of replicas and stages can load it.
The optimizer's moments exist from the start, because a checkpoint is loaded into tensors that are
there. ``state_dict`` gives the live tensors; loading copies into them, so that every reference to
them (DDP's, the optimizer's, a mover's) stays true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.train.models import Stage, trained
from slurm_ft.train.task import Task

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class StateMismatchError(SlurmExtError):
    """A saved state, or another task, does not fit the model at hand."""


class TaskState:
    """Weights and AdamW of one stage."""

    def __init__(self, task: Task, model: Stage) -> None:
        self._model = model
        self._parameters = dict(trained(model))
        self._optimizer: torch.optim.AdamW | None = None
        if self._parameters:  # a stage of frozen layers has none
            self._optimizer = torch.optim.AdamW(
                list(self._parameters.values()),
                lr=task.learning_rate,
                weight_decay=task.weight_decay,
            )
            for parameter in self._parameters.values():
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def update(self, learning_rate: float) -> None:
        """One optimizer step with the gradients at hand, which are dropped."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What moves the trained parameters; ``None`` on a stage that has none."""
        return self._optimizer

    def begin(self, task: Task, *, clear: bool = True) -> None:
        """Take a task's weight decay and, with ``clear``, forget the moments."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["weight_decay"] = task.weight_decay
        for moments in self._optimizer.state.values() if clear else ():
            for name in _MOMENTS:
                moments[name].zero_()

    def layers(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors of each layer, in the order of the layers: what a switch moves."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self._model.layers}
        for key, tensor in self._flat().items():
            layer = key.split(".layers.", 1)[1].split(".", 1)[0]
            found[layer][key] = tensor
        return found

    def state_dict(self) -> dict[str, Any]:
        """The live tensors, nested as weights and moments."""
        nested: dict[str, Any] = {
            "model": {name: p.detach() for name, p in self._model.named_parameters()}
        }
        if self._optimizer is not None:
            state = self._optimizer.state
            nested["optimizer"] = {
                name: {moment: state[p][moment] for moment in _MOMENTS}
                for name, p in self._parameters.items()
            }
        return nested

    def frozen_names(self) -> list[str]:
        """What training does not change: a block store keeps it once for many checkpoints."""
        named = self._model.named_parameters()
        return [f"model.{name}" for name, p in named if not p.requires_grad]

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Copy into the live tensors. Raises StateMismatchError before anything is changed."""
        own = self._flat()
        given = _flatten(saved)
        missing = sorted(own.keys() - given.keys())
        if missing:
            raise StateMismatchError(
                f"the saved state lacks {missing[0]} and {len(missing) - 1} more; "
                "it is of another model, or freezes other layers"
            )
        for key, tensor in own.items():
            if given[key].shape != tensor.shape:
                raise StateMismatchError(
                    f"{key} is {tuple(given[key].shape)} in the saved state and "
                    f"{tuple(tensor.shape)} here; the models differ"
                )
        with torch.no_grad():
            for key, tensor in own.items():
                if given[key].data_ptr() != tensor.data_ptr():
                    tensor.copy_(given[key])

    def _flat(self) -> dict[str, Tensor]:
        return _flatten(self.state_dict())


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat

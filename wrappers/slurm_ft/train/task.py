"""What is trained: one fine-tuning task, its data, its head, its target. No torch here, no I/O.

The form in which several GPUs work on it is :mod:`slurm_ft.train.layout`; the two are apart so
that one set of warm ranks can take one task after another, and so that a task means the same
result whatever the allocation. ``backbone_seed`` stands for the pre-trained weights: tasks that
share it begin from identical backbones, and ``seed`` makes their data and heads differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from slurm_ext.domain.errors import ConfigError

# Random generators take no more.
_SEEDS = 2**63
_QUALITY = re.compile(r"(?P<metric>[A-Za-z][A-Za-z0-9_.-]*)(?P<comparison>>=|<=)(?P<bound>\S+)")


class ModelKind(StrEnum):
    """The two families."""

    VIT = "vit"
    DECODER = "decoder"


# What `evaluate` reports for each family, so that a quality target can be refused at the start.
METRICS = {
    ModelKind.VIT: ("top1", "loss"),
    ModelKind.DECODER: ("token_accuracy", "loss", "perplexity"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that the result must keep, as ``--ft-quality`` writes it."""

    metric: str
    comparison: str
    bound: float

    def kept(self, value: float) -> bool:
        """Whether ``value`` keeps it. NaN never does."""
        return value >= self.bound if self.comparison == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


@dataclass(frozen=True, slots=True)
class Task:
    """One fine-tuning task.

    ``frozen`` is ``none``, ``backbone`` (all but the head) or a number of layers from the input
    side, the embedding being the first of them. ``samples`` is the size of the data set, which is
    gone through again and again in a new order. ``image`` and ``patch`` are edge lengths in
    pixels; ``length`` is a sequence in tokens. ``output`` is where the result goes, "" = nowhere.
    """

    name: str = "task"
    model: ModelKind = ModelKind.VIT
    dim: int = 64
    depth: int = 4
    heads: int = 4
    classes: int = 8
    image: int = 16
    patch: int = 4
    vocab: int = 32
    length: int = 32
    samples: int = 4096
    seed: int = 0
    backbone_seed: int = 0
    frozen: str = "none"
    steps: int = 100
    global_batch: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 10
    eval_samples: int = 256
    output: str = ""
    quality: Target | None = None

    @property
    def frozen_layers(self) -> int:
        """How many of the ``depth + 2`` layers (embedding, blocks, head) are not trained."""
        if self.frozen == "none":
            return 0
        return self.depth + 1 if self.frozen == "backbone" else int(self.frozen)

    @property
    def input_shape(self) -> str:
        """As ``--ft-input`` writes it: resolution or sequence length."""
        return str(self.image if self.model is ModelKind.VIT else self.length)

    def learning_rate_at(self, step: int) -> float:
        """Of the update that ends step ``step`` (from 1): linear warm-up, then linear to a tenth.

        A function of the step alone, so that there is no scheduler whose state could be lost.
        """
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        rest = max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (1.0 - 0.9 * min(1.0, (step - self.warmup_steps) / rest))


# What fixes the shapes of the weights.
SHAPE = (
    "model",
    "dim",
    "depth",
    "heads",
    "classes",
    "image",
    "patch",
    "vocab",
    "length",
)
# What fixes shapes and trainable parameters: two tasks that agree on it can share tensors.
_FORM = (*SHAPE, "global_batch")


def differs(old: Task, new: Task) -> str:
    """Why ``new`` cannot take ``old``'s place in the same tensors, by its keys; "" = it can."""
    for name in _FORM:
        mine, other = getattr(old, name), getattr(new, name)
        if mine != other:
            return f"{name} is {other} and not {mine}"
    if old.frozen_layers != new.frozen_layers:
        return f"frozen is {new.frozen} and not {old.frozen}"
    return ""


def parse_target(text: str, model: ModelKind, place: str) -> Target:
    """Read ``METRIC>=X`` or ``METRIC<=X`` for a metric that the model has."""
    match = _QUALITY.fullmatch(text)
    known = METRICS[model]
    if match is None or match["metric"] not in known:
        raise ConfigError(
            f"{place}: quality={text!r}",
            f"a {model} reports {', '.join(known)}",
            f"write for instance {known[0]}>=0.8",
        )
    try:
        return Target(match["metric"], match["comparison"], float(match["bound"]))
    except ValueError as exc:
        raise ConfigError(
            f"{place}: quality={text!r}", "the bound is not a number", f"write {known[0]}>=0.8"
        ) from exc


def make_task(values: Mapping[str, Any], place: str) -> Task:
    """A checked task from a configuration's keys. Raises ConfigError naming key and place."""
    typed: dict[str, Any] = {}
    types = {field.name: type(field.default) for field in fields(Task)}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(
                f"{place}: {key}", "there is no such key", f"the keys are {', '.join(types)}"
            )
        typed[key] = _typed(key, value, types[key], place)
    quality = typed.pop("quality", None)
    task = Task(**typed)
    if quality is not None:
        task = replace(task, quality=parse_target(str(quality), task.model, place))
    _check(task, place)
    return task


def values_of(task: Task) -> dict[str, Any]:
    """What `make_task` makes the same task of, as JSON values: to tell it to other ranks."""
    values: dict[str, Any] = {f.name: getattr(task, f.name) for f in fields(Task)}
    values["model"] = task.model.value
    if (target := task.quality) is not None:
        # Not the shorter form that people are shown: a bound must cross as it is.
        values["quality"] = f"{target.metric}{target.comparison}{target.bound!r}"
    return values


def _typed(key: str, value: Any, wanted: type, place: str) -> Any:
    try:
        if key == "quality":
            return str(value) if value else None
        if wanted is ModelKind:
            return ModelKind(value)
        # A key without a value, or an unquoted yes, is no name and no directory.
        if value is None or isinstance(value, bool):
            raise ValueError("no text and no number")
        if wanted is str:
            return str(value)
        number = float(value)
        if wanted is int:
            if number != int(number):
                raise ValueError("not whole")
            return int(value)  # not of the float, which rounds large seeds
        return number
    except (ValueError, TypeError, OverflowError) as exc:
        kinds = {int: "a whole number", float: "a number", ModelKind: " or ".join(ModelKind)}
        raise ConfigError(
            f"{place}: {key}={value!r}", "unusable", f"write {kinds.get(wanted, 'text')}"
        ) from exc


def _check(task: Task, place: str) -> None:
    def refuse(key: str, reason: str, fix: str) -> None:
        raise ConfigError(f"{place}: {key}={getattr(task, key)!r}", reason, fix)

    for key in ("dim", "depth", "heads", "samples", "steps", "global_batch", "eval_samples"):
        if getattr(task, key) < 1:
            refuse(key, "too small", "write a number from 1 on")
    for key, least in (("classes", 2), ("image", 1), ("patch", 1), ("vocab", 2), ("length", 2)):
        if getattr(task, key) < least:
            refuse(key, "too small", f"write a number from {least} on")
    if task.dim % task.heads:
        refuse("heads", f"does not divide dim={task.dim}", "choose a divisor")
    if task.model is ModelKind.VIT and task.image % task.patch:
        refuse("patch", f"does not divide image={task.image}", "choose a divisor")
    for key in ("seed", "backbone_seed"):
        if not -_SEEDS <= getattr(task, key) < _SEEDS:
            refuse(key, "too large", "write a number of up to 18 digits")
    if not 0 < task.learning_rate < float("inf"):
        refuse("learning_rate", "not above 0", "write for instance 0.003")
    if task.warmup_steps < 0:
        refuse("warmup_steps", "negative", "write 0 or more")
    if not 0 <= task.weight_decay < float("inf"):
        refuse("weight_decay", "not a number from 0 on", "write for instance 0.01")
    if task.frozen not in ("none", "backbone") and not task.frozen.isdecimal():
        refuse("frozen", "unknown", "write none, backbone or a number of layers")
    if task.frozen_layers > task.depth + 1:
        refuse(
            "frozen",
            f"nothing would be left to train of {task.depth} blocks between embedding and head",
            f"freeze at most {task.depth + 1} layers",
        )

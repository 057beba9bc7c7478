"""Two small transformers, cut into stages: an image classifier and a language model.

Parameters are made from ``(seed, name)`` alone, so that a stage builds exactly its part and any
cut of the model starts from the same weights: no rank builds what it does not hold, nothing is
broadcast. The residual stream stays in fp32 under autocast, hence what passes between stages has
one dtype in every precision. Plain modules only: no dropout, so that training draws no random
numbers and a resumed run equals an undisturbed one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slurm_ft.train.task import ModelKind, Task

# Of a weight, unless its fan-in asks for less; as usual for transformers.
_INIT_STD = 0.02


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 4 * dim)
        self.narrow = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.narrow(functional.gelu(self.widen(self.norm_mlp(x))))


class PatchEmbedding(nn.Module):  # type: ignore[misc]
    """Image (batch, 3, edge, edge) to one vector per patch."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.patch = task.patch
        self.project = nn.Linear(3 * task.patch**2, task.dim)
        self.position = nn.Parameter(torch.empty((task.image // task.patch) ** 2, task.dim))

    def forward(self, image: Tensor) -> Tensor:
        return self.project(_patches(image, self.patch)) + self.position


class TokenEmbedding(nn.Module):  # type: ignore[misc]
    """Tokens (batch, length) to one vector each."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.token = nn.Embedding(task.vocab, task.dim)
        self.position = nn.Parameter(torch.empty(task.length, task.dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position


class Head(nn.Module):  # type: ignore[misc]
    """Scores in fp32: of the image from the mean vector, or of the next token at every place."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.pool = task.model is ModelKind.VIT
        self.norm = nn.LayerNorm(task.dim)
        self.scores = nn.Linear(task.dim, task.classes if self.pool else task.vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.scores(x.mean(dim=1) if self.pool else x).float()


class Stage(nn.Module):  # type: ignore[misc]
    """A run of consecutive layers under their names in the whole model."""

    def __init__(self, layers: dict[str, nn.Module], *, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            if self.recompute and isinstance(layer, Block) and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        return x


def layer_names(task: Task) -> list[str]:
    """All layers from input to output. Sorting the names keeps this order."""
    digits = len(str(task.depth))
    return ["embed", *(f"layer{i:0{digits}d}" for i in range(task.depth)), "output"]


def stage_layers(task: Task, stage: int, stages: int) -> list[str]:
    """The layers of one stage: blocks shared out evenly, embedding first and head last."""
    if stages > task.depth:
        raise ValueError(f"{task.depth} blocks cannot be cut into {stages} stages")
    names = layer_names(task)
    first, last = stage * task.depth // stages, (stage + 1) * task.depth // stages
    chosen = names[1 + first : 1 + last]
    if stage == 0:
        chosen = [names[0], *chosen]
    return [*chosen, names[-1]] if stage == stages - 1 else chosen


def build_model(
    task: Task, stage: int = 0, stages: int = 1, *, grad_checkpointing: bool = False
) -> Stage:
    """One stage of a task's model with its first weights, its frozen layers marked."""
    names = layer_names(task)
    layers = {name: _make(task, name) for name in stage_layers(task, stage, stages)}
    for name, layer in layers.items():
        _fill(layer, task.seed if name == names[-1] else task.backbone_seed, name)
        layer.requires_grad_(names.index(name) >= task.frozen_layers)
    return Stage(layers, recompute=grad_checkpointing)


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over everything that is predicted."""
    return functional.cross_entropy(scores.flatten(0, -2), target.flatten())


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that the optimizer moves, under the names they have in the whole model."""
    return ((n, p) for n, p in model.named_parameters() if p.requires_grad)


def _make(task: Task, name: str) -> nn.Module:
    if name == "embed":
        return PatchEmbedding(task) if task.model is ModelKind.VIT else TokenEmbedding(task)
    if name == "output":
        return Head(task)
    return Block(task.dim, task.heads, causal=task.model is ModelKind.DECODER)


def _fill(layer: nn.Module, seed: int, name: str) -> None:
    with torch.no_grad():
        for path, parameter in layer.named_parameters():
            if path.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # the gain of a norm
                parameter.fill_(1.0)
            else:
                digest = hashlib.sha256(f"{seed}:{name}.{path}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                std = min(_INIT_STD * 5, parameter.shape[-1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _patches(image: Tensor, patch: int) -> Tensor:
    """(batch, 3, edge, edge) to (batch, patches, 3 x patch x patch)."""
    batch, channels, edge, _ = image.shape
    grid = edge // patch
    cut = image.view(batch, channels, grid, patch, grid, patch)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, grid * grid, channels * patch * patch)

"""The result of a task on disk: weights as safetensors, and a manifest that vouches for them.

Another user may take a result over, so it holds nothing that would be unpickled. The safetensors
form is eight bytes of length, a JSON header and the raw bytes: writing it takes fewer lines than
depending on it. Each pipeline stage writes its own part; the manifest comes last, so a directory
with one is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.checkpoint.hashing import replace_durably
from slurm_ft.train.layout import Layout
from slurm_ft.train.task import Task


class ResultError(SlurmExtError):
    """A result could not be written; the task's last checkpoint is complete."""


MANIFEST = "result.json"
RESULT_VERSION = 1
_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def part_name(stage: int, stages: int) -> str:
    """The file of one stage."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def write_part(directory: Path, stage: int, stages: int, tensors: Mapping[str, Tensor]) -> str:
    """Write one stage's weights durably; returns their sha256."""
    directory.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    bodies: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        body = tensor.flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(body)],
        }
        offset += len(body)
        bodies.append(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes begin at a multiple of eight
    blocks = [len(text).to_bytes(8, "little"), text, *bodies]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    replace_durably(directory / part_name(stage, stages), blocks)
    return digest.hexdigest()


def write_manifest(
    directory: Path,
    task: Task,
    layout: Layout,
    *,
    step: int,
    metrics: Mapping[str, float],
    digests: Mapping[str, str],
) -> Path:
    """Say what the parts are. ``digests`` maps each part's name to its sha256."""
    described = asdict(task)
    described["quality"] = None if task.quality is None else str(task.quality)
    document = {
        "version": RESULT_VERSION,
        "task": described,
        "step": step,
        "samples": step * task.global_batch,
        "gpus": layout.gpus,
        "precision": layout.precision,
        # JSON has no NaN, and a reader that is strict would refuse the whole document.
        "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
        "quality_kept": None
        if task.quality is None
        else task.quality.kept(metrics[task.quality.metric]),
        "files": dict(digests),
    }
    path = directory / MANIFEST
    replace_durably(path, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n")
    return path

"""Checkpoints on disk for tests, made by the real commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_ft.checkpoint.commit import Saved
from slurm_ft.checkpoint.files import FileStore
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.session.comms.solo import SoloComm


def save(root: Path, step: int, content: bytes = b"x", **options: Any) -> Saved:
    """A checkpoint of one file."""
    meta: Mapping[str, Any] = options.pop("meta", {})
    store = FileStore(root, SoloComm(), **options)
    return store.save(step, lambda d: (d / "data").write_bytes(content) and None, Meta(**meta))

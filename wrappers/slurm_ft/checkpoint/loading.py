"""Choosing what to load: the newest checkpoint whose every byte is what was saved. No torch.

Before anything is read into a program, each file of the checkpoint is hashed once, shared out over
the ranks. One that was damaged is named in a warning and passed over for the next older one; where
the caller asked for a certain checkpoint, damage is an error.

A checkpoint of torch is partly pickled, and to unpickle is to run what is in it. So it is loaded
only where directory and files belong to the calling user (or root) and nobody else may write them.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.commit import newest, pool
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import Complete, damage
from slurm_ft.checkpoint.manifest import MANIFEST
from slurm_ft.comm import Comm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded.

    ``position`` is this rank's own place in the data where the number of ranks is unchanged, else
    rank 0's. ``random`` names the random states that were set.
    """

    step: int
    path: Path
    attempt: int
    world_size: int
    position: Mapping[str, Any]
    plan: Mapping[str, Any]
    extra: Mapping[str, Any]
    random: tuple[str, ...]


def undamaged(
    comm: Comm,
    root: Path,
    wanted: Complete | None,
    *,
    must_trust: bool,
    limit_s: float | None,
    damaged: set[str],
    block_damage: Callable[[Complete, str, int], str | None] | None = None,
) -> Complete | None:
    """The checkpoint to load, agreed on by all ranks; names that fail are added to ``damaged``."""
    while True:
        complete = wanted or newest(comm, root, damaged)
        if complete is None:
            return None
        if must_trust and (words := pool(comm, distrust(complete) or "")):
            raise CheckpointError(words)
        share = (comm.rank, comm.size)
        found = next(damage(complete, share=share, block_damage=block_damage), "")
        words = pool(comm, found, limit_s)
        if not words:
            return complete
        if wanted is not None:
            raise CheckpointError(f"{complete.path} is damaged: {words}")
        damaged.add(complete.path.name)
        if comm.rank == 0:
            log.warning("%s is damaged (%s): an older one is loaded", complete.path, words)


def distrust(complete: Complete) -> str | None:
    """Why this process must not unpickle the checkpoint, ``None`` where it may."""
    names = [MANIFEST, *(entry.name for entry in complete.manifest.files)]
    for path in (complete.path, *(complete.path / name for name in names)):
        try:
            info = os.lstat(path)
        except OSError as exc:
            return f"{path}: {exc.strerror}"
        if info.st_uid not in (os.geteuid(), 0):
            return (
                f"{path} belongs to user {info.st_uid}: what another user has pickled is never"
                " loaded; copy it as your own user if you trust its owner"
            )
        if stat.S_ISLNK(info.st_mode) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{path} may be changed by others: chmod go-w, if you trust its content"
    return None


def own_part(comm: Comm, complete: Complete, *, random: bool = True) -> Loaded:
    """Set this rank's random states (unless told not to) and find its position."""
    manifest = complete.manifest
    position, done = manifest.position, tuple[str, ...]()
    if comm.rank < len(manifest.rng):
        name = manifest.rng[comm.rank]
        states, own = random_states.read(complete.path, name)
        if random:
            done = random_states.apply(states, str(complete.path / name))
        if comm.size == manifest.world_size:
            position = own
    return Loaded(
        step=manifest.step,
        path=complete.path,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        position=position,
        plan=manifest.plan,
        extra=manifest.extra,
        random=done,
    )

"""Checkpoints whose content a function of the user writes. No torch.

The function is called on every rank with the same temporary directory; which rank writes which
file is its own affair. The rest is as for any checkpoint: digests, manifest, rename, pointer,
retention, random states. Its files need not be flushed by it: each is forced to disk by the rank
that hashes it, after every rank's function has returned.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.commit import Rules, Saved, Ticket, Written, begin, commit, newest, pool
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.hashing import sha256_of_file
from slurm_ft.checkpoint.layout import Complete
from slurm_ft.checkpoint.loading import Loaded, own_part, undamaged
from slurm_ft.checkpoint.manifest import FILES, MANIFEST, FileEntry, Manifest, Meta
from slurm_ft.comm import Comm

# A rank that writes ten times more than the others is waited for this long.
WRITE_LIMIT_S = 1800.0


class FileStore:
    """Checkpoints of the user's own files below ``root``. Every call but ``done`` is collective."""

    def __init__(
        self,
        root: Path,
        comm: Comm,
        *,
        keep: int = 2,
        quota_bytes: int | None = None,
        limit_s: float = WRITE_LIMIT_S,
    ) -> None:
        self.root = root
        self.comm = comm
        self._rules = Rules(keep, quota_bytes)
        self._limit_s = limit_s
        self._damaged: set[str] = set()

    def save(self, step: int, write: Callable[[Path], None], meta: Meta | None = None) -> Saved:
        """Call ``write`` and commit what it wrote.

        Raises CheckpointError on every rank where any rank's function raised, the disk is full or
        the quota is used up; the older checkpoints are intact then.
        """
        started = time.monotonic()
        meta = meta or Meta()
        states = random_states.capture()
        ticket, _ = begin(self.comm, self.root, step, self._rules)
        problem = ""
        try:
            write(ticket.directory)
            random_states.write(ticket.directory, self.comm.rank, states, dict(meta.position))
        except Exception as exc:  # the user's function may raise anything; all ranks are told
            problem = f"{type(exc).__name__}: {exc}"
        written = self._hashed(ticket, problem)
        done = commit(
            self.comm,
            self.root,
            ticket,
            written,
            self._rules,
            lambda parts: self._describe(ticket, meta, parts),
            limit_s=self._limit_s,
            damaged=self._damaged,
        )
        return Saved(step, done.path, done.bytes, time.monotonic() - started)

    def latest(self) -> Complete | None:
        """The newest complete checkpoint, the same on every rank."""
        return newest(self.comm, self.root, self._damaged)

    def load(self, read: Callable[[Path], None], complete: Complete | None = None) -> Loaded | None:
        """Call ``read`` with the newest undamaged checkpoint and set the random states."""
        chosen = undamaged(
            self.comm,
            self.root,
            complete,
            must_trust=False,
            limit_s=self._limit_s,
            damaged=self._damaged,
        )
        if chosen is None:
            return None
        if chosen.manifest.layout != FILES:
            raise CheckpointError(
                f"{chosen.path} holds the state of torch objects and not what a function wrote:"
                " give the session state="
            )
        read(chosen.path)
        return own_part(self.comm, chosen)

    def close(self) -> None:
        """Nothing is held between calls; here for symmetry with the other store."""

    def _hashed(self, ticket: Ticket, problem: str) -> Written:
        if words := pool(self.comm, problem, self._limit_s):
            return Written(error=words)
        seen: list[str] = []
        try:
            seen = sorted(_regular_files(ticket.directory))
        except (OSError, CheckpointError) as exc:
            problem = str(exc)
        if words := pool(self.comm, problem):
            return Written(error=words)
        # All ranks look: a node's view of a shared directory may lag, but it knows its own files.
        views = self.comm.gather(seen)
        union = None if views is None else sorted({name for view in views for name in view})
        names: list[str] = self.comm.broadcast(union)
        try:
            mine = names[self.comm.rank :: self.comm.size]
            return Written(tuple(hashed(ticket.directory, name) for name in mine))
        except OSError as exc:
            return Written(error=f"{exc.filename or ticket.directory}: {exc.strerror}")

    def _describe(self, ticket: Ticket, meta: Meta, parts: Sequence[Written]) -> Manifest:
        return describe(ticket, meta, parts, self.comm.size, FILES)


def hashed(directory: Path, name: str) -> FileEntry:
    """Force a file to disk, take others' right to change it, and take its digest."""
    path = directory / name
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(stat.S_IMODE(mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    size, digest = sha256_of_file(path, sync=True)
    return FileEntry(name, size, digest)


def describe(
    ticket: Ticket,
    meta: Meta,
    parts: Sequence[Written],
    world_size: int,
    layout: str,
    torch: str = "",
    block_store: str = "",
) -> Manifest:
    """The manifest of what all ranks have written."""
    blocks = {entry.key: entry for part in parts for entry in part.blocks}
    files = {entry.name: entry for part in parts for entry in part.files}
    return Manifest(
        step=ticket.step,
        serial=ticket.serial,
        world_size=world_size,
        made_s=time.time(),
        layout=layout,
        attempt=meta.attempt,
        torch=torch,
        plan=meta.plan,
        position=meta.position,
        extra=meta.extra,
        rng=tuple(random_states.file_name(rank) for rank in range(world_size)),
        files=tuple(files[name] for name in sorted(files)),
        blocks=tuple(blocks[key] for key in sorted(blocks)),
        block_store=block_store,
    )


def _regular_files(directory: Path) -> list[str]:
    names: list[str] = []
    for parent, _, files in os.walk(directory):
        for file in files:
            path = Path(parent) / file
            name = path.relative_to(directory).as_posix()
            if not stat.S_ISREG(path.lstat().st_mode):
                raise CheckpointError(
                    f"{name} is not a regular file: a checkpoint holds its own content; write a"
                    " copy instead"
                )
            if name == MANIFEST:
                raise CheckpointError(f"{MANIFEST} is a name of ours: write under another one")
            names.append(name)
    return names

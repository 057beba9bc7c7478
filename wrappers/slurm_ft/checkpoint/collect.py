"""Frees what no checkpoint uses. Standard library only; run by a person or a timer.

Mark: the keys of every checkpoint that is noted in the store. Sweep: what is not marked and has not
been wanted for the grace. The notes lie in the store itself, so that the collector need not be able
to read other members' checkpoint directories. A note goes only when its checkpoint is known to be
gone: a directory that cannot be looked at, or whose file system is not mounted, may still be there.
Anything unreadable among the notes stops the collection before a block is touched.

One collector at a time (flock). Saves need no lock: a block that a running save wants has been
marked with the time of day (`slurm_ft.checkpoint.blocks`), and that mark is looked at once more
after the block has been moved out of reach.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slurm_ft.checkpoint.blocks import (
    KEYS,
    ROOT_FILE,
    ROOTS,
    SHORTEST_GRACE_S,
    TEMPORARY,
    BlockStore,
)
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import GONE, names_in
from slurm_ft.checkpoint.layout import TEMPORARY as UNFINISHED
from slurm_ft.checkpoint.retention import delete_tree

DEFAULT_GRACE_S = 86400.0
LOCK = ".collect.lock"
_KEY = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(slots=True)
class Collected:
    """What a collection did, or would do: numbers of blocks and bytes, and notes dropped."""

    used: int = 0
    used_bytes: int = 0
    young: int = 0
    young_bytes: int = 0
    freed: int = 0
    freed_bytes: int = 0
    leftovers: int = 0
    dropped: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def collect(
    store: BlockStore, *, grace_s: float = DEFAULT_GRACE_S, dry_run: bool = False
) -> Collected:
    """Free what is not used; with ``dry_run`` only count it."""
    if grace_s < SHORTEST_GRACE_S:
        raise CheckpointError(
            f"a grace of {grace_s:g} s is shorter than {SHORTEST_GRACE_S:g} s, which running saves"
            " rely on"
        )
    done = Collected()
    with _alone(store.root) as now:
        oldest = now - grace_s
        marked = _mark(store, oldest, dry_run, done)
        for key, path in store.contents():
            try:
                info = path.stat()
            except FileNotFoundError:
                continue  # a save renamed it into place, or another name was being written
            if not key:
                if info.st_mtime < oldest:
                    done.leftovers += 1
                    if not dry_run:
                        path.unlink(missing_ok=True)
            elif key in marked:
                done.used += 1
                done.used_bytes += info.st_size
            elif info.st_mtime >= oldest or not (dry_run or _free(path, oldest)):
                done.young += 1
                done.young_bytes += info.st_size
            else:
                done.freed += 1
                done.freed_bytes += info.st_size
    return done


def leftovers(root: Path, grace_s: float, *, dry_run: bool = False) -> tuple[str, ...]:
    """Delete what saves that were killed have left in a checkpoint directory; tells their names.

    A save deletes them too when it begins; this is for jobs that do not come back. A directory that
    is still written to is spared: its time of change or a file's is within the grace.
    """
    now = time.time()
    gone = []
    for name in names_in(root):
        if name.startswith((UNFINISHED, GONE)) and now - _last_change(root / name) > grace_s:
            gone.append(name)
            if not dry_run:
                delete_tree(root / name)
    return tuple(gone)


def _last_change(path: Path) -> float:
    times = [path.lstat().st_mtime]
    for parent, folders, files in os.walk(path):
        for name in (*folders, *files):
            try:
                times.append(os.lstat(os.path.join(parent, name)).st_mtime)
            except FileNotFoundError:
                continue  # it changes while we look, and is younger than any grace
    return max(times)


def _mark(store: BlockStore, oldest: float, dry_run: bool, done: Collected) -> set[str]:
    marked: set[str] = set()
    for note in _notes(store.root):
        try:
            root = Path((note.parent / ROOT_FILE).read_text().rstrip("\n"))
            lines = note.read_text().split()
            made = note.stat().st_mtime
        except OSError as exc:
            raise CheckpointError(
                f"{exc.filename or note}: {exc.strerror}: nothing is collected while it is unknown"
                " what a checkpoint uses"
            ) from exc
        if wrong := next((line for line in lines if not _KEY.match(line)), None):
            raise CheckpointError(f"{note}: {wrong!r:.80} is not a block; nothing is collected")
        name = note.name.removesuffix(KEYS)
        there = is_there(root, name)
        if there is False and made < oldest:
            done.dropped.append(str(root / name))
            if not dry_run:
                note.unlink(missing_ok=True)
            continue
        if there is None:
            done.unsure.append(str(root / name))
        marked.update(lines)
    return marked


def is_there(root: Path, name: str) -> bool | None:
    """Whether a checkpoint still exists; ``None`` where that cannot be told."""
    try:
        return name in os.listdir(root)
    except FileNotFoundError:
        pass
    except OSError:
        return None
    try:
        # An empty parent looks like the mount point of a file system that is not there.
        return False if os.listdir(root.parent) else None
    except OSError:
        return None


def _free(path: Path, oldest: float) -> bool:
    """Delete a block, unless a save has wanted it just now; tells whether it is gone."""
    aside = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    if aside.stat().st_mtime >= oldest:
        os.rename(aside, path)
        return False
    aside.unlink()
    return True


def _notes(root: Path) -> list[Path]:
    notes: list[Path] = []
    try:
        for directory in sorted((root / ROOTS).iterdir()):
            notes += sorted(path for path in directory.iterdir() if path.name.endswith(KEYS))
    except FileNotFoundError:
        return notes
    except OSError as exc:
        raise CheckpointError(
            f"{exc.filename}: {exc.strerror}: nothing is collected while it is unknown which"
            " checkpoints use the store"
        ) from exc
    return notes


@contextmanager
def _alone(root: Path) -> Iterator[float]:
    """Be the only collector; gives the time by the file server's clock."""
    path = root / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
    except OSError as exc:
        raise CheckpointError(
            f"{path}: {exc.strerror}: only a user who may write to the store can collect"
        ) from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise CheckpointError(f"{path}: another collection is running") from exc
        os.write(handle, b".")
        os.ftruncate(handle, 0)
        yield os.fstat(handle).st_mtime
    finally:
        os.close(handle)

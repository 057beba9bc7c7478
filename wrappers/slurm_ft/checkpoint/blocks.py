"""The block store: pieces of tensors, named by their sha256, shared by many checkpoints. No torch.

    <store>/ab/cdef...             a block; its name is the rest of the digest
    <store>/ab/.tmp-*              being written
    <store>/roots/<id>/ROOT        path of a checkpoint directory that uses the store
    <store>/roots/<id>/<name>.keys the blocks that one of its checkpoints uses, one a line

One store belongs to a user (0700) or to a group (2770, made by an administrator): members then read
each other's blocks. Nothing in a block is ever unpickled, and a block whose content does not have
the digest in its name is not used: a member can spoil a load, not change what it means.

A block is never changed: written beside, forced to disk, renamed. Its time of change says when a
save last wanted it; the collector (`slurm_ft.checkpoint.collect`) spares what is younger than its
grace, since a running save is known to nobody until it commits.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.hashing import replace_durably, sync_directory
from slurm_ft.checkpoint.manifest import BlockEntry, Manifest

# Fewer, larger files are kinder to a parallel file system; two tensors share nothing but whole
# tensors in practice, so smaller blocks would find no more in common.
BLOCK_BYTES = 16 << 20
# A block wanted by a save is marked as wanted again when its mark is older than this.
MARK_AFTER_S = 3600.0
# The collector must not be told to spare less: a mark may be that old, and a save may take as long.
SHORTEST_GRACE_S = 2 * MARK_AFTER_S

ROOTS = "roots"
ROOT_FILE = "ROOT"
KEYS = ".keys"
TEMPORARY = ".tmp-"


class BlockStore:
    """Blocks below ``root``. Not collective: each rank puts and gets what is its own."""

    def __init__(self, root: Path, *, create: bool = True) -> None:
        self.root = root
        try:
            if create:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = root.stat().st_mode
        except OSError as exc:
            raise CheckpointError(
                f"{root}: the block store cannot be used ({exc.strerror}): mend its rights, or"
                " leave it out"
            ) from exc
        if mode & stat.S_IWOTH:
            raise CheckpointError(f"{root}: everybody may write to this block store: chmod o-w")
        self._shared = bool(mode & stat.S_IWGRP)
        self._known: set[str] = set()
        self._touched: set[Path] = set()

    def path(self, key: str) -> Path:
        """Where the block with this digest lies."""
        return self.root / key[:2] / key[2:]

    def put(self, data: memoryview, key: str | None = None) -> tuple[BlockEntry, bool]:
        """Keep a block, unless it is there; tells whether it was written."""
        key = key or hashlib.sha256(data).hexdigest()
        entry = BlockEntry(key, data.nbytes)
        if self.claim(entry):
            return entry, False
        place = self.path(key)
        self._make_directory(place.parent)
        temporary = place.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb", buffering=0) as file:
                left = data
                while left.nbytes:
                    left = left[file.write(left) :]
                os.fchmod(file.fileno(), 0o440 if self._shared else 0o400)
                os.fsync(file.fileno())
            os.rename(temporary, place)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._known.add(key)
        self._touched.add(place.parent)
        return entry, True

    def claim(self, entry: BlockEntry) -> bool:
        """Whether the block is there and good; if so, it is marked as wanted.

        Its content is looked at once in the life of this process: a block that some disk has
        damaged must not spoil all the checkpoints to come.
        """
        place = self.path(entry.key)
        try:
            info = place.stat()
            if info.st_size != entry.size:
                return False
            if entry.key not in self._known and self.damage(entry.key, entry.size):
                return False
            if time.time() - info.st_mtime > MARK_AFTER_S:
                os.utime(place)
        except (FileNotFoundError, PermissionError):
            # The latter: somebody else's block. Writing it anew marks it as well.
            return False
        self._known.add(entry.key)
        self._touched.add(place.parent)
        return True

    def settle(self, entries: Iterable[BlockEntry]) -> None:
        """Force the names of blocks to disk, and see that all of them are still there."""
        for directory in sorted(self._touched):
            sync_directory(directory)
        self._touched.clear()
        for entry in entries:
            if not self.has(entry):
                self._known.discard(entry.key)
                raise CheckpointError(
                    f"{self.path(entry.key)}: collected while a save wanted it; the next save"
                    " writes it again. Is the grace of 'slurm-ext checkpoint gc' too short?"
                )

    def has(self, entry: BlockEntry) -> bool:
        """Whether there is a block of this name."""
        return self.path(entry.key).exists()

    def read_into(self, entry: BlockEntry, target: memoryview) -> None:
        """Fill ``target`` with a block."""
        place = self.path(entry.key)
        try:
            with place.open("rb", buffering=0) as file:
                done = 0
                while done < entry.size and (count := file.readinto(target[done:])):
                    done += count
        except OSError as exc:
            raise CheckpointError(f"{place}: {exc.strerror}") from exc
        if done != entry.size:
            raise CheckpointError(f"{place}: {done} bytes of {entry.size}")

    def absence(self, key: str, size: int) -> str | None:
        """Why a block cannot be there whole, going by its name and size alone."""
        try:
            found = self.path(key).stat().st_size
        except OSError as exc:
            return f"{self.path(key)}: {exc.strerror}"
        return None if found == size else f"{self.path(key)}: {found} bytes of {size}"

    def damage(self, key: str, size: int) -> str | None:
        """What is wrong with a block, ``None`` where its content is what its name says."""
        content = memoryview(bytearray(size))
        try:
            self.read_into(BlockEntry(key, size), content)
        except CheckpointError as exc:
            return str(exc)
        if hashlib.sha256(content).hexdigest() != key:
            return f"{self.path(key)}: its content is not what its name says"
        return None

    def record(self, root: Path, name: str, manifest: Manifest) -> None:
        """Note what a checkpoint uses; before it is renamed, so that nothing is ever unnoted."""
        directory = self._root_directory(root)
        directory.mkdir(parents=True, exist_ok=True)
        if self._shared:
            for made in (directory.parent, directory):
                _share(made)
        mode = 0o440 if self._shared else 0o400
        if not (directory / ROOT_FILE).exists():
            replace_durably(directory / ROOT_FILE, f"{root.absolute()}\n".encode(), mode)
        lines = "".join(f"{entry.key}\n" for entry in manifest.blocks)
        replace_durably(directory / f"{name}{KEYS}", lines.encode(), mode)

    def forget(self, root: Path, name: str) -> None:
        """A checkpoint is deleted: its blocks are no longer wanted by it."""
        (self._root_directory(root) / f"{name}{KEYS}").unlink(missing_ok=True)

    def is_recorded(self, root: Path, name: str) -> bool:
        """Whether the collector knows what a checkpoint uses."""
        return (self._root_directory(root) / f"{name}{KEYS}").exists()

    def contents(self) -> Iterator[tuple[str, Path]]:
        """Every block, and everything that is being written (with an empty key)."""
        for fan in sorted(self.root.iterdir()):
            if len(fan.name) == 2 and fan.is_dir():
                for path in fan.iterdir():
                    temporary = path.name.startswith(TEMPORARY)
                    yield ("" if temporary else fan.name + path.name), path

    def _root_directory(self, root: Path) -> Path:
        digest = hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:32]
        return self.root / ROOTS / digest

    def _make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        path.mkdir(mode=0o700, exist_ok=True)
        if self._shared:
            _share(path)
        sync_directory(self.root)


def _share(path: Path) -> None:
    """Give the group what it needs, whatever the umask says."""
    if path.stat().st_uid == os.geteuid():
        path.chmod(0o2770)


def cut(data: memoryview, size: int = BLOCK_BYTES) -> Sequence[memoryview]:
    """Pieces of a tensor's bytes. Cut from its beginning: equal tensors give equal blocks."""
    return [data[at : at + size] for at in range(0, data.nbytes, size)]

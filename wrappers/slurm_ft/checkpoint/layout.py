"""What lies in a checkpoint directory, and whether it is complete. Reads only; no torch.

    <root>/step-000000000123/      a complete checkpoint: MANIFEST.json and the files it lists
    <root>/step-000000000123.1/    the same step, saved again
    <root>/LATEST                  the name of the one committed last
    <root>/.tmp-*                  being written, or left by a process that was killed
    <root>/.gone-*                 being deleted

Two depths of verification: `examine` reads manifests and compares sizes (cheap: what a listing and
the choice of the newest need), `damage` also reads every byte and compares digests. Missing rights
are an error, never an empty directory: a program that starts from step 0 because it could not look
destroys weeks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.hashing import sha256_of_file
from slurm_ft.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    parse_manifest,
)

LATEST = "LATEST"
TEMPORARY = ".tmp-"
GONE = ".gone-"
_STEP = re.compile(r"step-(\d{12,})(?:\.(\d+))?\Z")


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint whose manifest verifies and whose files have the listed sizes."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step that it holds."""
        return self.manifest.step

    @property
    def newness(self) -> tuple[int, int, str]:
        """Larger means committed later."""
        return (self.manifest.serial, self.manifest.attempt, self.path.name)


@dataclass(frozen=True, slots=True)
class Listing:
    """A checkpoint directory: ``complete`` newest first, ``broken`` by name with the reason."""

    root: Path
    complete: tuple[Complete, ...] = ()
    broken: tuple[tuple[str, str], ...] = ()
    unfinished: tuple[str, ...] = ()
    pointer: str | None = None


def step_name(step: int, again: int = 0) -> str:
    """Name of the directory of a step; ``again`` counts further saves of the same step."""
    return f"step-{step:012d}" + (f".{again}" if again else "")


def free_name(step: int, taken: Iterable[str]) -> str:
    """A name for a step that is not taken: a checkpoint is never replaced in place."""
    names = set(taken)
    again = 0
    while step_name(step, again) in names:
        again += 1
    return step_name(step, again)


def is_step_name(name: str) -> bool:
    """Whether a directory with this name may be a checkpoint."""
    return _STEP.match(name) is not None


def names_in(root: Path) -> tuple[str, ...]:
    """Names in the directory, none where it does not exist yet."""
    try:
        return tuple(sorted(os.listdir(root)))
    except FileNotFoundError:
        return ()
    except OSError as exc:
        raise CheckpointError(
            f"{root}: cannot be listed ({exc.strerror}): mend its rights, or name another"
            " checkpoint directory"
        ) from exc


def examine(root: Path) -> Listing:
    """Everything in a checkpoint directory, by manifests and sizes."""
    complete: list[Complete] = []
    broken: list[tuple[str, str]] = []
    unfinished: list[str] = []
    for name in names_in(root):
        if name.startswith((TEMPORARY, GONE)):
            unfinished.append(name)
        elif is_step_name(name):
            try:
                complete.append(read_complete(root / name))
            except CheckpointError as exc:
                broken.append((name, str(exc)))
    complete.sort(key=lambda item: item.newness, reverse=True)
    return Listing(root, tuple(complete), tuple(broken), tuple(unfinished), read_pointer(root))


def read_pointer(root: Path) -> str | None:
    """What LATEST names. Advice for people: the manifests decide."""
    try:
        return (root / LATEST).read_text(errors="replace").strip()[:64]
    except OSError:
        return None


def read_complete(path: Path) -> Complete:
    """The checkpoint at ``path``, or a CheckpointError that says what is not complete about it."""
    complete = Complete(path, read_manifest(path))
    for entry in complete.manifest.files:
        try:
            size = (path / entry.name).stat().st_size
        except OSError as exc:
            raise CheckpointError(f"{path / entry.name}: {exc.strerror}") from exc
        if size != entry.size:
            raise CheckpointError(
                f"{path / entry.name}: {size} bytes, the manifest says {entry.size}"
            )
    return complete


def read_manifest(path: Path) -> Manifest:
    """The manifest in the directory ``path``."""
    place = path / MANIFEST
    try:
        with place.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        return parse_manifest(data.decode(errors="replace"), str(place))
    except OSError as exc:
        raise CheckpointError(f"{place}: {exc.strerror}") from exc
    except ProtocolError as exc:
        raise CheckpointError(str(exc)) from exc


def damage(
    complete: Complete,
    *,
    share: tuple[int, int] = (0, 1),
    deep: bool = True,
    block_damage: Callable[[Complete, str, int], str | None] | None = None,
) -> Iterator[str]:
    """Read every byte, unless ``deep`` is off, and yield what does not fit the manifest.

    ``share`` is ``(rank, size)``: this process takes every ``size``-th file, so that all ranks
    together read everything once. ``block_damage`` looks at one block of the shared store; without
    it blocks are left to whoever reads them.
    """
    rank, size = share
    for number, entry in enumerate(complete.manifest.files):
        if deep and number % size == rank and (found := _file_damage(complete.path, entry)):
            yield found
    if block_damage is not None:
        for number, block in enumerate(complete.manifest.blocks):
            if number % size == rank and (found := block_damage(complete, block.key, block.size)):
                yield found


def _file_damage(path: Path, entry: FileEntry) -> str | None:
    place = path / entry.name
    try:
        size, digest = sha256_of_file(place)
    except OSError as exc:
        return f"{place}: {exc.strerror}"
    if (size, digest) != (entry.size, entry.sha256):
        return f"{place}: its content is not what was saved (sha256 {digest[:12]}...)"
    return None

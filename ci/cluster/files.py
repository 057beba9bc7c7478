"""Tar archives for Docker's copy calls, made in memory: one file, or a tree of this repository."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file to place in a container."""

    path: str
    content: bytes
    mode: int = 0o644
    uid: int = 0
    gid: int = 0


def pack(files: Iterable[FileSpec]) -> bytes:
    """Return a tar of files with absolute paths, to be unpacked at /."""
    buffer = io.BytesIO()
    now = time.time()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in files:
            info = tarfile.TarInfo(file.path.lstrip("/"))
            # Not the default of 0: slurmctld 24.11 takes a job_submit.lua from 1970 for one that it
            # has loaded already, and crashes at the first submission.
            info.mtime = now
            info.size, info.mode, info.uid, info.gid = (
                len(file.content),
                file.mode,
                file.uid,
                file.gid,
            )
            tar.addfile(info, io.BytesIO(file.content))
    return buffer.getvalue()


def tree(root: Path, target: str, *, skip: frozenset[str] = frozenset()) -> list[FileSpec]:
    """Every regular file below root, placed below target; `skip` names what is left out."""
    found = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not skip.intersection(relative.parts):
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            found.append(FileSpec(str(PurePosixPath(target, relative)), path.read_bytes(), mode))
    return found


def single_file(archive: bytes) -> bytes:
    """The content of the only file in a tar that Docker returned."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.next()
        content = tar.extractfile(member) if member is not None else None
        if content is None:
            raise IsADirectoryError(member.name if member else "empty archive")
        return content.read()

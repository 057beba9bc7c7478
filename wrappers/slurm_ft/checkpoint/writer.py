"""Torch's own file format, between our planners and our commit. Torch only.

Nothing here raises into torch, for the reason told in `slurm_ft.checkpoint.planner`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from slurm_ft.checkpoint.planner import told_as

METADATA = ".metadata"
# Torch's own words for a full disk do not say so: where less is free than this, we do.
_LITTLE_BYTES = 64 << 20


class NamingWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes data files, each forced to disk, and remembers their names in ``names``.

    One thread: ranks write side by side already. No copying ahead: the data are in host memory.
    ``overwrite`` is off, since the directory is new.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory,
            single_file_per_rank=True,
            sync_files=True,
            per_thread_copy_ahead=0,
            overwrite=False,
        )
        self._directory = directory
        self.names: set[str] = set()
        self.problem = ""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned: the directory is there already."""
        return plan

    def storage_meta(self) -> StorageMeta:
        """Without the path, which is of the temporary directory, and which torch pickles as a
        class that Python 3.13 has and 3.12 has not.
        """
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's files."""
        try:
            answer = super().write_data(plan, planner)
            self.names |= {result.storage_data.relative_path for result in answer.wait()}
        except Exception as exc:
            self.problem = told_as(exc) + little_space(self._directory)
            return already([])
        return answer

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the coordinator: write what describes all ranks' files."""
        try:
            super().finish(metadata, results)
        except Exception as exc:
            self.problem = self.problem or told_as(exc) + little_space(self._directory)
        self.names.add(METADATA)


class KnowingReader(FileSystemReader):  # type: ignore[misc]
    """Reads what the writer wrote; the description was read beforehand, by all ranks."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._metadata: Metadata | None = None
        self.problem = ""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read it once."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items."""
        try:
            return super().read_data(plan, planner)
        except Exception as exc:
            self.problem = told_as(exc)
            return already(None)


def already(value: Any) -> Future[Any]:
    """A future that has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def little_space(directory: Path) -> str:
    """How much room is left, where it is so little that it explains a failure."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return ""
    free = info.f_bavail * info.f_frsize
    return f" (the file system has {free} bytes free)" if free < _LITTLE_BYTES else ""

"""Torch's own file format, with the names of the files that this rank has written. Torch only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

METADATA = ".metadata"


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
        self.names: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's files."""
        answer = super().write_data(plan, planner)
        self.names |= {result.storage_data.relative_path for result in answer.wait()}
        return answer

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the coordinator: write what describes all ranks' files."""
        super().finish(metadata, results)
        self.names.add(METADATA)

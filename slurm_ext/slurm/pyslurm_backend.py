"""Optional: comments of many jobs through pyslurm instead of squeue. Nothing else.

pyslurm X.Y works only with Slurm X.Y, so the versions are compared before the first call, and the
package is imported only then. A reader would expect the whole queue from it, and the updates: its
jobs name neither TRES nor GPUs asked for per job or per task (``--gpus=4`` would count as none),
and its updates can change neither the number of nodes nor write a site factor of 0 (read in the
source of 25.11). So queue, nodes and updates stay with the commands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.arrays import exact_id
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import CommandRunner

SOURCE = "pyslurm"


class PyslurmBackend(CliBackend):
    """The command-line adapter with AdminComment and Comment read through libslurm."""

    name = "pyslurm"

    def __init__(self, runner: CommandRunner | None = None, **options: Any) -> None:
        """Raises SourceMissingError where pyslurm is absent or of another release than Slurm."""
        super().__init__(runner, **options)
        self._pyslurm = load_pyslurm(self.slurm_config().release)

    def admin_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._read(job_ids, lambda job: job.admin_comment)

    def user_comments(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """See ``Backend``."""
        return self._read(job_ids, lambda job: job.comment)

    def _read(self, job_ids: Collection[str], text: Callable[[Any], str | None]) -> dict[str, str]:
        wanted = set(job_ids)
        if not wanted:
            return {}
        try:
            jobs: Iterable[Any] = self._pyslurm.Jobs.load().values()
        except self._pyslurm.RPCError as exc:
            raise SourceMissingError(SOURCE, str(exc)) from exc
        found = ((job_id_of(job), job) for job in jobs)
        return {job_id: text(job) or "" for job_id, job in found if job_id in wanted}


def load_pyslurm(release: tuple[int, int]) -> Any:
    """The module, where it is there and fits. Raises SourceMissingError naming both versions."""
    try:
        module = importlib.import_module("pyslurm")
    except ImportError as exc:
        raise SourceMissingError(SOURCE, f"not installed: {exc}") from exc
    version = str(getattr(module, "__version__", ""))
    # Slurm 24.05 is pyslurm 24.5: numbers, not texts.
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if found != release:
        wanted = f"{release[0]}.{release[1]}"
        raise SourceMissingError(
            SOURCE,
            f"pyslurm {version or '?'} does not fit Slurm {wanted}; install pyslurm=={wanted}.*",
        )
    return module


def job_id_of(job: Any) -> str:
    """The id as ``Job.job_id`` has it."""
    if job.array_id:
        if job.array_tasks_waiting:
            return exact_id(f"{job.array_id}_[{job.array_tasks_waiting}]")[0]
        if job.array_task_id is not None:
            return f"{job.array_id}_{job.array_task_id}"
    if job.heterogeneous_id:
        return f"{job.heterogeneous_id}+{job.heterogeneous_offset}"
    return str(job.id)

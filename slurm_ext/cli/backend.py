"""Which door to Slurm the commands use: the one place that names an adapter."""

from __future__ import annotations

from slurm_ext.control.config import Config
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import CommandRunner


def open_backend(config: Config) -> Backend:
    """The backend that the configuration names.

    Raises SourceMissingError where that is pyslurm, and it is absent or of another release.
    """
    runner = CommandRunner(config.command_timeout_s)
    if config.backend == "pyslurm":
        from slurm_ext.slurm.pyslurm_backend import PyslurmBackend

        return PyslurmBackend(runner)
    return CliBackend(runner)

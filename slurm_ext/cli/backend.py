"""Which door to Slurm the commands use: the one place that names an adapter."""

from __future__ import annotations

from slurm_ext.control.config import Config
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.cli_backend import CliBackend
from slurm_ext.slurm.process import CommandRunner


def open_backend(config: Config) -> Backend:
    """The backend of this machine."""
    return CliBackend(CommandRunner(config.command_timeout_s))

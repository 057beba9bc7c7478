"""Errors of a launch, each with the exit code that ``ft-run`` ends with.

Here and not in `slurm_ext.domain.errors`, because the code is the launcher's own business.
"""

from __future__ import annotations

from slurm_ext.domain.errors import SlurmExtError

FAILED = 1
USAGE = 2
# As a shell says it: found and not executable, not found.
NOT_EXECUTABLE = 126
NOT_FOUND = 127


class LaunchError(SlurmExtError):
    """The program cannot be started as asked; the message names the value, place and fix."""

    code = FAILED


class UsageError(LaunchError):
    """An option, or the environment variable that stands for it, is unusable."""

    code = USAGE


class CommandError(LaunchError):
    """The user's command cannot be executed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

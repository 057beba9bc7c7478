"""What can go wrong with the containerized cluster; each message says what to do about it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


class ClusterError(Exception):
    """Root of every error that the cluster harness raises on purpose."""


class DockerMissingError(ClusterError):
    """No Docker engine answers."""


class ImageError(ClusterError):
    """The base image or the cluster image could not be made."""


class ClusterTimeoutError(ClusterError):
    """A condition did not come true within its limit."""


class CommandError(ClusterError):
    """A command in a container ended with a non-zero exit code, or did not end in time."""

    def __init__(
        self, argv: Sequence[str], where: str, rc: int, stdout: str = "", stderr: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.rc = rc
        self.stdout = stdout
        self.stderr = stderr
        text = "\n".join(part.strip() for part in (stdout, stderr) if part.strip())
        super().__init__(
            f"{where}: `{shlex.join(argv)}` exited with {rc}:\n{text or '(no output)'}"
        )

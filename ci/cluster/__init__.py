"""A containerized Slurm cluster for tests, demonstrations and people; see ci/README.md."""

from __future__ import annotations

from ci.cluster.engine import Completed
from ci.cluster.errors import (
    ClusterError,
    ClusterTimeoutError,
    CommandError,
    DockerMissingError,
    ImageError,
)
from ci.cluster.harness import Cluster
from ci.cluster.spec import ADMIN, DAEMON_USER, USERS, ClusterSpec

__all__ = [
    "ADMIN",
    "DAEMON_USER",
    "USERS",
    "Cluster",
    "ClusterError",
    "ClusterSpec",
    "ClusterTimeoutError",
    "CommandError",
    "Completed",
    "DockerMissingError",
    "ImageError",
]

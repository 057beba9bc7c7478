"""What a containerized cluster should look like: plain data, kept as a label on its containers.

Nothing here talks to Docker. `slurm_conf` overrides any key that `conf.py` would write: a string
replaces the value, None drops the key, a list writes the key once per item (needed for
PartitionName).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

CONTROLLER = "ctl"
CLUSTER_NAME = "ft"
SUITE = "trixie"
# Names another suite for every cluster of a run: `ci/test cluster --suite sid`.
SUITE_VARIABLE = "SLURM_EXT_SUITE"
# Ordinary users of the image, with their account; `admin` has AdminLevel=Administrator.
USERS: Mapping[str, tuple[str, ...]] = {
    "alice": ("vision",),
    "bob": ("vision", "language"),
    "carol": ("language",),
}
ADMIN = "admin"
DAEMON_USER = "slurm-ext"

ConfValue = str | list[str] | None


def default_suite() -> str:
    """The suite that this run's clusters have."""
    return os.environ.get(SUITE_VARIABLE) or SUITE


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Size and settings of one cluster; every field has a default that suits a test."""

    nodes: int = 4
    gpus_per_node: int = 4
    # Several slurmd share one container, so that a test can kill, pause or cut off a container of
    # nodes.
    nodes_per_container: int = 4
    cpus_per_node: int = 32
    memory_mib_per_node: int = 256_000
    gpu_type: str = "v100"
    # Debian suite of the image; it decides Slurm's release (trixie: 24.11, sid: 26.05).
    suite: str = field(default_factory=default_suite)
    # The image with torch and MPI, for jobs that really train.
    ranks: bool = False
    name_prefix: str = "slurm-ext"
    # The tree's SPANK plugin and site/*.lua; False leaves them out, like a site without them.
    plugin: bool = True
    lua: bool = True
    # Enforce associations, QOS and their limits (AccountingStorageEnforce), with
    # PriorityFlags=ACCRUE_ALWAYS.
    limits: bool = False
    slurm_conf: Mapping[str, ConfValue] = field(default_factory=dict)
    # More files for /etc/slurm, such as topology.conf, by name.
    etc_slurm: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("nodes", "nodes_per_container", "cpus_per_node", "memory_mib_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterSpec.{name} must be at least 1")
        if self.gpus_per_node < 0:
            raise ValueError("ClusterSpec.gpus_per_node must not be negative")

    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{index}" for index in range(1, self.nodes + 1))

    def layout(self) -> dict[str, tuple[str, ...]]:
        """Container name (c1, c2, ...) -> the Slurm nodes whose slurmd run in it."""
        names = self.node_names()
        size = self.nodes_per_container
        chunks = [names[start : start + size] for start in range(0, len(names), size)]
        return {f"c{index}": chunk for index, chunk in enumerate(chunks, start=1)}

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=dict)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        return cls(**json.loads(text))

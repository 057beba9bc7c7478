"""The starter table that comes with the package: published measurements, with their attribution.

It is only read when somebody imports it. Its GPUs, drivers and programs are not the site's, so its
rows carry no environment and their estimates have wide bounds until the site measures for itself.
"""

from __future__ import annotations

import gzip
from importlib.resources import files

STARTER_FILES = ("starter_throughput.csv.gz", "starter_costs.csv")


def starter_bytes(name: str) -> bytes:
    """The content of one starter file as it lies in the package."""
    return (files("slurm_ext") / "data" / name).read_bytes()


def starter_text(name: str) -> str:
    """The same as CSV text."""
    data = starter_bytes(name)
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode()

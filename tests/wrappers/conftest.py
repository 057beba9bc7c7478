"""What the tests of the rank wrapper share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wrappers.launched import Slurm
from tests.wrappers.mpi_launcher import MpiLauncher, find_mpi


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """A made-up Slurm whose step ft-run finds itself in."""
    return Slurm(tmp_path)


@pytest.fixture(scope="session")
def mpi() -> MpiLauncher:
    """An MPI that works here; the test is skipped where there is none, and says why."""
    found = find_mpi()
    if isinstance(found, str):
        pytest.skip(f"no MPI: {found}")
    return found

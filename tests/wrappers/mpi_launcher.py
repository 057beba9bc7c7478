"""Runs a program as MPI ranks, where this machine has an MPI library that mpi4py can load.

``SLURM_EXT_TEST_MPI_PYTHON`` names another Python than the running one, e.g. that of a virtual
environment with mpi4py and an MPI wheel. Open MPI wants to be told that root and more ranks than
cores are meant; MPICH ignores what it is told for Open MPI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON_VARIABLE = "SLURM_EXT_TEST_MPI_PYTHON"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class MpiLauncher:
    """mpirun and a Python whose mpi4py works."""

    mpirun: str
    python: str

    def run(
        self, ranks: int, program: str, *args: str, limit_s: float = 40.0
    ) -> subprocess.CompletedProcess[str]:
        """Run the text as a program; the time-out kills mpirun, which kills its ranks."""
        return subprocess.run(
            [self.mpirun, "-n", str(ranks), self.python, "-c", program, *args],
            capture_output=True,
            text=True,
            timeout=limit_s,
            cwd=ROOT,
            env=mpi_environment(),
            check=False,
        )


def mpi_environment() -> dict[str, str]:
    """For any MPI: as root, and with more ranks than cores."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'wrappers'}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # the same since Open MPI 5
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }


def find_mpi() -> MpiLauncher | str:
    """The launcher, or why there is none."""
    python = os.environ.get(PYTHON_VARIABLE, sys.executable)
    beside = Path(python).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return f"no mpirun beside {python} or on PATH"
    probe = subprocess.run(
        [
            mpirun,
            "-n",
            "1",
            python,
            "-c",
            "from mpi4py import MPI; print(MPI.Get_library_version())",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        env=mpi_environment(),
        check=False,
    )
    if probe.returncode != 0:
        return f"{python}: mpi4py does not load: {(probe.stderr or probe.stdout).strip()[-200:]}"
    return MpiLauncher(mpirun, python)

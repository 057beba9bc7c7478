"""The workloads and measurements that come with the package, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.truth import Truth, read_truth

# The package is always unpacked (it is installed by pip), so its data files have paths.
_DATA = Path(str(files("slurm_ext") / "data"))
THROUGHPUT = _DATA / "starter_throughput.csv.gz"
COSTS = _DATA / "starter_costs.csv"


def starter_truth(gpu_type: str = "V100") -> Truth:
    """The true run times that follow from the starter table."""
    return read_truth(THROUGHPUT, COSTS, gpu_type)


def workload_names() -> tuple[str, ...]:
    """Names that `find_workload` knows."""
    return tuple(sorted(path.stem for path in (_DATA / "workloads").glob("*.csv")))


def find_workload(name_or_file: str) -> Path:
    """The path of a workload given as a file or by the name of one that comes with the package.

    Raises DataError that lists the names.
    """
    given = Path(name_or_file)
    if given.is_file():
        return given
    if name_or_file in workload_names():
        return _DATA / "workloads" / f"{name_or_file}.csv"
    raise DataError(
        f"workload {name_or_file!r}",
        "neither a file nor a known name",
        f"name a file or one of {', '.join(workload_names())}",
    )

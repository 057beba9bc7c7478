"""What a replay was of: workload, machine and terms, so that its numbers are never without them.

The same record heads the table, goes into the JSON document and the pictures, and lets two runs be
compared. Paths are kept as they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath

from slurm_ext import __version__
from slurm_ext.domain.spans import counted
from slurm_ext.sim.build import Built, Terms
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.merging import Merging


@dataclass(frozen=True, slots=True)
class Setting:
    """``left_out`` says why jobs of the workload are not replayed, and how many for each reason.

    ``resizable`` jobs may run on more than one GPU count; ``no_limit`` are those whose time limit
    the workload does not tell. ``intervals_s`` is the time between decisions of each policy.
    Jobs that have waited for ``waiting_limit_s`` go first where a policy has such a limit; None: no
    job does.
    """

    trace: str
    cluster: str
    pooled: bool
    gpus: int
    jobs: int
    left_out: tuple[tuple[str, int], ...]
    bad_rows: int
    resizable: int
    no_limit: int
    jobs_by_gpu_type: Mapping[str, int]
    intervals_s: Mapping[str, float]
    estimate_error: float
    seed: int
    density: float
    counts: tuple[int, ...]
    merging: tuple[float, float] | None
    pipeline_switch: bool
    table: str
    costs: str
    outages: str
    bad_table_rows: int = 0
    waiting_limit_s: float | None = None
    version: str = __version__

    @property
    def all_jobs(self) -> int:
        """Jobs of the workload, those that are not replayed included."""
        return self.jobs + sum(count for _, count in self.left_out)

    @property
    def title(self) -> str:
        """Workload and machine in a few words."""
        machine = f"{self.cluster}{', node borders ignored' if self.pooled else ''}"
        return f"{PurePath(self.trace).name} on {machine}"

    def heading(self) -> list[str]:
        """What stands above the numbers."""
        share = "" if self.jobs == self.all_jobs else f" of {self.all_jobs}"
        lines = [
            f"{self.title} ({counted(self.gpus, 'GPU')}): {self.jobs}{share} jobs,"
            f" {self.resizable} of them on more than one GPU count; times in hours"
        ]
        if len(self.jobs_by_gpu_type) > 1:
            parts = ", ".join(f"{name} {count}" for name, count in self.jobs_by_gpu_type.items())
            lines.append(f"jobs by GPU type, which each is given at its submission: {parts}")
        return lines

    def as_dict(self) -> dict[str, object]:
        """As the JSON document has it."""
        return asdict(self)


def setting_of(
    trace: str,
    hardware: Hardware,
    built: Built,
    terms: Terms,
    intervals_s: Mapping[str, float],
    merging: Merging | None,
    bad_rows: int,
    *,
    pipeline_switch: bool,
    files: Sequence[object],
    bad_table_rows: int = 0,
    waiting_limit_s: float | None = None,
) -> Setting:
    """The record of one command; ``files`` are those of throughputs, costs and outages."""
    given = Counter(job.gpu_type for job in built.jobs)
    table, costs, outages = (str(file or "") for file in files)
    return Setting(
        trace=trace,
        cluster=hardware.text,
        pooled=hardware.pooled,
        gpus=hardware.gpus,
        jobs=len(built.jobs),
        left_out=built.reasons,
        bad_rows=bad_rows,
        resizable=sum(len({c.gpus for c in job.candidates}) > 1 for job in built.jobs),
        no_limit=built.no_limit,
        jobs_by_gpu_type={name: given[name] for name in hardware.gpu_types},
        intervals_s=dict(intervals_s),
        estimate_error=terms.estimate_error,
        seed=terms.seed,
        density=terms.density,
        counts=terms.counts,
        merging=None if merging is None else (merging.saved, merging.failed),
        pipeline_switch=pipeline_switch,
        table=table,
        costs=costs,
        outages=outages,
        bad_table_rows=bad_table_rows,
        waiting_limit_s=waiting_limit_s,
    )

"""What one policy's replay was worth, in the numbers that the simulator prints and writes.

Beside the metrics of `metrics`: waits (JCT minus the time in which the job held GPUs), starts per
job, the GPU time of starts in which no lasting work was done, and how many jobs fare better or
worse than under SRTF by at least a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.nodelist import fold
from slurm_ext.sim.metrics import Outcome, measure, outcomes_of, percentile
from slurm_ext.sim.model import Run, Schedule

NOTICEABLE = 0.1
# Numbers of which less is better, and more; of the others neither can be said.
LESS = frozenset(
    {
        "avg_jct_s",
        "median_jct_s",
        "p95_jct_s",
        "p99_jct_s",
        "avg_wait_s",
        "p99_wait_s",
        "makespan_s",
        "gpu_s_held",
        "worst_slowdown",
        "queue_share_of_jct",
        "gpu_s_lost",
        "share_worse_than_srtf",
    }
)
MORE = frozenset({"share_better_than_srtf"})
# A job that is faster or slower by exactly that much counts, whatever rounding makes of it.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds of the trace's own time, and shares between 0 and 1; None: not compared."""

    avg_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    avg_wait_s: float
    p99_wait_s: float
    makespan_s: float
    gpu_utilisation: float
    gpu_s_held: float
    worst_slowdown: float
    queue_share_of_jct: float
    starts_per_job: float
    gpu_s_lost: float
    share_better_than_srtf: float | None
    share_worse_than_srtf: float | None
    jobs: int
    decisions: int
    refused_starts: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Name -> value, as the JSON document has them."""
        return asdict(self)


def summarise(schedule: Schedule, srtf: Schedule | None = None) -> Summary:
    """The numbers of a replay; ``srtf`` is the replay of the same jobs that it is compared with."""
    outcomes = outcomes_of(schedule.runs)
    base = measure(outcomes, schedule.gpus)
    waits = sorted(max(0.0, item.jct_s - item.held_s) for item in outcomes)
    better, worse = (None, None) if srtf is None else _shares(outcomes, outcomes_of(srtf.runs))
    return Summary(
        avg_jct_s=base.avg_jct_s,
        median_jct_s=base.median_jct_s,
        p95_jct_s=base.p95_jct_s,
        p99_jct_s=base.p99_jct_s,
        avg_wait_s=math.fsum(waits) / len(waits),
        p99_wait_s=percentile(waits, 99),
        makespan_s=base.makespan_s,
        gpu_utilisation=base.gpu_utilisation,
        gpu_s_held=math.fsum(item.gpu_seconds for item in outcomes),
        worst_slowdown=base.max_slowdown,
        queue_share_of_jct=base.queue_share_of_jct,
        starts_per_job=len(schedule.runs) / len(outcomes),
        gpu_s_lost=math.fsum(run.gpus * run.lost_s for run in schedule.runs),
        share_better_than_srtf=better,
        share_worse_than_srtf=worse,
        jobs=len(outcomes),
        decisions=schedule.decisions,
        refused_starts=schedule.refused_starts,
    )


def job_rows(
    runs: Sequence[Run], gpu_types: Mapping[str, str] | None = None
) -> list[dict[str, object]]:
    """One row per job: its first start, its last end, and the GPUs and nodes of its last run.

    ``gpu_types`` names the GPU type of each node. A job that rode on another one held no GPUs, and
    has no nodes.
    """
    types = gpu_types or {}
    rows: dict[str, dict[str, object]] = {}
    for run in runs:
        row = rows.setdefault(
            run.job_id, {"job_id": run.job_id, "submit_s": run.submit_s, "start_s": run.start_s}
        )
        row["end_s"] = run.end_s
        row["gpus"] = run.gpus
        row["nodes"] = fold(run.seats)
        row["gpu_type"] = next((types[name] for name in run.seats if name in types), "")
    return list(rows.values())


def _shares(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> tuple[float, float]:
    before = {item.job_id: item.jct_s for item in theirs}
    if before.keys() != {item.job_id for item in ours}:
        raise DataError("srtf", "jobs differ", "compare replays of the same jobs")
    pairs = [(item.jct_s, before[item.job_id]) for item in ours]
    # Equal ones are neither, also where both are 0.
    better = sum(a < b and a <= (1 - NOTICEABLE + _ROUNDING) * b for a, b in pairs)
    worse = sum(a > b and a >= (1 + NOTICEABLE - _ROUNDING) * b for a, b in pairs)
    return better / len(ours), worse / len(ours)

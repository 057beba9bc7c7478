"""What a schedule was worth: the metrics of one schedule, and its ratios to a baseline.

Definitions. JCT is the end of the job's last attempt minus its *first* submission. Slowdown is
JCT over the error-free run at the requested GPUs. A job is hurt when its JCT is above 1.1 times the
same job's JCT under the baseline. Queue share is the sum of waits over the sum of JCTs, where the
wait is everything between submission and end in which the job held no GPUs. Utilisation is
allocated GPU seconds over GPUs times makespan. A ratio is baseline / ours, turned round for
`gpu_utilisation`, so that above 1 is better for every metric. Percentiles interpolate linearly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.engine import Run

HURT_FACTOR = 1.1
# Metrics of which more is better: their ratio is ours / baseline.
_MORE_IS_BETTER = frozenset({"gpu_utilisation"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished job. ``held_s`` is the time it held its GPUs, over all attempts."""

    job_id: str
    submit_s: float
    end_s: float
    held_s: float
    gpu_seconds: float
    error_free_s: float

    @property
    def jct_s(self) -> float:
        """Job completion time."""
        return self.end_s - self.submit_s


def outcomes_of(runs: Iterable[Run]) -> tuple[Outcome, ...]:
    """Outcomes of a replay, in the order in which the jobs first appear in ``runs``."""
    found: dict[str, Outcome] = {}
    for run in runs:
        before = found.get(run.job_id)
        held = run.end_s - run.start_s
        found[run.job_id] = Outcome(
            job_id=run.job_id,
            submit_s=run.submit_s,
            end_s=run.end_s if before is None else max(before.end_s, run.end_s),
            held_s=held + (0.0 if before is None else before.held_s),
            gpu_seconds=run.gpus * held + (0.0 if before is None else before.gpu_seconds),
            error_free_s=run.error_free_s,
        )
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Metrics:
    """All in seconds of the workload's own time, or shares between 0 and 1."""

    avg_jct_s: float
    median_jct_s: float
    p95_jct_s: float
    p99_jct_s: float
    makespan_s: float
    max_slowdown: float
    share_hurt_10pct: float
    queue_share_of_jct: float
    gpu_utilisation: float

    def as_dict(self) -> dict[str, float]:
        """Name -> value, as the JSON report has them."""
        return {name: float(value) for name, value in asdict(self).items()}


def measure(
    outcomes: Sequence[Outcome], gpus: int, baseline: Sequence[Outcome] | None = None
) -> Metrics:
    """Metrics of one schedule; ``baseline`` is the schedule that "hurt" compares with.

    Raises DataError when the baseline does not hold exactly the same jobs.
    """
    if not outcomes:
        raise DataError("schedule", "no finished job", "replay at least one job")
    times = sorted(item.jct_s for item in outcomes)
    total = math.fsum(times)
    makespan = max(item.end_s for item in outcomes) - min(item.submit_s for item in outcomes)
    return Metrics(
        avg_jct_s=total / len(times),
        median_jct_s=percentile(times, 50),
        p95_jct_s=percentile(times, 95),
        p99_jct_s=percentile(times, 99),
        makespan_s=makespan,
        max_slowdown=max(item.jct_s / item.error_free_s for item in outcomes),
        share_hurt_10pct=_share_hurt(outcomes, baseline) if baseline is not None else 0.0,
        queue_share_of_jct=_share(math.fsum(item.jct_s - item.held_s for item in outcomes), total),
        gpu_utilisation=_share(math.fsum(item.gpu_seconds for item in outcomes), gpus * makespan),
    )


def ratios(baseline: Metrics, ours: Metrics) -> dict[str, float | None]:
    """Baseline / ours per metric (utilisation: ours / baseline); None where either is zero.

    "Hurt" of the baseline itself is zero, so that it has no ratio.
    """
    result: dict[str, float | None] = {}
    mine = ours.as_dict()
    for name, value in baseline.as_dict().items():
        above, below = (mine[name], value) if name in _MORE_IS_BETTER else (value, mine[name])
        result[name] = above / below if above and below else None
    return result


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two closest ranks, as numpy's default does."""
    place = (len(ascending) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def _share(part: float, whole: float) -> float:
    """Runs that are shorter than the clock can tell, late in a trace, come to no time at all."""
    return part / whole if whole else 0.0


def _share_hurt(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    before: Mapping[str, float] = {item.job_id: item.jct_s for item in baseline}
    names = {item.job_id for item in outcomes}
    if names != before.keys():
        odd = ", ".join(sorted(names ^ before.keys())[:5])
        raise DataError("baseline", f"jobs differ ({odd})", "compare replays of the same jobs")
    hurt = sum(item.jct_s > HURT_FACTOR * before[item.job_id] for item in outcomes)
    return hurt / len(outcomes)

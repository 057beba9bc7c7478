"""What Slurm and the daemon add to an ideal replay, so that it can be compared with a real cluster.

Four delays, each seen on live clusters: a submission is looked at after ``grace_s``; decisions take
place at multiples of ``cycle_s`` (slurmctld starts waiting jobs at its own beat, not at the event);
a started job holds its GPUs for ``launch_s`` before its program runs, and for ``epilog_s`` after
its program has ended. All in seconds of the trace's own time.

``calibrate`` finds the two delays that cannot be read off the stamps of a job by trying a grid: the
caller says how to replay and what really happened. Which workload it is fitted on and which one it
is judged on is the caller's choice; judging on the same one proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.model import Run

# Of a clock that counts in months, shorter beats are lost in the rounding.
_LEAST_CYCLE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Overhead:
    """See the module; nothing at all by default."""

    cycle_s: float = 0.0
    launch_s: float = 0.0
    epilog_s: float = 0.0
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("cycle_s", "launch_s", "epilog_s", "grace_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise DataError(f"overhead {name}", f"{value!r} is not 0 or more", "write seconds")
        if 0 < self.cycle_s < _LEAST_CYCLE_S:
            raise DataError(
                "overhead cycle_s",
                f"{self.cycle_s!r} is lost in the rounding of the clock",
                f"write 0, or {_LEAST_CYCLE_S:g} s or more",
            )


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a replay is from what really happened; errors are replayed / real - 1."""

    avg_jct_error: float
    makespan_error: float
    p90_start_error_s: float


def agreement(real: Iterable[Run], replayed: Iterable[Run]) -> Agreement:
    """Compare two records of the same jobs. Raises DataError where the jobs differ."""
    truth, model = _by_job(real), _by_job(replayed)
    if truth.keys() != model.keys() or not truth:
        odd = ", ".join(sorted(truth.keys() ^ model.keys())[:5])
        raise DataError("comparison", f"jobs differ ({odd})", "compare records of the same jobs")
    starts = sorted(abs(model[key][1] - truth[key][1]) for key in truth)
    return Agreement(
        _mean_jct(model) / _mean_jct(truth) - 1,
        _makespan(model) / _makespan(truth) - 1,
        starts[min(len(starts) - 1, math.ceil(0.9 * len(starts)) - 1)],
    )


def launch_seconds(real: Iterable[Run], true_run_s: Callable[[Run], float]) -> float:
    """The median time that a job held its GPUs beyond its own run time: launch and clean-up."""
    extra = [run.end_s - run.start_s - true_run_s(run) for run in real]
    if not extra:
        raise DataError("calibration", "no run", "give at least one finished job")
    return max(0.0, median(extra))


def calibrate(
    real: Sequence[Run],
    replay_with: Callable[[Overhead], Sequence[Run]],
    cycles_s: Sequence[float],
    epilogs_s: Sequence[float],
    base: Overhead | None = None,
) -> Overhead:
    """The overhead of the grid whose replay starts jobs nearest to when they really started.

    Least mean absolute error of the starts; among equals the smallest delays.
    """
    start = base or Overhead()
    truth = _by_job(real)
    best: tuple[float, float, float] | None = None
    for cycle in sorted(cycles_s):
        for epilog in sorted(epilogs_s):
            tried = Overhead(cycle, start.launch_s, epilog, start.grace_s)
            model = _by_job(replay_with(tried))
            if model.keys() != truth.keys():
                raise DataError("calibration", "jobs differ", "replay the jobs that really ran")
            error = fmean(abs(model[key][1] - truth[key][1]) for key in truth)
            if best is None or (error, cycle, epilog) < best:
                best = (error, cycle, epilog)
    if best is None:
        raise DataError("calibration", "nothing to try", "give at least one cycle and one epilog")
    return Overhead(best[1], start.launch_s, best[2], start.grace_s)


_Times = Mapping[str, tuple[float, float, float]]


def _by_job(runs: Iterable[Run]) -> _Times:
    """Job id -> submission, first start, last end."""
    found: dict[str, tuple[float, float, float]] = {}
    for run in runs:
        seen = found.get(run.job_id)
        start = run.start_s if seen is None else min(seen[1], run.start_s)
        end = run.end_s if seen is None else max(seen[2], run.end_s)
        found[run.job_id] = (run.submit_s, start, end)
    return found


def _mean_jct(times: _Times) -> float:
    return fmean(end - submit for submit, _, end in times.values())


def _makespan(times: _Times) -> float:
    return max(end for *_, end in times.values()) - min(submit for submit, *_ in times.values())

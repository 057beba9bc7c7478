"""Each metric on a schedule small enough to check by hand."""

from __future__ import annotations

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.metrics import Metrics, Outcome, measure, percentile, ratios


def outcome(job_id: str, submit: float, end: float, held: float, gpus: int = 1) -> Outcome:
    return Outcome(job_id, submit, end, held, gpus * held, error_free_s=10.0)


# JCTs 10, 20, 30; waits 0, 10, 10; the machine has 4 GPUs from 0 to 40.
SCHEDULE = (
    outcome("a", 0, 10, 10, gpus=4),
    outcome("b", 0, 20, 10, gpus=2),
    outcome("c", 10, 40, 20, gpus=1),
)


def test_by_hand() -> None:
    found = measure(SCHEDULE, gpus=4)
    assert found.avg_jct_s == pytest.approx(20)
    assert found.median_jct_s == pytest.approx(20)
    assert found.p95_jct_s == pytest.approx(29)
    assert found.p99_jct_s == pytest.approx(29.8)
    assert found.makespan_s == pytest.approx(40)
    assert found.max_slowdown == pytest.approx(3)
    assert found.queue_share_of_jct == pytest.approx(20 / 60)
    assert found.gpu_utilisation == pytest.approx((40 + 20 + 20) / (4 * 40))
    assert found.share_hurt_10pct == 0


def test_hurt_compares_the_same_job() -> None:
    slower = (outcome("a", 0, 11.5, 10), outcome("b", 0, 21, 10), outcome("c", 10, 20, 10))
    assert measure(slower, 4, baseline=SCHEDULE).share_hurt_10pct == pytest.approx(1 / 3)
    assert measure(SCHEDULE, 4, baseline=SCHEDULE).share_hurt_10pct == 0


def test_hurt_needs_the_same_jobs() -> None:
    with pytest.raises(DataError, match="jobs differ"):
        measure(SCHEDULE[:2], 4, baseline=SCHEDULE)


def test_nothing_finished_is_not_a_schedule() -> None:
    with pytest.raises(DataError, match="no finished job"):
        measure((), 4)


def test_ratio_is_baseline_over_ours_and_turned_round_for_utilisation() -> None:
    base = Metrics(20, 20, 20, 20, 40, 3, 0.0, 0.5, 0.4)
    ours = Metrics(10, 10, 10, 10, 20, 1.5, 0.1, 0.25, 0.8)
    found = ratios(base, ours)
    assert found["avg_jct_s"] == 2
    assert found["gpu_utilisation"] == 2
    assert found["share_hurt_10pct"] is None
    assert ratios(base, base)["avg_jct_s"] == 1


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 2.5), (100, 4), (95, 3.85)])
def test_percentile_is_linear(percent: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], percent) == pytest.approx(expected)

"""Rules that the ideal replay and the replay on a real cluster share."""

from __future__ import annotations

import pytest

from slurm_ext.sim.engine import Hardware
from slurm_ext.sim.jobs import Rules, build_jobs, counts_for, error_of, limit_s, true_times
from slurm_ext.sim.truth import Curve, Truth
from slurm_ext.sim.workload import WorkloadJob

PLACEMENTS = ((1,), (2,), (4,), (4, 4), (4, 4, 4), (4, 4, 4, 4))
CURVE = Curve((1.0, 256.0), (1.0, 1.0), (0.0, 0.0))
TRUTH = Truth({("m", placement): CURVE for placement in PLACEMENTS}, {"m": 10.0})


def job(gpus: int = 2, batch: int = 48) -> WorkloadJob:
    return WorkloadJob("j", 0.0, "m", "t", gpus, batch, 4800.0)


def test_counts_keep_the_global_batch_and_the_requested_count() -> None:
    assert counts_for(job(2, 48), (1, 2, 4, 8, 12, 16)) == (1, 2, 4, 8, 12, 16)
    assert counts_for(job(2, 128), (1, 2, 4, 8, 12, 16)) == (1, 2, 4, 8, 16)
    assert counts_for(job(12, 64), (1, 2)) == (1, 2, 12)


@pytest.mark.parametrize(
    ("run", "step", "expected"),
    [(100, 0, 150), (100, 60, 180), (40, 60, 60), (40.0001, 60, 120), (100, 3600, 3600)],
)
def test_limit_is_rounded_up_as_slurm_does(run: float, step: float, expected: float) -> None:
    assert limit_s(run, Rules(limit_step_s=step)) == expected


def test_hidden_error_is_in_the_true_time_and_the_limit_but_not_in_the_estimate() -> None:
    rules = Rules(seed=3)
    error = error_of(job(), rules)
    assert error != 1.0
    (built,) = build_jobs([job()], TRUTH, Hardware(), rules)
    (plain,) = build_jobs([job()], TRUTH, Hardware(), Rules())
    for count, seconds in built.true_run_s.items():
        assert seconds == pytest.approx(error * plain.true_run_s[count])
    assert built.limit_s == pytest.approx(1.5 * built.true_run_s[2])
    assert built.error_free_s == plain.true_run_s[2]
    values = [candidate.remaining_s.value for candidate in built.candidates]
    assert values == [candidate.remaining_s.value for candidate in plain.candidates]
    for candidate in built.candidates:
        true = built.true_run_s[candidate.gpus]
        assert candidate.remaining_s.low <= true <= candidate.remaining_s.high


def test_true_times_use_the_consolidated_placement_also_when_pooled() -> None:
    slow = Curve((1.0, 256.0), (5.0, 5.0), (0.0, 0.0))
    curves = {("m", p): slow if len(p) > 1 else CURVE for p in PLACEMENTS}
    times = true_times(job(), Truth(curves, {"m": 10.0}), Rules())
    # 100 steps of 48 samples: 1 s each on one node, 5 s each on two.
    assert times[4] == pytest.approx(40 + 100)
    assert times[8] == pytest.approx(40 + 500)


def test_efficiency_floor_removes_wasteful_counts_but_never_the_requested_one() -> None:
    # A step takes 1 s however many GPUs share the batch: 16 GPUs are as fast as one.
    def offered(gpus: int, floor: float) -> list[int]:
        rules = Rules(efficiency_floor=floor)
        (built,) = build_jobs([job(gpus)], TRUTH, Hardware(), rules)
        return [candidate.gpus for candidate in built.candidates]

    assert offered(2, 0.0) == [1, 2, 4, 8, 12, 16]
    assert offered(2, 0.3) == [1, 2]
    assert offered(8, 0.3) == [1, 2, 8]


def test_no_candidate_is_larger_than_the_machine() -> None:
    (built,) = build_jobs([job()], TRUTH, Hardware(nodes=2), Rules())
    assert max(candidate.gpus for candidate in built.candidates) == 8

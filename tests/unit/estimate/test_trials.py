"""Trials, their rows and their worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.measurement import CostKind, Measurement
from slurm_ext.estimate.trials import (
    Grid,
    Outcome,
    Timing,
    Trial,
    cold_starts,
    hopeless,
    measurement,
    median_step,
    placement_of,
    trials,
    worth,
)


def row(trial: Trial, throughput: float) -> Measurement:
    return Measurement(trial.key("m", "v100", "e"), throughput=throughput)


@pytest.mark.parametrize(
    ("gpus", "per_node", "placement"), [(1, 4, (1,)), (4, 4, (4,)), (6, 4, (4, 2)), (8, 4, (4, 4))]
)
def test_the_fewest_nodes_whole_ones_first(gpus, per_node, placement):
    assert placement_of(gpus, per_node) == placement


@given(
    st.builds(
        Grid,
        gpus=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
        local_batches=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
        accumulations=st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
        stages=st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
        micro_batches=st.lists(st.integers(1, 4), max_size=2).map(tuple),
    ),
    st.integers(1, 4),
)
def test_every_trial_can_be_run_and_none_comes_twice(grid, per_node):
    try:
        found = trials(grid, per_node)
    except DataError:
        return
    assert len(set(found)) == len(found)
    for trial in found:
        assert trial.gpus % trial.stages == 0
        assert trial.local_batch * trial.stages % trial.micro_batches == 0
        assert sum(trial.placement) == trial.gpus
        assert max(trial.placement) <= per_node


def test_a_grid_without_a_trial_is_refused():
    with pytest.raises(DataError, match="no combination"):
        trials(Grid(gpus=(3,), stages=(2,)), 4)


def test_larger_batches_come_later_and_are_left_out_after_a_smaller_one_did_not_fit():
    small, large = trials(Grid(local_batches=(16, 8)), 1)
    assert (small.local_batch, large.local_batch) == (8, 16)
    failed = [Outcome(small, out_of_memory=True)]
    assert hopeless(large, failed)
    assert not hopeless(small, [Outcome(large, out_of_memory=True)])
    assert not hopeless(Trial(2, (2,), 16), failed)
    assert not hopeless(large, [Outcome(small, failure="exit code 1")])


def test_a_row_is_the_median_step_and_the_time_that_comes_once_per_step():
    trial = Trial(2, (2,), 8, 2)
    walls = (1.0, 1.0, 9.0, 1.2, 0.8)  # one hiccup
    outcome = Outcome(trial, tuple(Timing(w, w - 0.25, 3 * 10**9) for w in walls))
    found = measurement(outcome, trial.key("m", "v100", "e"), measured_s=5.0, source="s")
    assert found is not None
    assert found.step_time_s == 1.0
    assert found.throughput == 32.0
    assert found.sync_time_s == pytest.approx(0.25)
    assert found.memory_gb == 3.0
    assert (found.count, found.variance) == (1, None)  # one run tells no variance between runs
    assert median_step(outcome) == (1.0, pytest.approx(0.1))


def test_what_did_not_fit_is_a_row_and_what_was_too_short_is_none():
    trial = Trial(1, (1,), 8)
    key = trial.key("m", "v100", "e")
    full = measurement(Outcome(trial, out_of_memory=True), key, measured_s=5.0, source="s")
    assert full is not None
    assert (full.count, full.out_of_memory, full.throughput) == (0, 1, 0.0)
    short = Outcome(trial, (Timing(1.0), Timing(1.0)))
    assert measurement(short, key, measured_s=5.0, source="s") is None


def test_cold_starts_are_medians_per_count_without_failed_runs():
    one, two = Trial(1, (1,), 8), Trial(2, (2,), 8)
    found = cold_starts(
        [
            Outcome(one, first_step_s=3.0),
            Outcome(one, first_step_s=5.0),
            Outcome(two, first_step_s=9.0),
            Outcome(two, first_step_s=99.0, failure="exit code 1"),
        ],
        "m",
        "v100",
        "s",
    )
    assert [(c.kind, c.gpus, c.seconds) for c in found] == [
        (CostKind.COLD_START, 1, 4.0),
        (CostKind.COLD_START, 2, 9.0),
    ]


def test_worth_is_the_best_of_a_count_against_the_average_there():
    rows = [
        row(Trial(2, (2,), 4), 10.0),  # 200 GPU seconds per thousand samples
        row(Trial(2, (2,), 8), 20.0),  # 100
        row(Trial(4, (4,), 8), 40.0),  # 100, nothing to choose
    ]
    found = worth(rows, spent_gpu_h=10.0, job_samples=36_000)
    assert (found.gpus, found.any_gpu_s, found.best_gpu_s) == (2, 150.0, 100.0)
    assert found.best == rows[1].key
    # A job saves 50 x 36 = 1800 GPU seconds, half an hour: twenty jobs.
    assert found.jobs == 20


def test_nothing_to_choose_is_worth_nothing():
    assert worth([row(Trial(1, (1,), 4), 10.0)], 1.0, 1000).jobs is None
    assert worth([], 1.0, 1000).best is None


def test_precisions_are_not_exchanged_for_one_another():
    rows = [
        row(Trial(1, (1,), 4, precision="fp32"), 10.0),
        row(Trial(1, (1,), 4, precision="bf16"), 30.0),
    ]
    assert worth(rows, 1.0, 1000).jobs is None

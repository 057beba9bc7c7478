"""Feasible configurations: constant global batch, memory, accumulation, pipelines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.estimate import Source
from slurm_ext.estimate.enumerate import (
    Choice,
    Request,
    best,
    consolidated,
    feasible,
    spread_evenly,
)
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.measurement import Settings
from tests.unit.estimate.builders import row


def request(batch: int, top: int | None = None, **values: object) -> Request:
    return Request("m", "v100", batch, top or batch, **values)  # type: ignore[arg-type]


def chosen(index: ThroughputIndex, r: Request, placement: tuple[int, ...]) -> Choice:
    choice = best(index, r, placement)
    assert isinstance(choice, Choice), choice
    return choice


@pytest.mark.parametrize(
    ("gpus", "placement"),
    [(1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (6, (4, 2)), (8, (4, 4)), (16, (4, 4, 4, 4))],
)
def test_consolidated(gpus: int, placement: tuple[int, ...]) -> None:
    assert consolidated(gpus, 4) == placement


def test_spread_evenly() -> None:
    assert spread_evenly(4, 2) == (2, 2)
    assert spread_evenly(5, 3) == (2, 2, 1)


def test_hand_case_by_global_batch() -> None:
    index = ThroughputIndex([row(128, 900.0), row(256, 1300.0)])
    choice = chosen(index, request(192), (1,))
    assert choice.throughput.value == pytest.approx(1100.0)
    assert choice.throughput.source is Source.INTERPOLATED
    assert choice.configuration.local_batch == 192
    assert choice.configuration.accumulation == 1


def test_count_that_does_not_divide_the_batch() -> None:
    index = ThroughputIndex([row(8, 100.0, 3), row(16, 150.0, 3)])
    assert best(index, request(100), (3,)) == "global batch 100 does not divide by 3 GPUs"


def test_accumulation_pays_the_synchronisation_once() -> None:
    # 2 GPUs, local 64: step 0.5 s of which 0.1 s sync; two micro-batches: 0.1 + 2 x 0.4 = 0.9 s.
    index = ThroughputIndex([row(32, 200.0, 2, sync=0.1), row(64, 256.0, 2, sync=0.1)])
    choice = chosen(index, request(256), (2,))
    assert (choice.configuration.local_batch, choice.configuration.accumulation) == (64, 2)
    assert choice.throughput.value == pytest.approx(256 / 0.9)
    assert choice.throughput.source is Source.INTERPOLATED
    assert "2 micro-batches computed from one" in choice.throughput.note


def test_measured_accumulation_wins_over_computed() -> None:
    index = ThroughputIndex(
        [
            row(32, 200.0, 2, sync=0.1),
            row(64, 256.0, 2, sync=0.1),
            row(64, 300.0, 2, accumulation=2),
        ]
    )
    choice = chosen(index, request(256), (2,))
    assert choice.throughput.value == 300.0
    assert choice.throughput.source is Source.MEASURED


def test_unknown_sync_time_promises_no_gain() -> None:
    index = ThroughputIndex([row(32, 200.0, 2), row(64, 256.0, 2)])
    choice = chosen(index, request(256), (2,))
    assert choice.throughput.value == pytest.approx(256.0)
    assert choice.throughput.high > 256.0 * 1.3
    assert "sync time not recorded" in choice.throughput.note


def test_memory_filter_takes_the_smaller_batch() -> None:
    index = ThroughputIndex([row(32, 100.0, memory_gb=10.0), row(64, 120.0, memory_gb=20.0)])
    assert chosen(index, request(64, memory_gb=32.0), (1,)).configuration.local_batch == 64
    small = chosen(index, request(64, memory_gb=16.0), (1,)).configuration
    assert (small.local_batch, small.accumulation) == (32, 2)
    reason = best(index, request(64, memory_gb=1.0), (1,))
    assert reason == "local batch 64 needs 20.0 GB of 1 GB"


def test_larger_than_measured_needs_known_memory() -> None:
    known = ThroughputIndex([row(40, 100.0, memory_gb=10.0), row(50, 120.0, memory_gb=12.0)])
    blind = ThroughputIndex([row(40, 100.0), row(50, 120.0)])
    # 53 is prime: only 53 x 1 (outside, above) or 1 x 53 (too far below).
    assert chosen(known, request(53, memory_gb=32.0), (1,)).outside
    assert "whether it fits" in str(best(known, request(53), (1,)))
    assert "whether it fits" in str(best(blind, request(53, memory_gb=32.0), (1,)))
    # Measured 12 GB may fill 12 GB; a continued 12.6 GB needs a margin.
    assert chosen(known, request(50, memory_gb=12.0), (1,)).configuration.accumulation == 1
    assert "needs 12.6 GB of 13 GB" in str(best(known, request(53, memory_gb=13.0), (1,)))
    assert "needs 12.6 GB" in str(best(known, request(53, memory_gb=12.5), (1,)))


def test_inside_the_range_is_preferred_to_outside() -> None:
    index = ThroughputIndex([row(32, 100.0, memory_gb=1.0), row(64, 190.0, memory_gb=2.0)])
    choice = chosen(index, request(96, memory_gb=80.0), (1,))
    # 96 x 1 would look faster on the continued line.
    assert (choice.configuration.local_batch, choice.configuration.accumulation) == (48, 2)


def test_out_of_memory_row_splits_the_curve() -> None:
    index = ThroughputIndex([row(32, 100.0), row(48, 0.0), row(64, 120.0)])
    assert chosen(index, request(128), (1,)).configuration.local_batch == 64
    assert "ran out of memory" in str(best(index, request(47), (1,)))


def test_another_placement_is_never_used() -> None:
    index = ThroughputIndex([row(32, 100.0, 2, placement=(1, 1))])
    assert "no measurement of m on 2 GPUs on 1 node" in str(best(index, request(64), (2,)))
    assert isinstance(best(index, request(64), (1, 1)), Choice)


def test_pipeline_needs_whole_micro_batches() -> None:
    piped = Settings(stages=2, micro_batches=8)
    index = ThroughputIndex([row(4, 100.0, 2, settings=piped), row(5, 110.0, 2, settings=piped)])
    r = request(8, settings=piped)
    assert isinstance(best(index, r, (2,)), Choice)  # 4 x 2 stages = 8 micro-batches of one
    assert "does not split into 8 micro-batches" in str(
        best(index, request(10, settings=piped), (2,))
    )


def test_batch_range_takes_the_fastest_and_by_steps_the_shortest_step() -> None:
    index = ThroughputIndex([row(32, 100.0), row(64, 150.0), row(128, 160.0)])
    assert chosen(index, request(32, 128), (1,)).configuration.global_batch == 128
    assert chosen(index, request(32, 128, by_steps=True), (1,)).configuration.global_batch == 32


def test_wide_batch_range_stays_bounded() -> None:
    index = ThroughputIndex([row(32, 100.0), row(64, 150.0)])
    choices, _ = feasible(index, request(1, 10**7), (1,))
    assert 0 < len(choices) < 5000
    assert all(1 <= c.configuration.global_batch <= 10**7 for c in choices)


batches = st.lists(st.integers(1, 128), min_size=1, max_size=6, unique=True)


@given(batches, st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 4096), st.integers(0, 200))
def test_global_batch_is_constant(locals_: list[int], gpus: int, low: int, more: int) -> None:
    index = ThroughputIndex([row(b, 10.0 * b, gpus, sync=0.01) for b in locals_])
    choices, reason = feasible(index, request(low, low + more), consolidated(gpus, 4))
    assert bool(choices) != bool(reason)
    for choice in choices:
        c = choice.configuration
        assert low <= c.local_batch * c.gpus * c.accumulation <= low + more
        assert c.gpus == sum(c.placement) == gpus
        assert 0 < choice.throughput.low <= choice.throughput.value <= choice.throughput.high

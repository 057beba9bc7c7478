"""Corrections of the throughput table by what jobs report."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.job import JobState
from slurm_ext.domain.progress import Progress
from slurm_ext.estimate.calibration import (
    KEPT,
    MAX_AGE_S,
    NO_CALIBRATION,
    Calibration,
    Sample,
    fit,
    kept,
)
from slurm_ext.estimate.enumerate import Request
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.remaining import EstimateSources, candidates
from slurm_ext.estimate.reported import WARM_UP_STEPS, sample_of
from tests.unit.estimate.builders import directive, job, row

COUNTS = (1, 2, 4, 8)
TRUE = {1: 100.0, 2: 190.0, 4: 360.0, 8: 600.0}


def table(off: float = 1.0, **rows: float) -> ThroughputIndex:
    """What the table says: the truth times ``off``, for model n the truth itself."""
    points = []
    for gpus, rate in TRUE.items():
        wrong = rows.get(f"g{gpus}", off)
        points += [row(b, rate * wrong, gpus, sync=0.0) for b in (16, 32, 64, 128)]
        points += [row(b, rate * wrong / 2, gpus, sync=0.0, gpu_type="T4") for b in (16, 32, 64)]
        points += [row(b, rate, gpus, sync=0.0, model="n") for b in (16, 32, 64, 128)]
    return ThroughputIndex(points)


def sample(
    number: int, gpus: int = 1, noise: float = 1.0, gpu_type: str = "v100", **values: object
) -> Sample:
    """A job that runs as fast as the truth has it."""
    half = 2.0 if gpu_type == "t4" else 1.0
    made = Sample(
        f"{number}",
        "ann",
        Request("m", gpu_type, 128, 128),
        (4,) * (gpus // 4) or (gpus,),
        TRUE[gpus] * noise / half,
        float(number),
    )
    return replace(made, **values)


def seconds(
    index: ThroughputIndex, calibration: Calibration, gpus: int = 4, gpu: str = "v100"
) -> float:
    sources = EstimateSources(index=index, calibration=calibration)
    found = candidates(job(1), directive(), COUNTS, 4, gpu, sources, 0.0).at(gpus)
    assert found is not None
    return found.remaining_s.value


@pytest.mark.parametrize("off", [1.5, 1 / 1.5, 2.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_table_wrong_for_one_model_is_within_a_tenth_after_three_jobs(off, seed):
    """Three jobs on different GPU counts, each of which varies by some percent by itself."""
    rng = random.Random(seed)
    index, right = table(off), table()
    samples = [sample(i, g, rng.gauss(1.0, 0.03)) for i, g in enumerate((1, 4, 8))]
    corrected = fit(samples, index)
    for gpus in COUNTS:
        before = seconds(index, NO_CALIBRATION, gpus) / seconds(right, NO_CALIBRATION, gpus)
        after = seconds(index, corrected, gpus) / seconds(right, NO_CALIBRATION, gpus)
        assert before == pytest.approx(off ** (-1.0), rel=0.01)
        limit = 0.1 if max(off, 1 / off) <= 1.5 else 0.2
        assert abs(after - 1.0) < limit
    # The same seconds, but a model that nobody reported on.
    (other,) = [
        candidates(job(4), directive(model="n"), (4,), 4, "v100", s, 0.0).candidates
        for s in (EstimateSources(index=index, calibration=corrected),)
    ]
    assert "corrected" not in other[0].remaining_s.note


def test_few_jobs_are_believed_less_than_many():
    index = table(1.5)
    factors = [
        fit([sample(i) for i in range(n)], index).corrections[0].factor for n in (1, 2, 3, 10)
    ]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(1.5 ** (-1 / 1.5))
    assert factors[-1] == pytest.approx(1 / 1.5, rel=0.03)


def test_the_correction_is_told_with_its_size_and_its_jobs():
    index = table(1.5)
    sources = EstimateSources(index=index, calibration=fit([sample(i) for i in range(3)], index))
    found = candidates(job(4), directive(), (4,), 4, "v100", sources, 0.0).at(4)
    assert found is not None
    assert "table corrected by 0.71 from 3 jobs" in found.remaining_s.note
    assert found.throughput is not None
    assert found.throughput.low < found.throughput.value < found.throughput.high


def test_a_row_that_stays_off_is_named_and_corrected_and_no_other():
    index, right = table(1.5, g8=3.0), table()
    samples = [sample(i, g) for i, g in enumerate((1, 1, 2, 2, 4, 4, 8, 8, 8))]
    found = fit(samples, index)
    (stale,) = found.stale
    assert (stale.model, stale.gpu_type, stale.placement, stale.jobs) == ("m", "v100", (4, 4), 3)
    assert stale.factor == pytest.approx(1 / 2, rel=0.25)
    assert found.corrections[0].factor == pytest.approx(1 / 1.5, rel=0.05)
    for gpus in (1, 2, 4):
        expected = seconds(right, NO_CALIBRATION, gpus)
        assert seconds(index, found, gpus) == pytest.approx(expected, rel=0.05)
    assert seconds(index, found, 8) == pytest.approx(seconds(right, NO_CALIBRATION, 8), rel=0.25)
    sources = EstimateSources(index=index, calibration=found)
    eight = candidates(job(8), directive(), (8,), 4, "v100", sources, 0.0).at(8)
    assert eight is not None
    assert "to be measured again" in eight.remaining_s.note


def test_one_job_makes_no_stale_row():
    index = table(1.0, g8=2.0)
    assert fit([sample(0, 1), sample(1, 4), sample(2, 8)], index).stale == ()


def test_gpu_types_are_told_apart_and_share_what_they_have_in_common():
    index = table(1.5)  # both types off by 1.5
    only_v100 = fit([sample(i) for i in range(3)], index)
    true_t4 = seconds(table(), NO_CALIBRATION, 4, "t4")
    shared = seconds(index, only_v100, 4, "t4") / true_t4
    assert shared == pytest.approx(1.0, abs=0.1)  # the model's bias holds for a type unseen
    # T4 reports that the table is right there after all.
    right_on_t4 = [sample(10 + i, 1, 1.5, "t4") for i in range(3)]
    both = fit([*(sample(i) for i in range(3)), *right_on_t4], index)
    by_type = {c.gpu_type: c.factor for c in both.corrections}
    assert by_type["t4"] == pytest.approx(1.0, abs=0.1)
    assert by_type["v100"] == pytest.approx(1 / 1.5, abs=0.1)


def test_a_measured_again_table_ends_the_correction():
    samples = [sample(i) for i in range(5)]
    assert fit(samples, table(1.5)).corrections[0].factor < 0.75
    assert fit(samples, table()).corrections[0].factor == pytest.approx(1.0)


def test_absurd_reports_count_nothing():
    index = table()
    lies = [sample(i, 1, 1e6) for i in range(5)] + [sample(9, 1, 1e-6)]
    assert fit(lies, index) == NO_CALIBRATION


def test_one_user_among_three_cannot_move_the_others():
    index = table()
    liar = [sample(i, g, 3.9, user="eve") for i, g in enumerate((1, 2, 4, 8) * 4)]
    honest = [sample(100, 1, user="ann"), sample(101, 4, user="bob")]
    (found,) = [c for c in fit([*liar, *honest], index).corrections if c.gpu_type == "v100"]
    assert found.factor == pytest.approx(1.0)


@given(
    st.permutations(
        [
            sample(i, g, n)
            for i, (g, n) in enumerate([(1, 1.1), (2, 0.9), (4, 1.3), (8, 0.7), (1, 1.0)])
        ]
    )
)
def test_the_order_of_samples_does_not_matter(samples):
    index = table(1.2)
    assert fit(samples, index) == fit(sorted(samples, key=lambda s: s.job_id), index)


def test_kept_are_the_newest_of_each_kind_one_per_job_and_none_too_old():
    many = [sample(i) for i in range(KEPT + 5)]
    twice = replace(many[3], at_s=1e3, samples_per_s=7.0)
    old = sample(500, at_s=-MAX_AGE_S)
    other = sample(600, gpu_type="t4")
    found = kept([twice, *many, old, other], now=1000.0)
    assert len(found) == KEPT + 1
    assert [s.samples_per_s for s in found if s.job_id == "3"] == [7.0]
    assert "500" not in {s.job_id for s in found}
    assert "0" not in {s.job_id for s in found}


REPORT = Progress("7", 0, 50.0, WARM_UP_STEPS, 1280, 90.0, 4)


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({}, True),
        ({"step": WARM_UP_STEPS - 1}, False),
        ({"step": 105, "restored_step": 100}, False),
        ({"attempt": 1}, False),
        ({"gpus": 2}, False),
        ({"samples_per_s": 0.0}, False),
    ],
)
def test_which_reports_tell_about_the_table(changes, counts):
    running = job(4, state=JobState.RUNNING, start_s=0.0)
    sources = EstimateSources(index=table(), progress={"7": replace(REPORT, **changes)})
    found = sample_of(running, directive(), 4, "V100", sources)
    assert (found is not None) == counts
    if found is not None:
        assert (found.request.model, found.placement, found.samples_per_s) == ("m", (4,), 90.0)


def test_a_waiting_job_and_an_unknown_model_tell_nothing():
    sources = EstimateSources(index=table(), progress={"7": REPORT})
    assert sample_of(job(4), directive(), 4, "V100", sources) is None
    running = job(4, state=JobState.RUNNING, start_s=0.0)
    assert sample_of(running, directive(model="x"), 4, "V100", sources) is None


def test_a_jobs_own_report_is_not_counted_twice():
    """The model is corrected by others; the job's own speed is what it reports, not the product."""
    index = table(1.5)
    found = fit([sample(i) for i in range(3)], index)
    running = job(4, state=JobState.RUNNING, start_s=0.0)
    report = replace(REPORT, samples_per_s=350.0, step=20, samples=2560)
    sources = EstimateSources(index=index, calibration=found, progress={"7": report})
    own = candidates(running, directive(), (4,), 4, "v100", sources, 50.0).at(4)
    assert own is not None
    assert own.throughput is not None
    assert own.throughput.value == pytest.approx(350.0)
    assert math.isclose(own.remaining_s.value, (10_000 - 2560) / 350.0)

"""Candidates: work, start-up, history, progress, floor, cap, refusals."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.directive import Directive, GpuRequest, Precision
from slurm_ext.domain.estimate import Source
from slurm_ext.domain.job import JobState
from slurm_ext.domain.progress import Hold, Progress
from slurm_ext.estimate.history import Declared, Habit
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.measurement import Cost, CostKind
from slurm_ext.estimate.remaining import (
    NO_LIMIT_S,
    Candidates,
    EstimateSources,
    candidates,
    ends_at,
    present_placement,
)
from tests.unit.estimate.builders import directive, job, row

# Perfect up to 4 GPUs, then 60 % and 20 % of the throughput per GPU.
ROWS = [
    row(b, 100.0 * g * share, g, sync=0.0)
    for g, share in ((1, 1.0), (2, 1.0), (4, 1.0), (8, 0.6), (16, 0.2))
    for b in (4, 8, 16, 32, 64, 128)
]
COSTS = [Cost(CostKind.CHECKPOINT, 30.0), Cost(CostKind.COLD_START, 10.0, "m", "V100")]
INDEX = ThroughputIndex(ROWS, COSTS)
SOURCES = EstimateSources(index=INDEX)
COUNTS = (1, 2, 4, 8, 12, 16)


def made(
    d: Directive | None = None,
    j=None,
    sources: EstimateSources = SOURCES,
    now: float = 0.0,
    counts=COUNTS,
    gpu="v100",
) -> Candidates:  # type: ignore[no-untyped-def]
    return candidates(j or job(), directive() if d is None else d, counts, 4, gpu, sources, now)


def gpus(found: Candidates) -> list[int]:
    return [c.gpus for c in found.candidates]


def test_start_up_plus_work() -> None:
    found = made()
    one = found.at(1)
    assert one is not None
    assert one.remaining_s.value == pytest.approx(40.0 + 10_000 / 100.0)
    assert one.remaining_s.low < one.remaining_s.value < one.remaining_s.high
    assert one.remaining_s.source is Source.MEASURED
    assert one.throughput is not None
    assert one.throughput.value == 100.0
    assert one.configuration.global_batch == 128
    eight = found.at(8)
    assert eight is not None
    assert eight.configuration.placement == (4, 4)
    assert eight.remaining_s.value == pytest.approx(40.0 + 10_000 / 480.0)


def test_refusals_have_reasons() -> None:
    found = made()
    assert gpus(found) == [1, 2, 4, 8]
    assert found.refused == {
        12: "global batch 128 does not divide by 12 GPUs",
        16: "throughput per GPU is 20% of the best, below the efficiency floor of 50%",
    }


def test_the_floor_is_the_administrators_and_spares_the_asked_count() -> None:
    assert gpus(made(sources=EstimateSources(index=INDEX, efficiency_floor=0.7))) == [1, 2, 4]
    assert 16 in gpus(made(j=job(16, nodes=4)))


def test_not_resizable_is_exactly_the_asked_shape() -> None:
    found = made(directive(gpus=GpuRequest()), job(4))
    assert gpus(found) == [4]
    assert found.refused == {}
    assert found.candidates[0].remaining_s.source is Source.MEASURED


def test_asked_placement_is_kept() -> None:
    assert present_placement(job(4, nodes=2), 4) == (2, 2)
    assert present_placement(job(8, nodes=1), 4) == (4, 4)
    found = made(directive(gpus=GpuRequest()), job(4, nodes=2))
    only = found.candidates[0]
    # (2, 2) is not measured; (4,) is another placement.
    assert only.configuration.placement == (2, 2)
    assert only.remaining_s.source is Source.DECLARED
    assert "no measurement of m on 4 GPUs on 2 nodes" in only.remaining_s.note


@pytest.mark.parametrize(
    ("d", "gpu", "words"),
    [
        (directive(model="other"), "v100", "model other is not in the throughput table"),
        (directive(model=None), "v100", "no --ft-model"),
        (directive(), "h100", "not measured on GPU type h100, only on v100"),
        (directive(batch=None), "v100", "no --ft-batch"),
        (directive(samples=None), "v100", "no amount of work"),
        (directive(precision=Precision.BF16), "v100", None),
    ],
)
def test_what_cannot_be_estimated_keeps_its_time_limit(
    d: Directive, gpu: str, words: str | None
) -> None:
    found = made(d, gpu=gpu)
    if words is None:
        assert "precision" in found.candidates[0].remaining_s.note
        return
    (only,) = found.candidates
    assert (only.gpus, only.remaining_s.value) == (1, 3600.0)
    assert only.remaining_s.source is Source.DECLARED
    assert words in only.remaining_s.note
    assert set(found.refused) == {2, 4, 8, 12, 16}
    assert all(words in reason for reason in found.refused.values())


def test_no_directive_and_no_gpu() -> None:
    (only,) = candidates(job(2), None, COUNTS, 4, "v100", SOURCES, 0.0).candidates
    assert (only.gpus, only.remaining_s.value) == (2, 3600.0)
    (cpu,) = candidates(job(0, nodes=3), None, (), 0, "", SOURCES, 0.0).candidates
    assert (cpu.gpus, cpu.configuration.nodes) == (0, 3)


def test_no_time_limit() -> None:
    (only,) = candidates(job(time_limit_s=None), None, (), 4, "", SOURCES, 0.0).candidates
    assert only.remaining_s.value == NO_LIMIT_S
    assert only.remaining_s.note == "no time limit; no --ft-model"
    assert only.remaining_s.unlimited
    assert only.remaining_s.scaled(0.5).unlimited
    habits = EstimateSources(index=INDEX, habits={("ann", Declared.LIMIT): Habit(1.5, 7, 0.4, 2.0)})
    (only,) = candidates(job(time_limit_s=None), None, (), 4, "", habits, 0.0).candidates
    assert only.remaining_s.note == "no time limit; no --ft-model"
    running = job(time_limit_s=None, start_s=0.0)
    assert ends_at(running, None, 4, "", SOURCES, 60.0).unlimited
    assert not ends_at(replace(running, end_s=900.0), None, 4, "", SOURCES, 60.0).unlimited
    assert not ends_at(job(start_s=0.0), None, 4, "", SOURCES, 60.0).unlimited


def test_habit_of_the_user_is_applied_and_shown() -> None:
    habits = {
        ("ann", Declared.LIMIT): Habit(1.5, 7, 0.4, 2.0),
        ("ann", Declared.WORK): Habit(2.0, 3, 1.0, 2.5),
    }
    sources = EstimateSources(index=INDEX, habits=habits)
    (only,) = candidates(job(), None, (), 4, "v100", sources, 0.0).candidates
    assert (only.remaining_s.low, only.remaining_s.value, only.remaining_s.high) == (
        1440.0,
        5400.0,
        7200.0,
    )
    assert "x 1.50 (median of 7 past jobs of ann" in only.remaining_s.note
    known = made(sources=sources).at(1)
    assert known is not None
    assert known.remaining_s.value == pytest.approx(40.0 + 20_000 / 100.0)
    assert "declared work x 2.00" in known.remaining_s.note
    other = made(j=job(user="bob"), sources=sources).at(1)
    assert other is not None
    assert other.remaining_s.value == pytest.approx(140.0)


def test_steps_and_epochs() -> None:
    by_steps = made(directive(samples=None, steps=100)).at(1)
    by_epochs = made(directive(samples=6400, epochs=2.0)).at(1)
    assert by_steps is not None
    assert by_epochs is not None
    assert by_steps.remaining_s.value == by_epochs.remaining_s.value == pytest.approx(168.0)


def report(**values: object) -> Progress:
    fields: dict[str, object] = {
        "job_id": "7",
        "attempt": 0,
        "at_s": 100.0,
        "step": 50,
        "samples": 6000,
        "samples_per_s": 0.0,
        "gpus": 1,
    }
    return Progress(**{**fields, **values})  # type: ignore[arg-type]


def with_report(**values: object) -> EstimateSources:
    return EstimateSources(index=INDEX, progress={"7": report(**values)})


def test_a_waiting_job_keeps_only_what_is_saved() -> None:
    saved = made(sources=with_report(last_checkpoint_step=25)).at(1)
    lost = made(sources=with_report()).at(1)
    assert saved is not None
    assert lost is not None
    assert saved.remaining_s.value == pytest.approx(40.0 + 7000 / 100.0)
    assert lost.remaining_s.value == pytest.approx(140.0)
    assert "3000 of 10000 samples done" in saved.remaining_s.note


def test_its_own_report_corrects_the_table_within_bounds() -> None:
    slow = made(sources=with_report(samples_per_s=50.0, gpus=4)).at(2)
    absurd = made(sources=with_report(samples_per_s=1e6, gpus=4)).at(2)
    assert slow is not None
    assert absurd is not None
    assert slow.throughput is not None
    # 50 of the predicted 400 samples/s is below a quarter: not believed either.
    assert slow.throughput.value == 200.0
    assert absurd.throughput is not None
    assert absurd.throughput.value == 200.0
    half = made(sources=with_report(samples_per_s=200.0, gpus=4)).at(2)
    assert half is not None
    assert half.throughput is not None
    assert half.throughput.value == pytest.approx(100.0)
    assert "x 0.50 by the job's own report" in half.remaining_s.note


def test_running_job_counts_from_its_start_or_its_report() -> None:
    running = job(1, state=JobState.RUNNING, start_s=0.0, end_s=3600.0)
    at_100 = made(j=running, now=100.0).at(1)
    assert at_100 is not None
    assert at_100.remaining_s.value == pytest.approx(40.0)
    reported = made(j=running, sources=with_report(), now=110.0).at(1)
    assert reported is not None
    assert reported.remaining_s.value == pytest.approx(4000 / 100.0 - 10.0)
    old = made(
        j=job(1, state=JobState.RUNNING, start_s=100.0, restarts=1),
        sources=with_report(),
        now=110.0,
    ).at(1)
    assert old is not None
    assert old.remaining_s.value == pytest.approx(130.0)


def test_ends_at_never_after_slurms_own_end() -> None:
    running = job(1, state=JobState.RUNNING, start_s=0.0, end_s=3600.0)
    end = ends_at(running, directive(), 4, "v100", SOURCES, 100.0)
    assert end.value == pytest.approx(140.0)
    short = job(1, state=JobState.RUNNING, start_s=0.0, end_s=120.0)
    assert ends_at(short, directive(), 4, "v100", SOURCES, 100.0).high == 120.0
    late = ends_at(running, directive(), 4, "v100", SOURCES, 1000.0)
    assert late.value == pytest.approx(1100.0)
    declared = ends_at(running, None, 4, "v100", SOURCES, 100.0)
    assert (declared.value, declared.source) == (3600.0, Source.DECLARED)


def test_the_end_follows_from_the_jobs_own_report_where_it_tells_its_whole_work() -> None:
    running = job(1, state=JobState.RUNNING, start_s=0.0, end_s=3600.0)
    report = Progress("7", 0, 100.0, 40, 4000, 20.0, 1, total_steps=100)
    sources = EstimateSources(progress={"7": report})  # no table at all
    end = ends_at(running, None, 4, "v100", sources, 110.0)
    assert end.source is Source.PROGRESS
    assert end.value == pytest.approx(100.0 + 6000 / 20.0)
    assert end.low < end.value < end.high
    more = EstimateSources(progress={"7": replace(report, total_samples=5000)})
    assert ends_at(running, None, 4, "v100", more, 110.0).value == pytest.approx(150.0)
    # An earlier attempt's report says nothing about the end of this one.
    again = replace(running, restarts=1, start_s=105.0)
    assert ends_at(again, None, 4, "v100", sources, 110.0).source is Source.DECLARED
    # Whatever the job claims, Slurm ends it at its limit.
    slow = EstimateSources(progress={"7": replace(report, samples_per_s=0.001)})
    assert ends_at(running, None, 4, "v100", slow, 110.0).value == 3600.0


def test_a_paused_job_ends_later() -> None:
    """By its own report, and by the table; a resume may always come at once."""
    running = job(1, state=JobState.RUNNING, start_s=0.0, end_s=36_000.0)
    hold = Hold(90.0, 900.0, "alice", "memory")
    report = Progress("7", 0, 100.0, 40, 4000, 20.0, 1, total_steps=100, hold=hold)
    sources = EstimateSources(progress={"7": report})
    end = ends_at(running, None, 4, "v100", sources, 110.0)
    assert end.value == pytest.approx(900.0 + 6000 / 20.0)
    assert 110.0 < end.low < 110.0 + 6000 / 20.0
    assert "paused, 790 s more at most" in end.note
    over = ends_at(running, None, 4, "v100", sources, 901.0)
    assert over.value == pytest.approx(901.0 + 6000 / 20.0 - 1.0)
    by_table = replace(report, total_steps=None)
    for held, rest_s in ((hold, 790.0), (None, -10.0)):
        told = EstimateSources(index=INDEX, progress={"7": replace(by_table, hold=held)})
        found = made(j=running, sources=told, now=110.0).at(1)
        assert found is not None
        assert found.remaining_s.value == pytest.approx(6000 / 100.0 + rest_s)


def test_a_requeued_job_has_what_lies_behind_its_checkpoint() -> None:
    waiting = job(1, restarts=1)
    report = Progress("7", 0, 100.0, 50, 5000, 100.0, 1, last_checkpoint_step=40)
    for changes, left in (
        ({}, 6000),
        ({"last_checkpoint_step": None}, 10_000),
        # The attempt that reported had not saved yet, and began from step 30.
        ({"last_checkpoint_step": None, "restored_step": 30}, 7000),
        ({"last_checkpoint_step": 80}, 5000),  # no more than all that was reported
    ):
        sources = EstimateSources(index=INDEX, progress={"7": replace(report, **changes)})
        found = made(j=waiting, sources=sources).at(1)
        assert found is not None
        assert found.remaining_s.value == pytest.approx(40.0 + left / 100.0)


def test_a_program_that_tells_its_work_needs_no_declared_one() -> None:
    report = Progress("7", 0, 100.0, 50, 5000, 100.0, 1, 50, total_steps=90)
    sources = EstimateSources(index=INDEX, progress={"7": report})
    found = made(directive(samples=None), job(1, restarts=1), sources).at(1)
    assert found is not None
    assert found.remaining_s.value == pytest.approx(40.0 + 4000 / 100.0)
    assert "the program's own word" in found.remaining_s.note


def test_gpu_hour_cap() -> None:
    # 1 GPU: 140 s; 2: 90 s = 180; 4: 65 s = 260; 8: 60.8 s = 487 GPU seconds.
    found = made(directive(max_gpu_hours=0.0556), job(4))  # 200 GPU seconds
    assert gpus(found) == [1, 2]
    assert found.refused[4].startswith("0.1 GPU hours exceed --ft-max-gpu-hours=")
    none_fits = made(directive(max_gpu_hours=0.0001), job(4))
    assert gpus(none_fits) == [4]
    assert set(none_fits.refused) == {1, 2, 8, 12, 16}


def test_missing_table_is_told() -> None:
    sources = EstimateSources(missing="table t: no such file; make one with table import")
    (only,) = made(sources=sources).candidates
    # The reason and its fix stand among the notes of the plan, once.
    assert only.remaining_s.note.endswith("; the throughput table could not be read")


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_more_samples_never_take_less_time(a: int, b: int) -> None:
    few, many = sorted((a, b))
    for one, other in zip(
        made(directive(samples=few)).candidates,
        made(directive(samples=many)).candidates,
        strict=True,
    ):
        assert one.remaining_s.value <= other.remaining_s.value
        assert (one.remaining_s.value < other.remaining_s.value) == (few < many)


shapes = st.tuples(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 4),
    st.integers(1, 1024),
    st.sets(st.integers(1, 16), max_size=5),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.none() | st.floats(0.001, 10),
)


@given(st.lists(shapes, min_size=1, max_size=6))
def test_a_remembered_answer_is_the_fresh_answer(jobs: list[tuple]) -> None:  # type: ignore[type-arg]
    shared = ThroughputIndex(ROWS, COSTS)
    for count, nodes, batch, counts, floor, cap in [*jobs, *jobs]:
        j, d = job(count, nodes=nodes), directive(batch, max_gpu_hours=cap)
        args = (j, d, tuple(counts), 4, "v100")
        kept = candidates(*args, EstimateSources(index=shared, efficiency_floor=floor), 0.0)
        fresh = candidates(
            *args,
            EstimateSources(index=ThroughputIndex(ROWS, COSTS), efficiency_floor=floor),
            0.0,
        )
        assert kept == fresh
        assert [c.gpus for c in kept.candidates] == sorted({c.gpus for c in kept.candidates})
        assert not set(kept.refused) & {c.gpus for c in kept.candidates}
        assert {*kept.refused, *(c.gpus for c in kept.candidates)} == {*counts, count}
        assert all(
            c.configuration.global_batch == batch
            for c in kept.candidates
            if c.throughput is not None
        )


def test_fast_enough_for_thousands_of_jobs() -> None:
    jobs = [(job(1, job_id=str(i)), directive(64 << i % 3, samples=1000 + i)) for i in range(2000)]
    started = time.process_time()
    for j, d in jobs:
        candidates(j, d, COUNTS, 4, "v100", SOURCES, 0.0)
    # Measured 0.1 s; the limit leaves room for a slow machine and still catches a lost memo.
    assert time.process_time() - started < 2.0

"""Which short trials measure a model, what their steps come to, and what they were worth. Pure.

A trial is one configuration run for some steps; its row is the median step after the warm-up, so
that a single hiccup does not count. A row's variance is between whole runs, as the table has it:
steps of one run share their start, their nodes and their neighbours, and would look surer than
they are. The spread inside a run is shown beside the row and not stored in it.

What a table is worth is told in the plainest way that the measurements themselves support: a job
that runs in any of the measured batches at its GPU count, against the best of them at that count.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.errors import DataError
from slurm_ext.estimate.measurement import Cost, CostKind, Key, Measurement, Settings

# Steps of a run that are left out: compilation, allocator, clocks coming up.
WARMUP_STEPS = 5
MEASURED_STEPS = 20
# Fewer steps than this give no median worth storing.
LEAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration to be run. ``placement`` as in the table."""

    gpus: int
    placement: tuple[int, ...]
    local_batch: int
    accumulation: int = 1
    precision: str = "fp32"
    grad_checkpointing: bool = False
    frozen: str = "none"
    stages: int = 1
    micro_batches: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.gpus * self.local_batch * self.accumulation

    def same_but_batch(self) -> Trial:
        """Equal for trials that differ in the local batch only."""
        return replace(self, local_batch=0, micro_batches=0)

    def key(self, model: str, gpu_type: str, environment: str, **known: str) -> Key:
        """The row's key. ``known`` may hold revision and input_shape."""
        settings = Settings(
            frozen=self.frozen,
            precision=self.precision,
            grad_checkpointing=self.grad_checkpointing,
            stages=self.stages,
            micro_batches=self.micro_batches,
            environment=environment,
            **known,
        )
        return Key(
            model,
            gpu_type,
            self.gpus,
            len(self.placement),
            self.placement,
            self.local_batch,
            self.accumulation,
            settings,
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """The values to combine."""

    gpus: tuple[int, ...] = (1,)
    local_batches: tuple[int, ...] = (8,)
    accumulations: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    grad_checkpointing: tuple[bool, ...] = (False,)
    frozen: tuple[str, ...] = ("none",)
    stages: tuple[int, ...] = (1,)
    micro_batches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of a run. ``compute_s`` is the part before it waited for other ranks."""

    wall_s: float
    compute_s: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a trial. ``timings`` are of its steps after the warm-up, ``seconds`` from start
    to end.

    ``first_step_s`` is from start to the end of the first step. ``failure`` says in a word what
    went wrong, "" = nothing.
    """

    trial: Trial
    timings: tuple[Timing, ...] = ()
    seconds: float = 0.0
    first_step_s: float | None = None
    out_of_memory: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Worth:
    """What measuring cost, in allocated GPU hours, and what a job gains by it.

    ``any_gpu_s`` and ``best_gpu_s`` are GPU seconds per thousand samples at the GPU count where
    choosing gains most; ``jobs`` is how many jobs pay the cost back, ``None`` = never.
    """

    spent_gpu_h: float
    gpus: int
    any_gpu_s: float
    best_gpu_s: float
    best: Key | None
    job_samples: int
    jobs: int | None


def placement_of(gpus: int, per_node: int) -> tuple[int, ...]:
    """The fewest nodes, whole ones first."""
    whole, rest = divmod(gpus, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())


def trials(grid: Grid, per_node: int) -> tuple[Trial, ...]:
    """All combinations that exist, small batches before large ones in each family.

    Raises DataError where none is left.
    """
    found: list[Trial] = []
    families = itertools.product(
        grid.gpus,
        grid.accumulations,
        grid.precisions,
        grid.grad_checkpointing,
        grid.frozen,
        grid.stages,
    )
    for gpus, accumulation, precision, recompute, frozen, stages in families:
        for local, micro in itertools.product(
            sorted(grid.local_batches), grid.micro_batches or (stages,)
        ):
            if gpus % stages or local * stages % micro or (stages == 1 and micro != 1):
                continue
            trial = Trial(
                gpus,
                placement_of(gpus, per_node),
                local,
                accumulation,
                precision,
                recompute,
                frozen,
                stages,
                micro,
            )
            if trial not in found:
                found.append(trial)
    if not found:
        raise DataError(
            "the grid of trials",
            "no combination of these values exists",
            "give GPU counts that are multiples of the stages, and batches that the micro-batches"
            " divide",
        )
    return tuple(found)


def hopeless(trial: Trial, done: Iterable[Outcome]) -> bool:
    """Whether a smaller batch of the same family has already run out of memory."""
    return any(
        o.out_of_memory
        and o.trial.same_but_batch() == trial.same_but_batch()
        and o.trial.local_batch < trial.local_batch
        for o in done
    )


def median_step(outcome: Outcome) -> tuple[float, float] | None:
    """Median seconds of a step and half the distance of its quartiles."""
    walls = [timing.wall_s for timing in outcome.timings]
    if len(walls) < LEAST_STEPS:
        return None
    low, middle, high = statistics.quantiles(walls, n=4, method="inclusive")
    return middle, (high - low) / 2


def measurement(
    outcome: Outcome, key: Key, *, measured_s: float, source: str
) -> Measurement | None:
    """The row of one run; ``None`` where it measured nothing."""
    if outcome.out_of_memory:
        return Measurement(key, count=0, out_of_memory=1, measured_s=measured_s, source=source)
    found = median_step(outcome)
    if found is None or found[0] <= 0.0:
        return None
    wall_s = found[0]
    rest = outcome.timings
    waits = [max(0.0, t.wall_s - t.compute_s) for t in rest if t.compute_s is not None]
    peaks = [t.memory_bytes for t in rest if t.memory_bytes is not None]
    return Measurement(
        key,
        throughput=outcome.trial.global_batch / wall_s,
        step_time_s=wall_s,
        sync_time_s=min(wall_s, statistics.median(waits)) if waits else None,
        memory_gb=max(peaks) / 1e9 if peaks else None,
        measured_s=measured_s,
        source=source,
    )


def cold_starts(
    outcomes: Iterable[Outcome], model: str, gpu_type: str, source: str
) -> tuple[Cost, ...]:
    """Median seconds from a start to the end of the first step, for each GPU count."""
    by_count: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.first_step_s is not None and not outcome.failure:
            by_count.setdefault(outcome.trial.gpus, []).append(outcome.first_step_s)
    return tuple(
        Cost(CostKind.COLD_START, statistics.median(values), model, gpu_type, gpus, source)
        for gpus, values in sorted(by_count.items())
    )


def worth(rows: Sequence[Measurement], spent_gpu_h: float, job_samples: int) -> Worth:
    """What the rows are worth to jobs of ``job_samples`` samples.

    Precision, frozen layers and recomputing belong to a job's meaning or memory and are not
    exchanged for one another: only local batch, accumulation and micro-batches are chosen.
    """
    best_found = Worth(spent_gpu_h, 0, 0.0, 0.0, None, job_samples, None)
    groups: dict[object, list[Measurement]] = {}
    for row in rows:
        if row.count and row.throughput > 0.0:
            settings = replace(row.key.settings, micro_batches=0)
            groups.setdefault((row.key.gpus, settings), []).append(row)
    for group in groups.values():
        per_thousand = [1000.0 * row.key.gpus / row.throughput for row in group]
        best = min(range(len(group)), key=per_thousand.__getitem__)
        gain = statistics.fmean(per_thousand) - per_thousand[best]
        if best_found.best is None or gain > best_found.any_gpu_s - best_found.best_gpu_s:
            saved_h = gain * job_samples / 1000.0 / 3600.0
            best_found = Worth(
                spent_gpu_h,
                group[best].key.gpus,
                statistics.fmean(per_thousand),
                per_thousand[best],
                group[best].key,
                job_samples,
                math.ceil(spent_gpu_h / saved_h) if saved_h > 0.0 else None,
            )
    return best_found

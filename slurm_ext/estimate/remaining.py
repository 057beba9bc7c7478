"""Candidates of a job: for each allowed GPU count the best configuration and the time that is left.

Pure: the same job, sources and time give the same answer. An estimate reserves nothing and promises
nothing; it has bounds and says where it comes from. What cannot be estimated is not offered, and
the reason is kept for ``explain``.

The present shape always has a candidate, even if only from the time limit, since the job runs in it
whenever nobody acts. One exception: where it would exceed the user's own ``--ft-max-gpu-hours`` and
another count would not. The efficiency floor never removes it: the user asked for that count.

Called for thousands of jobs per cycle. What depends on the table alone (which configuration is best
for which count) is remembered in the index under the few fields that decide it; per job only the
amount of work remains to be divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job
from slurm_ext.domain.progress import Progress
from slurm_ext.estimate.calibration import NO_CALIBRATION, Calibration
from slurm_ext.estimate.enumerate import Choice, Request, best, consolidated, spread_evenly
from slurm_ext.estimate.history import NO_HABIT, Declared, Habit
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.measurement import Settings
from slurm_ext.estimate.work import Work, calibration, left, reported_total

EFFICIENCY_FLOOR = 0.5
# A job without a time limit: a year, what Slurm itself takes for UNLIMITED when it plans.
NO_LIMIT_S = 365 * 86400.0
# A report about this job tells its speed better than a table; it still varies.
CALIBRATED_SPREAD = 0.1
OVERDUE = 0.1  # share of its run time that a job past its estimate is given on top

_NO_ROWS = ThroughputIndex()


@dataclass(frozen=True, slots=True)
class EstimateSources:
    """Everything that estimates may use. ``gpu_memory_gb`` has GPU types in lower case.

    ``calibration`` is what other jobs' reports tell about the table. ``missing`` names what could
    not be read (the table, say): estimates then fall back, and say so.
    """

    index: ThroughputIndex = field(default=_NO_ROWS)
    habits: Mapping[tuple[str, Declared], Habit] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    gpu_memory_gb: Mapping[str, float] = field(default_factory=dict)
    efficiency_floor: float = EFFICIENCY_FLOOR
    environment: str = ""
    missing: str = ""
    calibration: Calibration = NO_CALIBRATION


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates by ascending GPU count, and why each other count is not among them."""

    candidates: tuple[Candidate, ...]
    refused: Mapping[int, str] = field(default_factory=dict)

    def at(self, gpus: int) -> Candidate | None:
        """The candidate with this GPU count."""
        return next((c for c in self.candidates if c.gpus == gpus), None)


@dataclass(frozen=True, slots=True)
class _Options:
    """What the table offers for a job, whatever its amount of work."""

    choices: Mapping[int, Choice]
    startup_s: Mapping[int, float]
    refused: Mapping[int, str]


def candidates(
    job: Job,
    directive: Directive | None,
    counts: Sequence[int],
    pool_gpus_per_node: int,
    gpu_type: str,
    sources: EstimateSources,
    now: float,
) -> Candidates:
    """Candidates of one job for ``counts`` in a pool whose nodes have ``pool_gpus_per_node`` GPUs.

    ``counts`` are what directive, shape and limits allow; they are used only where the user lets
    the planner choose. Estimates count from ``now``.
    """
    present = present_placement(job, pool_gpus_per_node)
    resizable = directive is not None and directive.gpus.resizable
    wanted = sorted({job.gpus, *(c for c in counts if c > 0)}) if resizable else [job.gpus]
    if directive is None or job.gpus < 1:
        return Candidates((_declared(job, present, sources, now, "no --ft-model"),))
    request, reason = request_of(directive, gpu_type, sources)
    if request is None:
        others = dict.fromkeys((c for c in wanted if c != job.gpus), reason)
        return Candidates((_declared(job, present, sources, now, reason),), others)

    options = _options(request, tuple(wanted), present, pool_gpus_per_node, sources)
    progress = sources.progress.get(job.job_id)
    habit = sources.habits.get((job.user, Declared.WORK), NO_HABIT)
    factor = _calibration(request, options, progress, pool_gpus_per_node, sources)
    reported = progress is not None and job.running and progress.attempt >= job.restarts
    found: dict[int, Candidate] = {}
    for gpus, uncorrected in options.choices.items():
        choice = sources.calibration.corrected(uncorrected, request.model, request.gpu_type)
        batch = choice.configuration.global_batch
        work = left(directive, batch, progress, habit, reported=reported)
        if work is None:
            reason = "no amount of work: --ft-samples or --ft-steps is needed"
            others = dict.fromkeys((c for c in wanted if c != job.gpus), reason)
            return Candidates((_declared(job, present, sources, now, reason),), others)
        startup_s = 0.0 if reported else options.startup_s[gpus]
        candidate = _timed(job, choice, work, factor, startup_s)
        if job.running:
            left_s = (
                _reported(candidate.remaining_s, progress, now)
                if reported and progress is not None
                else _later(candidate.remaining_s, job.start_s, now)
            )
            candidate = replace(candidate, remaining_s=left_s)
        found[gpus] = candidate
    refused = dict(options.refused)
    if job.gpus not in found:
        why = refused.pop(job.gpus, "no estimate")
        found[job.gpus] = _declared(job, present, sources, now, why)
    if directive.max_gpu_hours is not None:
        refused |= _over_cap(found, job.gpus, directive.max_gpu_hours)
    return Candidates(tuple(found[gpus] for gpus in sorted(found)), dict(sorted(refused.items())))


def ends_at(
    job: Job,
    directive: Directive | None,
    pool_gpus_per_node: int,
    gpu_type: str,
    sources: EstimateSources,
    now: float,
) -> Estimate:
    """When a running job frees its GPUs, in seconds since the epoch; never after Slurm's own end.

    What the job itself reports about its speed and its whole work comes before the table. A job
    that has outlived its estimate is expected to need a tenth more of what it has run.
    """
    left_s = _by_report(job, sources, now)
    if left_s is None:
        per_node = pool_gpus_per_node
        present = candidates(job, directive, (job.gpus,), per_node, gpu_type, sources, now)
        found = present.at(job.gpus)
        left_s = declared_s(job, sources, "") if found is None else found.remaining_s
    spent = max(0.0, now - job.start_s) if job.start_s is not None else 0.0
    bounds = [left_s.low, left_s.value or OVERDUE * spent, left_s.high or OVERDUE * spent]
    if job.end_s is not None:
        bounds = [min(b, max(0.0, job.end_s - now)) for b in bounds]
    low, value, high = sorted(bounds)
    unlimited = left_s.unlimited and job.end_s is None
    return Estimate(now + value, now + low, now + high, left_s.source, left_s.note, unlimited)


def _by_report(job: Job, sources: EstimateSources, now: float) -> Estimate | None:
    """What is left as the running attempt itself reports; ``None`` where it does not say enough."""
    report = sources.progress.get(job.job_id)
    if report is None or not job.running or report.attempt < job.restarts:
        return None
    total = reported_total(report)
    if total is None or report.samples_per_s <= 0:
        return None
    left = max(0.0, total - report.samples) / report.samples_per_s
    estimate = Estimate(
        left,
        left / (1 + CALIBRATED_SPREAD),
        left * (1 + CALIBRATED_SPREAD),
        Source.PROGRESS,
        f"{min(report.samples, total):.0f} of {total:.0f} samples done at"
        f" {report.samples_per_s:.4g} samples/s, by its own report",
    )
    return _reported(estimate, report, now)


def declared_s(job: Job, sources: EstimateSources, reason: str) -> Estimate:
    """The run time that the time limit declares, times the user's habit."""
    habit = sources.habits.get((job.user, Declared.LIMIT), NO_HABIT)
    limit = job.time_limit_s if job.time_limit_s is not None else NO_LIMIT_S
    note = f"time limit {limit:.0f} s" if job.time_limit_s is not None else "no time limit"
    if habit.runs and job.time_limit_s is not None:
        note += (
            f" x {habit.factor:.2f} (median of {habit.runs} past jobs of {job.user}, at least 1)"
        )
    note += f"; {reason}"
    if sources.missing:
        # What is wrong with it and the fix stand among the notes, once and not per estimate.
        note += "; the throughput table could not be read"
    value = limit * habit.factor
    return Estimate(
        value,
        min(value, limit * habit.low),
        max(value, limit * habit.high),
        Source.DECLARED,
        note,
        unlimited=job.time_limit_s is None,
    )


def present_placement(job: Job, gpus_per_node: int) -> tuple[int, ...]:
    """Where the job runs if nobody acts: as few nodes as fit, or as many as it asked for."""
    fewest = consolidated(job.gpus, gpus_per_node)
    if job.gpus < 1:
        return (0,) * max(1, job.nodes)
    return fewest if job.nodes <= len(fewest) else spread_evenly(job.gpus, job.nodes)


def request_of(
    directive: Directive, gpu_type: str, sources: EstimateSources
) -> tuple[Request | None, str]:
    """What the table is asked for, or why it cannot be asked."""
    index, model = sources.index, directive.model
    if model is None:
        return None, "no --ft-model"
    if not index.knows(model):
        return None, f"model {model} is not in the throughput table"
    known = index.gpu_type(model, gpu_type)
    if not known:
        types = ", ".join(index.gpu_types(model))
        return None, f"{model} is not measured on GPU type {gpu_type or '(none)'}, only on {types}"
    if directive.batch_min is None:
        return None, "no --ft-batch: the global batch could not be kept"
    precision = directive.precision
    return (
        Request(
            model=model,
            gpu_type=known,
            batch_min=directive.batch_min,
            batch_max=directive.batch_max or directive.batch_min,
            settings=Settings(
                revision=directive.revision or "",
                input_shape=directive.input_shape or "",
                frozen=directive.frozen,
                precision=precision.value if precision is not None else "",
                grad_checkpointing=directive.grad_checkpointing,
                stages=1,
                micro_batches=1,
                environment=sources.environment,
            ),
            memory_gb=sources.gpu_memory_gb.get(known),
            by_steps=directive.steps is not None,
        ),
        "",
    )


def _options(
    request: Request,
    counts: tuple[int, ...],
    present: tuple[int, ...],
    gpus_per_node: int,
    sources: EstimateSources,
) -> _Options:
    key = (request, counts, present, gpus_per_node, sources.efficiency_floor)
    options: _Options | None = sources.index.recall(key)
    if options is None:
        options = _work_out(request, counts, present, gpus_per_node, sources)
        sources.index.remember(key, options)
    return options


def _work_out(
    request: Request,
    counts: tuple[int, ...],
    present: tuple[int, ...],
    gpus_per_node: int,
    sources: EstimateSources,
) -> _Options:
    asked = sum(present)
    choices: dict[int, Choice] = {}
    refused: dict[int, str] = {}
    for gpus in counts:
        placement = present if gpus == asked else consolidated(gpus, gpus_per_node)
        choice = best(sources.index, request, placement)
        if isinstance(choice, Choice):
            choices[gpus] = choice
        else:
            refused[gpus] = choice
    top = max((c.throughput.value / gpus for gpus, c in choices.items()), default=0.0)
    for gpus in [g for g in choices if g != asked]:
        share = choices[gpus].throughput.value / gpus / top
        if share < sources.efficiency_floor:
            refused[gpus] = (
                f"throughput per GPU is {share:.0%} of the best, below the efficiency floor of "
                f"{sources.efficiency_floor:.0%}"
            )
            del choices[gpus]
    startup_s = {g: sources.index.startup_s(request.model, request.gpu_type, g) for g in choices}
    return _Options(choices, startup_s, refused)


def _calibration(
    request: Request,
    options: _Options,
    progress: Progress | None,
    gpus_per_node: int,
    sources: EstimateSources,
) -> float:
    if progress is None or progress.gpus < 1 or progress.samples_per_s <= 0:
        return 1.0
    ran = options.choices.get(progress.gpus)
    if ran is None:
        found = best(sources.index, request, consolidated(progress.gpus, gpus_per_node))
        ran = found if isinstance(found, Choice) else None
    if ran is None:
        return 1.0
    ran = sources.calibration.corrected(ran, request.model, request.gpu_type)
    return calibration(progress, ran.throughput.value)


def _timed(job: Job, choice: Choice, work: Work, factor: float, startup_s: float) -> Candidate:
    throughput = choice.throughput
    notes = [throughput.note, work.note]
    if factor != 1.0:
        value = throughput.value * factor
        throughput = Estimate(
            value,
            value / (1 + CALIBRATED_SPREAD),
            value * (1 + CALIBRATED_SPREAD),
            throughput.source,
            throughput.note,
        )
        notes.append(f"x {factor:.2f} by the job's own report")
    return Candidate(
        (job.job_id,),
        choice.configuration,
        Estimate(
            startup_s + work.samples / throughput.value,
            startup_s + work.samples / throughput.high,
            startup_s + work.samples / throughput.low,
            throughput.source,
            "; ".join(n for n in notes if n),
        ),
        throughput,
    )


def _declared(
    job: Job, placement: tuple[int, ...], sources: EstimateSources, now: float, reason: str
) -> Candidate:
    estimate = declared_s(job, sources, reason)
    if job.running:
        estimate = _later(estimate, job.start_s, now)
    return Candidate((job.job_id,), Configuration(job.gpus, placement, precision=""), estimate)


def _reported(estimate: Estimate, report: Progress, now: float) -> Estimate:
    """What is left now of an estimate that was true at the time of the report.

    A paused job does nothing before its pause ends, or somebody resumes it.
    """
    hold = report.hold
    if hold is None:
        return _later(estimate, report.at_s, now)
    rest = hold.until_s - now
    if rest <= 0:
        return _later(estimate, max(report.at_s, hold.until_s), now)
    return replace(
        estimate,
        value=rest + estimate.value,
        high=rest + estimate.high,
        note=f"{estimate.note}; paused, {rest:.0f} s more at most",
    )


def _later(estimate: Estimate, since: float | None, now: float) -> Estimate:
    """What is left of an estimate that was true at ``since``."""
    spent = max(0.0, now - since) if since is not None else 0.0
    return replace(
        estimate,
        value=max(0.0, estimate.value - spent),
        low=max(0.0, estimate.low - spent),
        high=max(0.0, estimate.high - spent),
    )


def _over_cap(found: dict[int, Candidate], present: int, max_gpu_hours: float) -> dict[int, str]:
    """Remove what exceeds the cap from ``found``; the present shape stays where all exceed it."""
    over = {
        gpus: f"{gpus * c.remaining_s.value / 3600:.1f} GPU hours exceed --ft-max-gpu-hours="
        f"{max_gpu_hours:g}"
        for gpus, c in found.items()
        if gpus * c.remaining_s.value > max_gpu_hours * 3600
    }
    if len(over) == len(found):
        del over[present]
    for gpus in over:
        del found[gpus]
    return over

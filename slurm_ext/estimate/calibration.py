"""How far the throughput table is off, told by the jobs that run. A pure function of their reports.

A table that was measured on other machines, or with another version of everything, is mostly off
by one factor per model. So that systematic part is corrected first: per model, then per model and
GPU type where several types are known. Only what stays off after that is a single row's fault: it
is corrected too, and named, so that somebody measures it again.

All ratios are reported speed over the *table's* speed of the same configuration, worked out with
the table as it is now: once a model has been measured again, old reports agree with it and the
correction goes away by itself.

The choice a reader would question: one user's reports change other users' estimates here. So they
never count beyond a factor of `MAX_RATIO`, and where three users or more have reported, each has
one voice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.document import Correction, StaleRow
from slurm_ext.domain.spans import counted
from slurm_ext.estimate.enumerate import Choice, Request, best
from slurm_ext.estimate.index import ThroughputIndex

MAX_RATIO = 4.0  # a report further from the table than this is not about the same job
# Jobs that the table itself counts for. A model's bias varies by about 1.4 times as much (in the
# logarithm) as two jobs of one model do, which makes it one half.
PRIOR_JOBS = 0.5
# A configuration that is off by less agrees with the table: unknown bounds are 20 %.
ROW_OFF = 1.15
ROW_JOBS = 2  # one job may have had a bad day
KEPT = 20  # per model and GPU type, the newest: machines change
MAX_AGE_S = 90 * 86400.0
VOICES = 3
# A correction of less than a percent is not worth a word.
_WORTH = 0.01


@dataclass(frozen=True, slots=True)
class Sample:
    """What one job reported about its speed, and what the table is asked to predict it."""

    job_id: str
    user: str
    request: Request
    placement: tuple[int, ...]
    samples_per_s: float
    at_s: float

    @property
    def kind(self) -> tuple[str, str]:
        """Model and GPU type."""
        return self.request.model, self.request.gpu_type


_Row = tuple[str, str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class _Bias:
    """The logarithm of a factor, and the jobs that told it."""

    log: float
    jobs: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """The corrections in force. The empty one corrects nothing."""

    kinds: Mapping[tuple[str, str], _Bias] = field(default_factory=dict)
    models: Mapping[str, _Bias] = field(default_factory=dict)
    rows: Mapping[_Row, _Bias] = field(default_factory=dict)

    def corrected(self, choice: Choice, model: str, gpu_type: str) -> Choice:
        """The choice with its throughput corrected and the note saying so."""
        bias = self.kinds.get((model, gpu_type)) or self.models.get(model)
        row = self.rows.get(_row(model, gpu_type, choice.configuration)) if self.rows else None
        log, notes = 0.0, []
        if bias is not None and abs(bias.log) >= _WORTH:
            log += bias.log
            told = counted(bias.jobs, "job")
            notes.append(f"table corrected by {math.exp(bias.log):.2f} from {told}")
        if row is not None:
            log += row.log
            told = counted(row.jobs, "job")
            notes.append(
                f"this configuration by {math.exp(row.log):.2f} from {told}, to be measured again"
            )
        if not notes:
            return choice
        throughput = choice.throughput.scaled(math.exp(log))
        note = "; ".join(word for word in (throughput.note, *notes) if word)
        return replace(choice, throughput=replace(throughput, note=note))

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """The factor of every model and GPU type that has one."""
        return tuple(
            Correction(model, gpu_type, math.exp(bias.log), bias.jobs)
            for (model, gpu_type), bias in sorted(self.kinds.items())
        )

    @property
    def stale(self) -> tuple[StaleRow, ...]:
        """Configurations to be measured again, the furthest off first."""
        found = [StaleRow(*row, math.exp(bias.log), bias.jobs) for row, bias in self.rows.items()]
        return tuple(sorted(found, key=lambda s: (-abs(math.log(s.factor)), s.model, s.placement)))


NO_CALIBRATION = Calibration()


def kept(samples: Iterable[Sample], now: float) -> list[Sample]:
    """The samples that count: one per job, the newest of each model and GPU type, not too old."""
    latest = {s.job_id: s for s in sorted(samples, key=lambda s: s.at_s)}
    by_kind: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in latest.values():
        if now - sample.at_s <= MAX_AGE_S:
            by_kind[sample.kind].append(sample)
    found = [s for kind in by_kind.values() for s in sorted(kind, key=_by_time)[-KEPT:]]
    return sorted(found, key=_by_time)


def fit(samples: Sequence[Sample], index: ThroughputIndex) -> Calibration:
    """The corrections that these samples ask for. The order of samples does not matter."""
    points = [p for s in samples if (p := _point(s, index)) is not None]
    by_model: dict[str, list[_Point]] = defaultdict(list)
    for point in points:
        by_model[point.row[0]].append(point)
    models: dict[str, _Bias] = {}
    kinds: dict[tuple[str, str], _Bias] = {}
    rows: dict[_Row, _Bias] = {}
    for model, told in by_model.items():
        whole = _shrunk(_middle(told), len(told))
        models[model] = _Bias(whole, len(told))
        by_type: dict[str, list[_Point]] = defaultdict(list)
        for point in told:
            by_type[point.row[1]].append(point)
        for gpu_type, some in by_type.items():
            bias = whole
            if len(by_type) > 1:
                bias += _shrunk(_middle(some) - whole, len(some))
            kinds[model, gpu_type] = _Bias(bias, len(some))
            rows |= _off(some, bias)
    return Calibration(kinds, models, rows)


@dataclass(frozen=True, slots=True)
class _Point:
    row: _Row
    user: str
    log: float


def _point(sample: Sample, index: ThroughputIndex) -> _Point | None:
    request = sample.request
    key = ("calibration", request, sample.placement)
    choice: Choice | str | None = index.recall(key)
    if choice is None:
        choice = best(index, request, sample.placement)
        index.remember(key, choice)
    if not isinstance(choice, Choice) or sample.samples_per_s <= 0:
        return None  # the table does not know this configuration any more
    log = math.log(sample.samples_per_s / choice.throughput.value)
    if abs(log) > math.log(MAX_RATIO):
        return None
    return _Point(_row(request.model, request.gpu_type, choice.configuration), sample.user, log)


def _row(model: str, gpu_type: str, configuration: Configuration) -> _Row:
    c = configuration
    return model, gpu_type, c.placement, c.local_batch, c.accumulation


def _middle(points: Sequence[_Point]) -> float:
    """The median over configurations, each with one voice; or over users, where they are many."""
    by_user = _medians(points, lambda p: p.user)
    if len(by_user) >= VOICES:
        return median(by_user)
    return median(_medians(points, lambda p: p.row))


def _medians(points: Sequence[_Point], key: Callable[[_Point], Hashable]) -> list[float]:
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for point in points:
        groups[key(point)].append(point.log)
    return [median(values) for values in groups.values()]


def _off(points: Sequence[_Point], bias: float) -> dict[_Row, _Bias]:
    """Configurations that stay off after ``bias`` was taken out."""
    groups: dict[_Row, list[float]] = defaultdict(list)
    for point in points:
        groups[point.row].append(point.log - bias)
    found = {}
    for row, values in groups.items():
        left = median(values)
        if len(values) >= ROW_JOBS and abs(left) > math.log(ROW_OFF):
            found[row] = _Bias(_shrunk(left, len(values)), len(values))
    return found


def _shrunk(log: float, jobs: int) -> float:
    """Drawn towards "the table is right", the more the fewer jobs there are."""
    return log * jobs / (jobs + PRIOR_JOBS)


def _by_time(sample: Sample) -> tuple[float, str]:
    return sample.at_s, sample.job_id

"""From the rows of a trace to the jobs of a replay, on any machine.

A job of which model, batch and samples are known, and whose model the throughput table has, is
*elastic*: its true time follows from the rule in `truth` at every GPU count that keeps its batch.
Any other job is *rigid*: it takes its recorded duration, in which its start-up is contained, on
the GPUs that it asked for. A job that can be neither, or that the machine can never hold, is left
out and said: a measurement of the same GPUs on other nodes does not stand in for it, since that
may be off by a factor of two.

What a policy may see is the truth times an error drawn from the job's own id: the estimate. The
choice a reader would question: on a machine with several GPU types, a job that names none is given
a type when it is submitted, the one with the least work per GPU so far, because a policy decides
within one pool, and because nothing later than the submission may play a part.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.estimate.remaining import EFFICIENCY_FLOOR
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.jobs import AUTO_COUNTS, LIMIT_FACTOR
from slurm_ext.sim.model import SimJob
from slurm_ext.sim.truth import Curves, Truth, consolidated, read_types

# Reasons why a row is left out, of which a caller can tell the remedy.
UNKNOWN_WORK = "neither its duration nor its samples are known"
UNKNOWN_BATCH = "its batch is not known, nor its duration"
NO_ROW_FOR_TYPE = "the table has no row for GPU type"


class TraceRow(Protocol):
    """What this module needs of a job of a trace."""

    @property
    def job_id(self) -> str: ...
    @property
    def submit_s(self) -> float: ...
    @property
    def duration_s(self) -> float | None: ...
    @property
    def gpus(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def samples(self) -> float: ...
    @property
    def user(self) -> str: ...
    @property
    def limit_s(self) -> float | None: ...
    @property
    def gpu_type(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all jobs of a replay.

    ``density`` > 1 makes jobs arrive faster. ``estimate_error`` is the largest factor by which an
    estimate is off, minus one (0.5: up to half as much again, or two thirds). ``counts`` are the
    GPU counts that are offered beside the requested one; below ``efficiency_floor`` (throughput per
    GPU over the job's best) none is offered, as in the daemon.
    """

    counts: tuple[int, ...] = AUTO_COUNTS
    efficiency_floor: float = EFFICIENCY_FLOOR
    density: float = 1.0
    estimate_error: float = 0.0
    seed: int = 0
    limit_factor: float = LIMIT_FACTOR

    def __post_init__(self) -> None:
        if not (math.isfinite(self.density) and self.density > 0):
            raise DataError("density", f"{self.density!r} is not above 0", "use for example 1.5")
        if not (math.isfinite(self.estimate_error) and self.estimate_error >= 0):
            raise DataError(
                "estimate error",
                f"{100 * self.estimate_error:g} % is not 0 or more",
                "use for example 50",
            )
        if not 0 <= self.efficiency_floor <= 1:
            raise DataError("efficiency floor", f"{self.efficiency_floor!r}", "use 0 to 1")


@dataclass(frozen=True, slots=True)
class Built:
    """Jobs for a replay, and one line for each row that was left out.

    ``reasons`` says how many rows were left out for the same reason, the most frequent one first.
    ``no_limit`` counts jobs whose time limit the trace does not tell.
    """

    jobs: tuple[SimJob, ...]
    left_out: tuple[str, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()
    no_limit: int = 0


def truths_for(
    tables: Path | Mapping[str, Curves], hardware: Hardware, costs: Costs
) -> dict[str, Truth]:
    """GPU type of the machine -> the true run times on it, where the table has that type.

    A machine without types is taken to have the table's first one.
    """
    if isinstance(tables, Path):
        tables = read_types(tables, hardware.gpu_types)
    known = {name.upper(): name for name in tables}
    found: dict[str, Truth] = {}
    for name in hardware.gpu_types:
        measured = known.get(name.upper()) if name else next(iter(tables))
        if measured is None:
            continue
        curves = tables[measured]
        found[name] = Truth(
            curves,
            {model: costs.cold_s(model, measured) for model, _ in curves},
            costs.start_up_s + costs.checkpoint_s,
        )
    return found


def build(
    rows: Iterable[TraceRow],
    hardware: Hardware,
    truths: Mapping[str, Truth],
    costs: Costs,
    terms: Terms | None = None,
    *,
    table_types: Sequence[str] = (),
) -> Built:
    """Jobs of a replay, in the order of the rows. ``table_types`` are all GPU types that the
    throughput table names, to be told where it has none of the machine's."""
    builder = _Builder(hardware, truths, costs, terms or Terms(), table_types)
    jobs: list[SimJob] = []
    left_out: list[str] = []
    reasons: Counter[str] = Counter()
    no_limit = 0
    for row in rows:
        made = builder.job(row)
        if isinstance(made, SimJob):
            jobs.append(made)
            no_limit += not row.limit_s
        else:
            left_out.append(f"job {row.job_id} is left out: {made}")
            reasons[made] += 1
    return Built(tuple(jobs), tuple(left_out), tuple(reasons.most_common()), no_limit)


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to run a job, with its true time."""

    gpus: int
    placement: tuple[int, ...]
    true_s: float
    local_batch: int


class _Builder:
    """Remembers only how much work each GPU type was given so far."""

    def __init__(
        self,
        hardware: Hardware,
        truths: Mapping[str, Truth],
        costs: Costs,
        terms: Terms,
        table_types: Sequence[str],
    ) -> None:
        self._table_types = table_types
        self._hardware = hardware
        self._truths = truths
        self._costs = costs
        self._terms = terms
        self._given = dict.fromkeys(hardware.gpu_types, 0.0)
        self._shapes: dict[tuple[int, str], tuple[tuple[int, ...], ...]] = {}

    def job(self, row: TraceRow) -> SimJob | str:
        """The job, or why there can be none."""
        choices: list[tuple[float, str, list[_Option]]] = []
        problems: list[str] = []
        for name in self._types(row):
            options = list(self._options(row, name))
            asked = [option for option in options if option.gpus == row.gpus]
            if not asked:
                problems.append(self._why_not(row, name))
                continue
            area = row.gpus * asked[0].true_s
            load = (self._given[name] + area) / self._hardware.gpus_of(name)
            choices.append((load, name, options))
        if not choices:
            problem = f"it wants {row.gpu_type} GPUs, which the machine lacks"
            return "; ".join(dict.fromkeys(problems)) or problem
        load, name, options = min(choices, key=lambda item: (item[0], item[1]))
        self._given[name] = load * self._hardware.gpus_of(name)
        return self._make(row, name, options)

    def _types(self, row: TraceRow) -> Sequence[str]:
        """The types that a job may get. On a machine of one type it takes what there is."""
        types = self._hardware.gpu_types
        if len(types) == 1 or not row.gpu_type:
            return types
        return [name for name in types if name.upper() == row.gpu_type.upper()]

    def _make(self, row: TraceRow, name: str, options: Sequence[_Option]) -> SimJob:
        requested = next(option for option in options if option.gpus == row.gpus)
        # A recorded duration holds its own start-up, whatever that was.
        cold = min(self._cold(row, name), requested.true_s)
        start_up = min(
            self._costs.start_up_s + self._costs.checkpoint_s + cold,
            min(option.true_s for option in options),
        )
        factor = self._error(row.job_id)
        spread = 1.0 + self._terms.estimate_error
        candidates = []
        for option in self._worthwhile(row, options, start_up):
            value = start_up + factor * (option.true_s - start_up)
            candidates.append(
                Candidate(
                    (row.job_id,),
                    Configuration(
                        gpus=option.gpus,
                        placement=option.placement,
                        local_batch=option.local_batch,
                    ),
                    Estimate(value, value / spread, value * spread, Source.MEASURED),
                )
            )
        limit = row.limit_s or self._terms.limit_factor * requested.true_s
        times: dict[int, float] = {}
        for option in options:
            times.setdefault(option.gpus, option.true_s)
        return SimJob(
            job_id=row.job_id,
            submit_s=row.submit_s / self._terms.density,
            gpus=row.gpus,
            limit_s=limit,
            candidates=tuple(candidates),
            true_run_s=times,
            error_free_s=requested.true_s,
            user=row.user or "user",
            model=row.model,
            gpu_type=name,
            start_up_s=start_up,
            cold_s=min(cold, start_up),
            true_by_placement={option.placement: option.true_s for option in options},
        )

    def _cold(self, row: TraceRow, name: str) -> float:
        truth = self._truths.get(name)
        known = truth.switch_s.get(row.model) if truth is not None else None
        return self._costs.cold_s(row.model, name) if known is None else known

    def _options(self, row: TraceRow, name: str) -> Iterator[_Option]:
        truth = self._truths.get(name)
        elastic = (
            truth is not None
            and row.batch > 0
            and row.samples > 0
            and any(model == row.model for model, _ in truth.curves)
        )
        if truth is not None and elastic:
            found = list(self._elastic(row, name, truth))
            if any(option.gpus == row.gpus for option in found):
                yield from found
                return
        if row.duration_s is not None and row.duration_s > 0:
            for placement in self._placements(row.gpus, name):
                yield _Option(row.gpus, placement, row.duration_s, 0)

    def _elastic(self, row: TraceRow, name: str, truth: Truth) -> Iterator[_Option]:
        counts = {count for count in self._terms.counts if row.batch % count == 0} | {row.gpus}
        for count in sorted(counts):
            for placement in self._placements(count, name):
                # Pooled GPUs have no nodes, but how fast they are depends on nodes all the same.
                measured = (
                    consolidated(count, self._hardware.gpus_per_node)
                    if self._hardware.pooled
                    else placement
                )
                if (row.model, measured) in truth.curves:
                    true_s = truth.run_s(row.model, row.batch, row.samples, measured)
                    yield _Option(count, placement, true_s, math.ceil(row.batch / count))

    def _placements(self, gpus: int, name: str) -> tuple[tuple[int, ...], ...]:
        key = gpus, name
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._hardware.placements(gpus, name)
        return found

    def _why_not(self, row: TraceRow, name: str) -> str:
        placements = self._placements(row.gpus, name)
        if not placements:
            return f"it asks for {row.gpus} GPUs, more than the machine has room for"
        if not row.model or row.samples <= 0:
            return UNKNOWN_WORK
        truth = self._truths.get(name)
        if truth is None:
            only = f", only for {', '.join(self._table_types)}" if self._table_types else ""
            return f"{NO_ROW_FOR_TYPE} {name}{only}"
        models = dict.fromkeys(model for model, _ in truth.curves)
        if row.model not in models:
            alike = [model for model in models if model.casefold() == row.model.casefold()]
            hint = f"; it calls one {alike[0]}, and case counts" if alike else ""
            return f"the table has no model {row.model} on {name or 'any GPU type'}{hint}"
        if row.batch <= 0:
            return UNKNOWN_BATCH
        if self._hardware.pooled:
            placements = (consolidated(row.gpus, self._hardware.gpus_per_node),)
        others = sorted(
            (len(shares), shares)
            for model, shares in truth.curves
            if model == row.model and sum(shares) == row.gpus
        )
        only = f", only {_spread(others[0][1])}" if others else ""
        return (
            f"nothing was measured for {row.model} on {row.gpus} {name}{' ' if name else ''}GPUs"
            f" {' or '.join(_spread(each) for each in placements)}{only}"
        )

    def _worthwhile(
        self, row: TraceRow, options: Sequence[_Option], start_up_s: float
    ) -> Iterator[_Option]:
        """Options that waste no more than the floor allows, and those of the requested count."""
        speed = [1 / (o.gpus * max(o.true_s - start_up_s, 1e-9)) for o in options]
        least = self._terms.efficiency_floor * max(speed)
        for option, each in zip(options, speed, strict=True):
            if each >= least or option.gpus == row.gpus:
                yield option

    def _error(self, job_id: str) -> float:
        """The estimate over the truth: log-uniform, drawn from the job's own id."""
        if not self._terms.estimate_error:
            return 1.0
        spread = math.log1p(self._terms.estimate_error)
        return math.exp(random.Random(f"{self._terms.seed}:{job_id}").uniform(-spread, spread))


def _spread(placement: Sequence[int]) -> str:
    """A placement in words."""
    if len(placement) == 1:
        return "of one node"
    return f"as {'+'.join(str(share) for share in placement)} on {len(placement)} nodes"

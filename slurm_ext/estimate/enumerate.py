"""Feasible configurations of a job on one placement, and the best of them. Pure; no I/O.

The global batch is the user's: local batch x GPUs x accumulation equals it exactly, so a GPU count
that does not divide it has no configuration. Only where the user gave a range is it chosen, for
the shortest time. Configurations inside the measured range are preferred to any outside it,
however fast the continued line looks; one above the range is offered only where memory is known to
suffice, since a job that dies of memory costs more than a slower one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, isqrt

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.estimate.index import Match, ThroughputIndex
from slurm_ext.estimate.interpolate import MAX_STRETCH, MEMORY_MARGIN, Curve, Reading
from slurm_ext.estimate.measurement import UNSAID, Settings

MAX_BATCHES = 256  # global batches tried inside a user's range


@dataclass(frozen=True, slots=True)
class Request:
    """What stays the same over all GPU counts of a job.

    ``batch_min`` = ``batch_max`` unless the user gave a range. ``by_steps``: the work is a number
    of steps, so that the shortest step wins and not the highest throughput. ``memory_gb`` is the
    GPU's memory, ``None`` where nobody configured it.
    """

    model: str
    gpu_type: str
    batch_min: int
    batch_max: int
    settings: Settings = UNSAID
    memory_gb: float | None = None
    by_steps: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A feasible configuration with its throughput in samples per second."""

    configuration: Configuration
    throughput: Estimate
    outside: bool = False

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.configuration.global_batch / self.throughput.value


def consolidated(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """The placement on the fewest nodes, whole nodes first: 6 GPUs on nodes of 4 are ``(4, 2)``."""
    size = max(1, gpus_per_node)
    whole, rest = divmod(gpus, size)
    return (size,) * whole + ((rest,) if rest else ())


def spread_evenly(gpus: int, nodes: int) -> tuple[int, ...]:
    """``gpus`` over exactly ``nodes`` nodes, as even as they divide, larger parts first."""
    each, more = divmod(gpus, max(1, nodes))
    return tuple(each + (1 if i < more else 0) for i in range(max(1, nodes)))


def feasible(
    index: ThroughputIndex, request: Request, placement: tuple[int, ...]
) -> tuple[tuple[Choice, ...], str]:
    """Every feasible configuration on ``placement``, and the reason where there is none."""
    gpus = sum(placement)
    if gpus < 1:
        return (), "no GPUs"
    lowest, highest = ceil(request.batch_min / gpus), floor(request.batch_max / gpus)
    if lowest > highest:
        batch = _span(request.batch_min, request.batch_max)
        return (), f"global batch {batch} does not divide by {gpus} GPUs"
    reason = f"no measurement of {request.model} on {_place(placement)}"
    for match in index.matches(request.model, request.gpu_type, request.settings, placement):
        choices = []
        refusals: list[str] = []
        for local, accumulation in _splits(match, lowest, highest):
            choice = _choice(match, request, placement, local, accumulation)
            if isinstance(choice, Choice):
                choices.append(choice)
            else:
                refusals.append(choice)
        if choices:
            return tuple(choices), ""
        if refusals:
            reason = refusals[0]
        else:
            reason = (
                f"{_span(lowest, highest)} samples per GPU and step have no divisor near a "
                "measured local batch"
            )
    return (), reason


def best(index: ThroughputIndex, request: Request, placement: tuple[int, ...]) -> Choice | str:
    """The fastest feasible configuration, or the reason why there is none.

    Ties go to fewer micro-batches, then to the smaller global batch.
    """
    choices, reason = feasible(index, request, placement)
    if not choices:
        return reason
    return min(
        choices,
        key=lambda c: (
            c.outside,
            c.step_time_s if request.by_steps else -c.throughput.value,
            c.configuration.accumulation,
            c.configuration.local_batch,
        ),
    )


def _splits(match: Match, lowest: int, highest: int) -> Iterator[tuple[int, int]]:
    """Local batch and accumulation whose product is the samples per GPU and step."""
    measured = [p.local_batch for c in match.curves.values() for p in c.points]
    if not measured:
        return
    least, most = min(measured) / MAX_STRETCH, max(measured) * MAX_STRETCH
    for total in _totals(match, lowest, highest):
        for accumulation in _divisors(total):
            if least <= total // accumulation <= most:
                yield total // accumulation, accumulation


def _totals(match: Match, lowest: int, highest: int) -> list[int]:
    """Samples per GPU and step to try: all of a short range, else its ends and measured batches."""
    if highest - lowest < MAX_BATCHES:
        return list(range(lowest, highest + 1))
    measured = {p.local_batch for c in match.curves.values() for p in c.points}
    found = {lowest, highest}
    for batch in sorted(measured, reverse=True):
        first, last = -(-lowest // batch), highest // batch
        found.update(batch * k for k in {first, last} if lowest <= batch * k <= highest)
    return sorted(found)[:MAX_BATCHES]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _choice(
    match: Match, request: Request, placement: tuple[int, ...], local: int, accumulation: int
) -> Choice | str:
    settings = match.settings
    stages = settings.stages or request.settings.stages or 1
    micro = settings.micro_batches or request.settings.micro_batches or 1
    if sum(placement) % stages or local * stages % micro:
        return f"local batch {local} does not split into {micro} micro-batches over {stages} stages"
    reading = _reading(match, local, accumulation)
    if isinstance(reading, str):
        return reading
    refusal = _memory_refusal(reading, request.memory_gb)
    if refusal:
        return refusal
    low, high = reading.low / (1 + match.spread), reading.high * (1 + match.spread)
    note = "; ".join(n for n in (reading.note, match.note) if n)
    return Choice(
        Configuration(
            gpus=sum(placement),
            placement=placement,
            local_batch=local,
            accumulation=accumulation,
            precision=request.settings.precision or settings.precision,
            grad_checkpointing=bool(request.settings.grad_checkpointing),
            frozen=request.settings.frozen or settings.frozen,
            stages=stages,
            micro_batches=micro,
        ),
        Estimate(reading.throughput, low, high, reading.source, note),
        reading.outside,
    )


def _reading(match: Match, local: int, accumulation: int) -> Reading | str:
    """From the curve of this accumulation, else computed from the curve without accumulation."""
    curve = match.curves.get(accumulation)
    reading: Reading | str = "not measured"
    if curve is not None:
        reading = curve.read(local)
        if isinstance(reading, Reading) and not reading.outside:
            return reading
    base = match.curves.get(1)
    if accumulation == 1 or base is None:
        return reading
    computed = _accumulated(base, base.read(local), accumulation)
    if isinstance(computed, str) or (computed.outside and isinstance(reading, Reading)):
        return reading if isinstance(reading, Reading) else computed
    return computed


def _accumulated(curve: Curve, once: Reading | str, accumulation: int) -> Reading | str:
    """One synchronisation for ``accumulation`` micro-batches: step = sync + k (step - sync).

    Where the sync time is not recorded every micro-batch is charged with it (so the throughput
    stays), and the upper bound allows that all but one are free of half their step.
    """
    if isinstance(once, str):
        return once
    samples = curve.gpus * once.local_batch
    step = samples / once.throughput
    sync = once.sync_time_s if curve.gpus > 1 or once.sync_time_s is not None else 0.0
    note = f"{accumulation} micro-batches computed from one"
    if sync is None:
        gain, best_gain = 1.0, min(2.0, 2 * accumulation / (accumulation + 1))
        note += ", sync time not recorded"
    else:
        gain = best_gain = accumulation * step / (sync + accumulation * (step - sync))
    return Reading(
        once.local_batch,
        once.throughput * gain,
        once.low * gain,
        once.high * best_gain,
        Source.INTERPOLATED,
        sync,
        once.memory_gb,
        once.outside,
        once.above,
        "; ".join(n for n in (once.note, note) if n),
    )


def _memory_refusal(reading: Reading, capacity_gb: float | None) -> str:
    if capacity_gb is None or reading.memory_gb is None:
        if reading.above:
            return (
                f"local batch {reading.local_batch} is larger than any measured, and whether it "
                "fits into the GPU is not known"
            )
        return ""
    measured = reading.source is Source.MEASURED
    if reading.memory_gb > capacity_gb * (1.0 if measured else MEMORY_MARGIN):
        return (
            f"local batch {reading.local_batch} needs {reading.memory_gb:.1f} GB of "
            f"{capacity_gb:g} GB"
        )
    return ""


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _place(placement: tuple[int, ...]) -> str:
    nodes = len(placement)
    return f"{sum(placement)} GPUs on {nodes} node{'s' if nodes != 1 else ''}"

"""One measured point of the throughput table, its key, and a start-up cost. No I/O here.

A key column that nobody recorded is blank (``""``, ``None``, ``0`` or ``()``): it is not the same
as a default, and it matches any request, with a note. The choice a reader would question: a point
that did not fit into GPU memory is kept as a point too (``out_of_memory`` counts how often), for
an interpolation must not run across it, and a point that is merely absent could not tell that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Settings:
    """What two points must share to lie on one curve. Blank is "not recorded"."""

    revision: str = ""
    input_shape: str = ""
    frozen: str = ""
    precision: str = ""
    grad_checkpointing: bool | None = None
    stages: int = 0
    micro_batches: int = 0
    environment: str = ""


UNSAID = Settings()


@dataclass(frozen=True, slots=True)
class Key:
    """What was run. ``placement`` is in descending order, ``()`` where only nodes are known.

    ``gpu_type`` is compared without regard to case, since gres.conf and tables differ in it.
    """

    model: str
    gpu_type: str
    gpus: int
    nodes: int
    placement: tuple[int, ...]
    local_batch: int
    accumulation: int = 1
    settings: Settings = UNSAID

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step."""
        return self.gpus * self.local_batch * self.accumulation


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came out: the mean over ``count`` runs. ``throughput`` is in samples per second.

    ``step_time_s`` is one optimizer step, ``sync_time_s`` its part that does not repeat with every
    micro-batch. ``variance`` is of the throughput between runs, ``None`` for a single run.
    ``memory_gb`` is the peak per GPU. ``count`` is 0 where every attempt ran out of memory.
    """

    key: Key
    throughput: float = 0.0
    step_time_s: float | None = None
    sync_time_s: float | None = None
    memory_gb: float | None = None
    variance: float | None = None
    count: int = 1
    out_of_memory: int = 0
    measured_s: float | None = None
    source: str = ""

    def merged(self, other: Measurement) -> Measurement:
        """Both as one: weighted means, the joint variance, the larger memory, the later time."""
        count = self.count + other.count
        later = other if (other.measured_s or 0.0) >= (self.measured_s or 0.0) else self
        if count == 0:
            return replace(later, out_of_memory=self.out_of_memory + other.out_of_memory)
        mean = (self.throughput * self.count + other.throughput * other.count) / count
        squares = sum(
            (m.variance or 0.0) * max(0, m.count - 1) + m.count * (m.throughput - mean) ** 2
            for m in (self, other)
        )
        return Measurement(
            key=self.key,
            throughput=mean,
            step_time_s=_weighted(self.step_time_s, self.count, other.step_time_s, other.count),
            sync_time_s=_weighted(self.sync_time_s, self.count, other.sync_time_s, other.count),
            memory_gb=_largest(self.memory_gb, other.memory_gb),
            variance=squares / (count - 1) if count > 1 else None,
            count=count,
            out_of_memory=self.out_of_memory + other.out_of_memory,
            measured_s=_largest(self.measured_s, other.measured_s),
            source=later.source or self.source or other.source,
        )


class CostKind(StrEnum):
    """What a job pays besides its steps."""

    COLD_START = "cold_start"  # process start, weights to the GPU, first step
    CHECKPOINT = "checkpoint"  # saving and loading around one start
    SWITCH = "switch"  # to another job's parameters in a warm process
    NAIVE_SWITCH = "naive_switch"  # the same with nothing overlapped, to compare


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one kind. Blank ``model`` or ``gpu_type`` and ``gpus`` 0 stand for any."""

    kind: CostKind
    seconds: float
    model: str = ""
    gpu_type: str = ""
    gpus: int = 0
    source: str = ""


def _weighted(a: float | None, na: int, b: float | None, nb: int) -> float | None:
    if a is None or na == 0:
        return b
    if b is None or nb == 0:
        return a
    return (a * na + b * nb) / (na + nb)


def _largest(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)

"""Throughput between measured local batches on one curve. No I/O, no rounding of batches.

A curve belongs to one model, setting, placement and accumulation, so nothing here can cross a
placement change. Between two measured points throughput is a straight line in the local batch. It
is not drawn across a *wall*: a batch that ran out of memory, a hole (a batch that the same source
measured on most other placements, but not on this one), or two neighbours of which the larger
batch took less memory (another code path was measured).

Why not a straight line in the step time, which is the better physics: it lies above the chord, and
the chord is what a reader checks by hand. The difference goes into ``high``. Outside the range
there is no chord; there the step time is continued.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from slurm_ext.domain.estimate import Source

# Spread of a value about which no variance is known. Clouds and clusters with equal GPUs differ by
# this much, and so do two measurements of one configuration by different people.
UNKNOWN_SPREAD = 0.2
SIGMAS = 2.0  # of measured variance: about 95 %
MAX_STRETCH = 2.0  # outside the range at most this factor in the local batch
STRETCH_SPREAD = 0.5  # added spread at the full stretch
MEMORY_MARGIN = 0.95  # share of the GPU that a memory value which nobody measured may fill


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point of a curve: samples/s over all GPUs, with bounds."""

    local_batch: int
    throughput: float
    low: float
    high: float
    sync_time_s: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Throughput at one local batch. ``sync_time_s`` and ``memory_gb`` may be unknown."""

    local_batch: int
    throughput: float
    low: float
    high: float
    source: Source
    sync_time_s: float | None = None
    memory_gb: float | None = None
    outside: bool = False
    above: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in ascending local batch, and the walls between or beside them."""

    gpus: int
    points: tuple[Point, ...]
    walls: tuple[int, ...] = ()

    def step_time_s(self, point: Point) -> float:
        """Seconds of one step at a measured point."""
        return self.gpus * point.local_batch / point.throughput

    def read(self, local_batch: int) -> Reading | str:
        """The reading at ``local_batch``, or the reason why there is none."""
        if not self.points:
            return "every measured local batch ran out of memory"
        if any(wall <= local_batch for wall in self.walls if wall > self.points[-1].local_batch):
            return f"local batch {local_batch} is beyond one that ran out of memory"
        at = bisect_left(self.points, local_batch, key=lambda p: p.local_batch)
        if at < len(self.points) and self.points[at].local_batch == local_batch:
            p = self.points[at]
            return Reading(
                local_batch,
                p.throughput,
                p.low,
                p.high,
                Source.MEASURED,
                p.sync_time_s,
                p.memory_gb,
            )
        if local_batch in self.walls:
            return f"local batch {local_batch} ran out of memory or has a hole in the table"
        if 0 < at < len(self.points):
            return self._between(self.points[at - 1], self.points[at], local_batch)
        return self._outside(local_batch)

    def _between(self, a: Point, b: Point, local_batch: int) -> Reading | str:
        wall = self._wall(a, b)
        if wall:
            return f"local batch {local_batch} is not measured, and {wall}"
        share = (local_batch - a.local_batch) / (b.local_batch - a.local_batch)
        throughput = _line(a.throughput, b.throughput, share)
        # Straight in the step time: the upper bound where fixed costs are shared by more samples.
        step = _line(self.step_time_s(a), self.step_time_s(b), share)
        high = max(
            _line(a.high, b.high, share),
            self.gpus
            * local_batch
            / step
            * _line(a.high / a.throughput, b.high / b.throughput, share),
        )
        return Reading(
            local_batch,
            throughput,
            _line(a.low, b.low, share),
            high,
            Source.INTERPOLATED,
            _line_or_none(a.sync_time_s, b.sync_time_s, share),
            _line_or_none(a.memory_gb, b.memory_gb, share),
            note=f"between local batch {a.local_batch} and {b.local_batch}",
        )

    def _outside(self, local_batch: int) -> Reading | str:
        small, large = self.points[0].local_batch, self.points[-1].local_batch
        below = local_batch < small
        end = small if below else large
        stretch = max(local_batch, end) / max(1, min(local_batch, end))
        where = f"local batch {local_batch} is outside the measured {small}..{large}"
        if len(self.points) < 2:
            return f"{where}, and one point gives no line"
        if local_batch < 1 or stretch > MAX_STRETCH:
            return f"{where} by more than a factor of {MAX_STRETCH:g}"
        a, b = self.points[:2] if below else self.points[-2:]
        wall = self._wall(a, b)
        if not wall and any(
            min(local_batch, end) <= w <= max(local_batch, end) for w in self.walls
        ):
            wall = "a batch on the way ran out of memory or has a hole in the table"
        if wall:
            return f"{where}, and {wall}"
        share = (local_batch - a.local_batch) / (b.local_batch - a.local_batch)
        step = _line(self.step_time_s(a), self.step_time_s(b), share)
        sync = _line_or_none(a.sync_time_s, b.sync_time_s, share)
        if step <= max(0.0, sync or 0.0):
            return f"{where}, and the line through the nearest two points gives no step time there"
        near = self.points[0] if below else self.points[-1]
        throughput = self.gpus * local_batch / step
        spread = STRETCH_SPREAD * math.log(stretch) / math.log(MAX_STRETCH)
        return Reading(
            local_batch,
            throughput,
            throughput * near.low / near.throughput / (1 + spread),
            throughput * near.high / near.throughput * (1 + spread),
            Source.INTERPOLATED,
            None if sync is None else max(0.0, sync),
            _line_or_none(a.memory_gb, b.memory_gb, share),
            outside=True,
            above=not below,
            note=where,
        )

    def _wall(self, a: Point, b: Point) -> str:
        for wall in self.walls:
            if a.local_batch <= wall <= b.local_batch:
                return f"{wall} in between ran out of memory or has a hole in the table"
        if a.memory_gb is not None and b.memory_gb is not None and b.memory_gb < a.memory_gb:
            return (
                f"{b.local_batch} took less memory than {a.local_batch}, so that the two do not "
                "lie on one line"
            )
        return ""


def _line(a: float, b: float, share: float) -> float:
    return a + (b - a) * share


def _line_or_none(a: float | None, b: float | None, share: float) -> float | None:
    return None if a is None or b is None else _line(a, b, share)

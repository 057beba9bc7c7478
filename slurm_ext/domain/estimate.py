"""An estimate is never a bare number: it has bounds and says where it comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where a value comes from, best first. PROGRESS is the job's own report."""

    PROGRESS = "progress"
    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    HISTORY = "history"
    DECLARED = "declared"


@dataclass(frozen=True, slots=True)
class Estimate:
    """``low <= value <= high``, in the unit that the owner of the field states.

    ``unlimited`` says that nothing bounds the quantity (a job without a time limit and without an
    estimate): then the numbers only stand in where planning needs some, and people and ``--json``
    are told that there is no limit, and no number.
    """

    value: float
    low: float
    high: float
    source: Source
    note: str = ""
    unlimited: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.low <= self.value <= self.high):
            raise ValueError(f"estimate out of order: {self.low} <= {self.value} <= {self.high}")

    def scaled(self, factor: float) -> Estimate:
        """The estimate of ``factor`` (> 0) times the quantity."""
        return Estimate(
            self.value * factor,
            self.low * factor,
            self.high * factor,
            self.source,
            self.note,
            self.unlimited,
        )

"""How a user's declarations relate to what their jobs took. A pure function of past runs.

The factor is the median of actual/declared and never below 1: a user who is usually pessimistic
may be right this time, and a job planned too short delays others, while one planned too long only
waits a little. Declared time limits and declared work (samples, steps) are kept apart: limits are
padded by habit, amounts of work are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

RUNS_KEPT = 50  # per user and kind, the latest: habits change
MAX_FACTOR = 10.0  # beyond it the declaration was a mistake, not a habit


class Declared(StrEnum):
    """What was declared."""

    LIMIT = "limit"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class PastRun:
    """One ended job: the seconds that the declaration led us to expect, and the true ones."""

    user: str
    declared_s: float
    actual_s: float
    kind: Declared = Declared.LIMIT


@dataclass(frozen=True, slots=True)
class Habit:
    """A user's factor, the number of runs behind it, and the range of their ratios."""

    factor: float
    runs: int
    low: float
    high: float


NO_HABIT = Habit(1.0, 0, 0.0, 1.0)


def habits(runs: Iterable[PastRun]) -> dict[tuple[str, Declared], Habit]:
    """The habit of each user and kind. ``runs`` are in the order in which they ended.

    Runs without a positive declared or actual time say nothing and are left out. ``low`` and
    ``high`` are the 10 % and 90 % points of the ratios.
    """
    ratios: dict[tuple[str, Declared], list[float]] = {}
    for run in runs:
        if run.declared_s > 0 and run.actual_s > 0:
            ratios.setdefault((run.user, run.kind), []).append(run.actual_s / run.declared_s)
    found = {}
    for who, values in ratios.items():
        kept = sorted(values[-RUNS_KEPT:])
        last = len(kept) - 1
        found[who] = Habit(
            factor=min(MAX_FACTOR, max(1.0, median(kept))),
            runs=len(kept),
            low=min(MAX_FACTOR, kept[round(0.1 * last)]),
            high=min(MAX_FACTOR, kept[round(0.9 * last)]),
        )
    return found

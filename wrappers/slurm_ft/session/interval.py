"""How long to train between two checkpoints. Pure.

A checkpoint costs time, a failure costs the time since the last one. Young's first-order optimum
(Comm. ACM 17(9), 1974) balances the two: sqrt(2 * cost * mean time between failures). Daly (Future
Generation Computer Systems 22(3), 2006) adds the terms that matter when the cost is not small
against the time between failures; that form is used here, and it tends to Young's.

The cost is the time that training stands still, which for an asynchronous save is a part of what
the save takes; the whole save is a lower bound of the interval instead, since only one is under
way at a time. Failures that Slurm announces in time are none: they save by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ext.domain.duration import parse_duration
from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables

# One node in a large GPU cluster fails about once in several months to a year; a fine-tuning job
# on shared nodes also meets operators, file systems and its own bugs. One day a node errs towards
# saving too often, which costs a bounded share, and is corrected by what the job lives through.
PRIOR_NODE_MTBF_S = 86400.0
# "auto": not more often than people can follow in a log, and never more than an hour lost.
AUTO_LOW_S = 60.0
AUTO_HIGH_S = 3600.0
# Ends of an attempt that came without time to save.
_UNANNOUNCED = frozenset({Cause.NODE_FAIL, Cause.LOST_PEER, Cause.NO_PROGRESS, Cause.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the user allows, in seconds."""

    low_s: float = AUTO_LOW_S
    high_s: float = AUTO_HIGH_S

    @property
    def fixed(self) -> bool:
        """Whether the user gave one number."""
        return self.low_s == self.high_s


def parse_bounds(text: str, place: str = variables.CHECKPOINT_INTERVAL) -> Bounds:
    """``auto``, ``LOW-HIGH`` or one time, or a ConfigError naming ``place``."""
    if text.strip().lower() == "auto":
        return Bounds()
    low, dash, high = text.partition("-")
    try:
        if "-" in high:  # days before a dash would look like a bound
            raise ValueError("more than two bounds")
        bounds = Bounds(parse_duration(low), parse_duration(high if dash else low))
    except ValueError:
        bounds = Bounds(math.nan, math.nan)
    # Written so that nan fails as well.
    if not 0 < bounds.low_s <= bounds.high_s < math.inf:
        raise ConfigError(
            place,
            f"{text!r} is no interval",
            "write auto, a time as in 600 or 10m, or bounds as in 120-1800 or 2m-30m",
        )
    return bounds


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's optimal time from the end of one checkpoint to the beginning of the next."""
    if cost_s <= 0:
        return 0.0
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * cost_s * mtbf_s) * series - cost_s


def interval_s(
    bounds: Bounds, mtbf_s: float, cost_s: float | None = None, save_s: float | None = None
) -> float:
    """Seconds until the next checkpoint begins.

    ``cost_s`` is how long training stood still for the last save, ``save_s`` how long it took in
    all; ``None`` before the first, which is made early so that both become known.
    """
    if bounds.fixed or cost_s is None:
        return bounds.low_s
    wanted_s = min(max(optimum_s(cost_s, mtbf_s), bounds.low_s), bounds.high_s)
    # Half of the time without a save under way: otherwise a slow disk would always be busy.
    return max(wanted_s, 2 * (save_s or 0.0))


def estimate_mtbf_s(nodes: int, attempts: tuple[Attempt, ...] = ()) -> float:
    """Mean time between unannounced failures of a job on ``nodes`` nodes.

    The prior counts as one failure seen in its own mean time, so a job that fails often is
    believed after a few failures, and a job that has run for days without one as well.
    """
    prior_s = PRIOR_NODE_MTBF_S / max(nodes, 1)
    ran_s = 0.0
    failures = 0
    for attempt in attempts:
        if attempt.ended_s is not None:
            ran_s += max(0.0, attempt.ended_s - attempt.started_s)
            failures += _lost_work(attempt)
    return (prior_s + ran_s) / (1 + failures)


def _lost_work(attempt: Attempt) -> bool:
    if attempt.cause in _UNANNOUNCED:
        return True
    # Preempted with a grace too short to save: a failure in all but name.
    saved, last = attempt.saved_step, attempt.last_step
    return attempt.cause is Cause.PREEMPTED and last is not None and (saved or 0) + 1 < last

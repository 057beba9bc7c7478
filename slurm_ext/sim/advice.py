"""From what a site's accounting says to what to switch on, and what to leave off.

Each advice compares measured shares with named bounds and says so, so that an administrator can
dispute it. The bounds are rules of thumb; where the log cannot tell (models unknown, no nodes, few
jobs), the answer is "cannot tell" and not a guess. How much a mechanism gains is for the simulator
to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.sim.fit import BUSY, CROWDED, SHORT_S, Fit, reached

# Below so many jobs a share is an anecdote.
MIN_JOBS = 100
# Shares from which a mechanism has something to work on.
ENOUGH_KNOWN = 0.5
ENOUGH_TOGETHER = 0.1
ENOUGH_SUCCESSORS = 0.1
# A cold start and a checkpoint take a minute or two: of half an hour 5 %, of most jobs nothing.
ENOUGH_SHORT = 0.25
MOSTLY = 0.5
ENOUGH_BLOCKED = 0.1


class Verdict(StrEnum):
    """What to do with a mechanism; NOT_YET would suit, but nothing carries it out yet."""

    USE = "use"
    NOT_YET = "not yet"
    LEAVE_OFF = "leave off"
    UNCLEAR = "cannot tell"


@dataclass(frozen=True, slots=True)
class Advice:
    """One mechanism, what to do with it, the numbers behind that, and how it is switched."""

    mechanism: str
    verdict: Verdict
    because: str
    setting: str


def advise(found: Fit) -> tuple[Advice, ...]:
    """Advice about every mechanism, the most basic first."""
    every = (
        _order(found),
        _counts(found),
        _placement(found),
        _merging(found),
        _switching(found),
        _reallocation(found),
    )
    if found.jobs >= MIN_JOBS:
        return every
    few = f"{found.jobs} jobs are too few to judge (at least {MIN_JOBS}); "
    return tuple(
        Advice(one.mechanism, Verdict.UNCLEAR, few + one.because, one.setting) for one in every
    )


def _when(condition: bool) -> Verdict:
    return Verdict.USE if condition else Verdict.LEAVE_OFF


def percent(share: float) -> str:
    """A share in whole percent; what is more than nothing is never 0."""
    return "under 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _busy(found: Fit) -> bool:
    return found.queue_share >= BUSY or bool(reached(found.hours, BUSY))


def _crowded(found: Fit) -> bool:
    return found.queue_share >= CROWDED or bool(reached(found.hours, CROWDED))


def _queue(found: Fit, bound: float) -> str:
    hours = len(reached(found.hours, bound))
    times = f"in {hours} hours of the day" if hours != 1 else "in 1 hour of the day"
    return (
        f"waiting is {percent(found.queue_share)} of the job time, and at least"
        f" {percent(bound)} {times}"
    )


def _order(found: Fit) -> Advice:
    return Advice(
        "queue order",
        _when(_busy(found)),
        _queue(found, BUSY),
        "act: [order] of a partition",
    )


def _counts(found: Fit) -> Advice:
    short = found.short_share >= MOSTLY
    return Advice(
        "GPU counts of pending jobs",
        _when(_busy(found) or not short),
        f"{_queue(found, BUSY)}; {percent(1 - found.short_share)} of the jobs take"
        f" {SHORT_S // 60} min or longer, which more GPUs can shorten (bound"
        f" {percent(1 - MOSTLY)})",
        "act: [order, lease, resize], and --ft-gpus of the jobs",
    )


def _placement(found: Fit) -> Advice:
    pieces = found.fragments
    name, setting = "node lists against GPU fragments", "act: [lease, pin] of a partition"
    if pieces is None:
        return Advice(name, Verdict.UNCLEAR, "the log names no nodes", setting)
    return Advice(
        name,
        _when(pieces.wait_share >= ENOUGH_BLOCKED),
        f"{percent(pieces.wait_share)} of the waiting was for whole nodes while enough GPUs were"
        f" free in pieces (bound {percent(ENOUGH_BLOCKED)})",
        setting,
    )


def _merging(found: Fit) -> Advice:
    name, setting = "task merging", "none: --ft-merge has no effect yet, try simulate --merge"
    together = found.reuse.together_share
    if not _crowded(found):
        return Advice(name, Verdict.LEAVE_OFF, _queue(found, CROWDED), setting)
    if found.reuse.known_share < ENOUGH_KNOWN:
        return Advice(name, Verdict.UNCLEAR, _unknown(found), setting)
    return Advice(
        name,
        Verdict.NOT_YET if together >= ENOUGH_TOGETHER else Verdict.LEAVE_OFF,
        f"{percent(together)} of the jobs waited together with another of their model (bound"
        f" {percent(ENOUGH_TOGETHER)}); {_queue(found, CROWDED)}",
        setting,
    )


def _switching(found: Fit) -> Advice:
    name = "pipeline switch"
    setting = "ft-run --chain, one job's own tasks; --ft-switch has no effect yet"
    successors = found.reuse.successor_share
    if found.short_share < ENOUGH_SHORT:
        return Advice(
            name,
            Verdict.LEAVE_OFF,
            f"only {percent(found.short_share)} of the jobs are shorter than {SHORT_S // 60} min"
            f" (bound {percent(ENOUGH_SHORT)}): a saved start is no part of the others",
            setting,
        )
    if found.reuse.known_share < ENOUGH_KNOWN:
        return Advice(name, Verdict.UNCLEAR, _unknown(found), setting)
    return Advice(
        name,
        _when(successors >= ENOUGH_SUCCESSORS),
        f"{percent(found.short_share)} of the jobs are shorter than {SHORT_S // 60} min, and while"
        f" {percent(successors)} of the jobs waited, one of their model and GPU count ended"
        f" (bound {percent(ENOUGH_SUCCESSORS)})",
        setting,
    )


def _reallocation(found: Fit) -> Advice:
    name, setting = "moving running jobs", "act: [order, move], and --ft-max-pause of the jobs"
    long_share = 1 - found.short_gpu_share
    return Advice(
        name,
        _when(_crowded(found) and found.short_share < MOSTLY),
        f"{_queue(found, CROWDED)}; jobs of at least {SHORT_S // 60} min are"
        f" {percent(1 - found.short_share)} of the jobs and hold {percent(long_share)} of the GPU"
        " time, and only they outlast what a restart costs",
        setting,
    )


def _unknown(found: Fit) -> str:
    return (
        f"the model is known of {percent(found.reuse.known_share)} of the jobs only;"
        f" {percent(found.reuse.repeated_names_share)} repeat a name of the same user, so name the"
        " models with --model-pattern"
    )

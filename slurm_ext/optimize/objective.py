"""What an allocation is worth: from remaining seconds to option values, with the terms kept.

Objective.  Choose for every job i at most one of its allowed GPU counts a, so that the sum of

    V(i, a) = w_i * (progress + start + waiting + deadline + lease + switch)

is largest, under  sum of a <= free GPUs  (and, over several pools, the constraints that
`problem.PoolProblem` states).  Every term is a rate in 1/s, "share of the job's work per second",
so the terms can be added and compared between models:

* progress   1 / R(i, a), with R the remaining seconds on a GPUs.  Not samples/s: a sample of one
             model is not a sample of another, and raw throughput starves whoever has the bigger
             network.  Jobs close to their end weigh more, which is what shortens the average JCT.
* start      a share of 1 / R(i, a0), a0 the job's smallest count: what it is worth that the job
             runs at all.  Off by default.
* waiting    waited / patience^2: after ``patience_s`` of waiting a job weighs as much more as a job
             with ``patience_s`` of work left.  Independent of the job's length, so that a stream of
             short jobs cannot starve a long one.
* deadline   1 / time left, the rate that the deadline asks for, times a weight; for the counts that
             keep the deadline only.  A deadline that no count can keep any more counts for nothing.
* lease      a share of 1 / R(i, a) for the count the last plan gave: another count must be better
             by this margin, or shapes would be rewritten at every small change of an estimate.
* switch     1 / (R + delay) - 1 / R, never positive: what a checkpoint, a restart or a pipeline
             switch before useful work costs.

w_i is the fairness weight (share, class).  In the explained terms it is one addend of its own,
(w_i - 1) times the others, so that terms always add up to the value.

No clock and no job object in here: times come in as durations.  The choice a reader would
question: a negative sum becomes 0, that is "not worth starting" (only ``switch`` is negative, and
with its weight at most 1 the sum stays positive).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields

from slurm_ext.domain.errors import SolverError
from slurm_ext.domain.plan import Term
from slurm_ext.domain.spans import about, counted
from slurm_ext.optimize.problem import Item, Option, Problem

# Remaining times below this are noise of the estimate; without a floor one job at its last step
# would outweigh a whole queue.
MIN_REMAINING_S = 1.0


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each term counts; all are pure numbers except ``patience_s``.

    Two defaults were measured (``python -m tests.bench.replay_ideal --ablation``; the numbers are
    in docs/policy.md).  ``start`` above 0 makes the average JCT longer and does not shorten the
    tail; it is for sites where every user should see a job running.  ``patience_s``: two hours
    shorten the tail for little of the average JCT, one hour buys more of that for more.
    """

    progress: float = 1.0
    start: float = 0.0
    waiting: float = 1.0
    patience_s: float = 2 * 3600.0
    deadline: float = 4.0
    lease: float = 0.05
    switch: float = 1.0

    def __post_init__(self) -> None:
        for part in fields(self):
            number = getattr(self, part.name)
            if not 0.0 <= number < math.inf:
                raise SolverError(
                    f"weight {part.name}={number!r} is not a finite number of at least 0"
                )
        if self.patience_s == 0.0:
            raise SolverError(
                "weight patience_s=0 would divide by zero; use waiting=0 to switch off"
            )
        if self.switch > 1.0:
            raise SolverError(f"weight switch={self.switch!r} is above 1: values could go below 0")


@dataclass(frozen=True, slots=True)
class Choice:
    """One allowed GPU count of a job: what it would mean in time.

    ``delay_s`` is spent before useful work begins (restart, checkpoint, pipeline switch).
    ``planned`` marks the count that the last plan gave. ``unlimited`` says that ``remaining_s``
    only stands in for the time of a job that has no limit.
    """

    gpus: int
    remaining_s: float
    delay_s: float = 0.0
    planned: bool = False
    tag: Hashable = None
    pool: str = ""
    unlimited: bool = False

    @property
    def work(self) -> str:
        """What is left to do, in words."""
        on = f"left on {counted(self.gpus, 'GPU')}"
        if self.unlimited:
            return f"work {on}, without a time limit"
        return f"{about(self.remaining_s)} of work {on}"


@dataclass(frozen=True, slots=True)
class Demand:
    """A job (or a merged group) as the objective sees it.

    ``waited_s`` counts from the first submission.  ``deadline_in_s`` is seconds from now, negative
    when missed, ``None`` without a deadline.
    """

    key: str
    choices: tuple[Choice, ...]
    waited_s: float = 0.0
    weight: float = 1.0
    deadline_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """The addends of one option's value, each in 1/s; ``fairness`` makes up for the weight w_i."""

    progress: float
    start: float
    waiting: float
    deadline: float
    lease: float
    switch: float
    fairness: float

    @property
    def total(self) -> float:
        return max(0.0, math.fsum(getattr(self, name) for name in TERM_NAMES))


TERM_NAMES = tuple(part.name for part in fields(Terms))


@dataclass(frozen=True, slots=True)
class Scored:
    """A problem together with the terms that made it: ``terms[key][option index]``."""

    problem: Problem
    terms: Mapping[str, tuple[Terms, ...]]


def score(demand: Demand, weights: Weights) -> tuple[Terms, ...]:
    """The terms of every choice of ``demand``, in its order."""
    _check(demand)
    if not demand.choices:
        return ()
    smallest = min(demand.choices, key=lambda choice: (choice.gpus, choice.remaining_s))
    start = weights.start / max(smallest.remaining_s, MIN_REMAINING_S)
    waiting = weights.waiting * demand.waited_s / weights.patience_s**2
    return tuple(
        _score_choice(choice, demand, weights, start, waiting) for choice in demand.choices
    )


def build_items(
    demands: Sequence[Demand], weights: Weights
) -> tuple[tuple[Item, ...], dict[str, tuple[Terms, ...]]]:
    """Items for a `Problem` or a `PoolProblem`, and the terms of their options."""
    terms = {demand.key: score(demand, weights) for demand in demands}
    items = tuple(
        Item(
            demand.key,
            tuple(
                Option(choice.gpus, part.total, choice.tag, choice.pool)
                for choice, part in zip(demand.choices, terms[demand.key], strict=True)
            ),
        )
        for demand in demands
    )
    return items, terms


def build(demands: Sequence[Demand], capacity: int, weights: Weights | None = None) -> Scored:
    """The knapsack of one pool with ``capacity`` free GPUs."""
    items, terms = build_items(demands, weights if weights is not None else Weights())
    return Scored(Problem(items, capacity), terms)


def in_words(demand: Demand, index: int, terms: Terms) -> tuple[Term, ...]:
    """The terms of one choice as the plan keeps them; those that are zero are left out."""
    choice = demand.choices[index]
    words = {
        "progress": choice.work,
        "start": "running at all, even on its smallest count",
        "waiting": f"has waited {about(demand.waited_s)} since its first submission",
        "deadline": f"this count keeps its deadline in {about(demand.deadline_in_s or 0.0)}",
        "lease": "the count the last plan gave; another must be better by a margin",
        "switch": f"{about(choice.delay_s)} pass before useful work begins",
        "fairness": f"fairness weight {demand.weight:g}",
    }
    return tuple(
        Term(name, getattr(terms, name), words[name])
        for name in TERM_NAMES
        if getattr(terms, name) != 0.0
    )


def _score_choice(
    choice: Choice, demand: Demand, weights: Weights, start: float, waiting: float
) -> Terms:
    remaining_s = max(choice.remaining_s, MIN_REMAINING_S)
    whole_s = remaining_s + choice.delay_s
    progress = weights.progress / remaining_s
    deadline = 0.0
    if demand.deadline_in_s is not None and whole_s <= demand.deadline_in_s:
        deadline = weights.deadline / demand.deadline_in_s
    lease = weights.lease / remaining_s if choice.planned else 0.0
    # Scaled by the weight of progress: the delay makes progress slower, it cannot undo more.
    switch = weights.switch * weights.progress * (1.0 / whole_s - 1.0 / remaining_s)
    plain = progress + start + waiting + deadline + lease + switch
    return Terms(
        progress=progress,
        start=start,
        waiting=waiting,
        deadline=deadline,
        lease=lease,
        switch=switch,
        fairness=(demand.weight - 1.0) * plain,
    )


def _check(demand: Demand) -> None:
    if not 0.0 < demand.weight < math.inf:
        raise SolverError(f"job {demand.key}: fairness weight {demand.weight!r} is not above 0")
    if not 0.0 <= demand.waited_s < math.inf:
        raise SolverError(f"job {demand.key}: waited_s={demand.waited_s!r} is not at least 0")
    if demand.deadline_in_s is not None and not math.isfinite(demand.deadline_in_s):
        raise SolverError(f"job {demand.key}: deadline_in_s={demand.deadline_in_s!r} is not finite")
    for choice in demand.choices:
        if not 0.0 <= choice.remaining_s < math.inf or not 0.0 <= choice.delay_s < math.inf:
            raise SolverError(
                f"job {demand.key} on {choice.gpus} GPUs: remaining_s={choice.remaining_s!r}, "
                f"delay_s={choice.delay_s!r}: both must be finite and at least 0"
            )

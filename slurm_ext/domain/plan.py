"""A plan says which candidate each job gets, in which order, where, and why. It is immutable.

Each decision keeps the terms that made it, so that ``slurm-ext explain`` can retell it later
without running the optimizer again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.estimate import Estimate

PLAN_VERSION = 1


class Verdict(StrEnum):
    """What a plan wants for one job.

    START    let it start now, in ``configuration``, on ``nodes`` where given
    WAIT     keep it from starting: its shape is not decided yet (renewed lease)
    RESERVE  leave it to Slurm in its present shape, so that Slurm reserves for it
    ORDER    only its place in the queue is ours
    LEAVE    nothing about it is ours; ``reason`` says why
    STOP     a running job gives its GPUs back and waits again. Only preemptive policies say it,
             and only for jobs of ``View.running``, which the daemon leaves empty. START for such a
             job means: stop it and start it at once in this configuration.
    """

    START = "start"
    WAIT = "wait"
    RESERVE = "reserve"
    ORDER = "order"
    LEAVE = "leave"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Term:
    """One addend of a decision: its name, its value and a sentence in plain words."""

    name: str
    value: float
    words: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What the plan wants for one job, and why.

    ``rank`` is the job's wanted place among our jobs of its partition and QOS, 0 first.
    ``waits_for`` says in plain words what keeps it waiting. ``expected_start_s`` and
    ``remaining_s`` may be unknown. ``wanted_since_s`` is since when plans have wanted this start
    (also of a job that was left to Slurm because it did not start), ``None`` where none does.
    """

    job_id: str
    verdict: Verdict
    rank: int
    reason: str
    configuration: Configuration | None = None
    nodes: tuple[str, ...] = ()
    remaining_s: Estimate | None = None
    expected_start_s: float | None = None
    waits_for: str = ""
    pool: str = ""
    terms: tuple[Term, ...] = ()
    wanted_since_s: float | None = None

    @property
    def left_to_slurm(self) -> bool:
        """Whether it should have started, but Slurm did not start it."""
        return self.verdict is Verdict.ORDER and self.wanted_since_s is not None


@dataclass(frozen=True, slots=True)
class SolveInfo:
    """How the allocation of one pool was found. ``gap`` is relative, 0 = proven optimal."""

    pool: str
    solver: str
    optimal: bool
    gap: float
    time_s: float
    jobs: int
    gpus_free: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions of one cycle. ``version`` is the version of the written document.

    ``rides`` names for each job that is merged into another one that starts now (its carrier) that
    other job; it holds no GPUs of its own.
    """

    policy: str
    made_s: float
    decisions: Mapping[str, Decision]
    solves: tuple[SolveInfo, ...] = ()
    rides: Mapping[str, str] = field(default_factory=dict)
    version: int = field(default=PLAN_VERSION)

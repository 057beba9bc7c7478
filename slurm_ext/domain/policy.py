"""The policy signature: ``plan = policy(view, now)``, a pure function.

A policy sees a snapshot, the candidates of each job and what may be touched. It has no clock, no
randomness and no I/O, so that the daemon and the simulator can call the very same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Permit:
    """What may be touched on one job, and the reason for every "no"."""

    order: bool = True
    resize: bool = False
    lease: bool = False
    pin: bool = False
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What a policy knows about one pending job besides its row in the snapshot.

    ``candidates`` are already filtered by memory, directive, limits and shape; they hold at
    least the present shape. ``waiting_since_s`` is the *first* submission. ``weight`` (> 0) is
    the fairness or class weight. ``pool`` names the pool whose GPUs the job competes for.
    ``deadline_s`` is an epoch second.
    """

    candidates: tuple[Candidate, ...]
    permit: Permit = Permit()
    waiting_since_s: float = 0.0
    weight: float = 1.0
    pool: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Everything a policy may look at.

    ``previous`` is the last plan (for hysteresis: a changed plan must be better by a margin).
    ``free_at_s`` estimates for each running job when it ends (epoch seconds). ``carried_out`` is
    false for an observer's plan: that Slurm does not start what it wants means nothing then.
    """

    snapshot: Snapshot
    facts: Mapping[str, JobFacts]
    pools: Mapping[str, tuple[str, ...]]  # pool key -> node names
    free_at_s: Mapping[str, float] = field(default_factory=dict)
    previous: Plan | None = None
    carried_out: bool = True


class Policy(Protocol):
    """A named decision rule. Calling it twice with equal arguments gives equal plans."""

    @property
    def name(self) -> str:
        """Name as written in the configuration and on the command line."""

    def __call__(self, view: View, now: float) -> Plan:
        """Decide for every pending job of ``view.facts``."""

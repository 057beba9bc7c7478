"""The policy signature: ``plan = policy(view, now)``, a pure function.

A policy sees a snapshot, the candidates of each job and what may be touched. It has no clock, no
randomness and no I/O, so that the daemon and the simulator can call the very same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.job import Job
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
    """What a policy knows about one job besides its row in the snapshot.

    ``candidates`` are already filtered by memory, directive, limits and shape; they hold at
    least the present shape. ``waiting_since_s`` is the *first* submission. ``weight`` (> 0) is
    the fairness or class weight. ``pool`` names the pool whose GPUs the job competes for.
    ``deadline_s`` is an epoch second. ``attained_gpu_s`` are the GPU-seconds that the job has
    held so far, over all attempts, start-up included.
    """

    candidates: tuple[Candidate, ...]
    permit: Permit = Permit()
    waiting_since_s: float = 0.0
    weight: float = 1.0
    pool: str = ""
    deadline_s: float | None = None
    attained_gpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """Everything a policy may look at.

    ``previous`` is the last plan (for hysteresis: a changed plan must be better by a margin).
    ``free_at_s`` estimates for each running job when it ends (epoch seconds). ``carried_out`` is
    false for an observer's plan: that Slurm does not start what it wants means nothing then.
    ``running`` holds the jobs that a policy may stop; empty (the daemon's case) means that none
    may be. Their candidates say what a *restart* from here would take, all costs included: going
    on as they are takes until ``free_at_s``. ``brief`` means that nobody will read the plan: it may
    then leave out jobs for which nothing is to be done. ``queues``, where it is known already,
    holds for each pool all pending jobs that compete for it, by falling priority, then by
    submission, and every pending job is in one of them; ``shortest`` holds the same jobs by the
    remaining time of their present GPU count. ``alike`` and ``apart`` are there for a policy that
    has ``standing``: for each pool and GPU count the jobs that have one, the highest first, and
    for each pool the jobs that have none. None of them tells anything that ``facts`` does not.
    """

    snapshot: Snapshot
    facts: Mapping[str, JobFacts]
    pools: Mapping[str, tuple[str, ...]]  # pool key -> node names
    free_at_s: Mapping[str, float] = field(default_factory=dict)
    previous: Plan | None = None
    carried_out: bool = True
    running: Mapping[str, JobFacts] = field(default_factory=dict)
    brief: bool = False
    queues: Mapping[str, Sequence[Job]] | None = None
    shortest: Mapping[str, Sequence[Job]] | None = None
    alike: Mapping[str, Mapping[int, Sequence[Job]]] | None = None
    apart: Mapping[str, Sequence[Job]] | None = None


class Policy(Protocol):
    """A named decision rule. Calling it twice with equal arguments gives equal plans.

    One that stops running jobs also has an attribute ``preemptive`` that is true; without it no
    job of ``View.running`` is shown. One that compares jobs of one pool and GPU count by a number
    that does not change while they wait may have ``standing(job, fact)``: that number, or None for
    a job that has to be looked at by itself. One that understands candidates with two job ids has
    an attribute ``merges`` that is true; without it none are shown.
    """

    @property
    def name(self) -> str:
        """Name as written in the configuration and on the command line."""

    def __call__(self, view: View, now: float) -> Plan:
        """Decide for every pending job of ``view.facts``."""

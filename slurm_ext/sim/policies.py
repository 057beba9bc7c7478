"""The policies that a replay can be asked for, by the names that users write.

``srtf`` and ``fifo`` need nothing but the queue; the names with a dash are variants that tell where
a gain comes from: ``titan-rigid`` keeps every job at the count it asked for, ``titan-grow`` also
restarts running jobs on more GPUs where that pays. Policies are imported when they are asked for,
since `titan` brings a solver along.

The choice a reader would question: no job is put in front for having waited long, unless a limit is
asked for, although the daemon has one. Published results of `srtf` have none, and where the queue
is longer than the limit nearly every job is past it, so that `srtf` is `fifo`. The limit holds for
`titan` as for `srtf`, or the two could not be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import JobFacts, Policy, View


@dataclass(frozen=True, slots=True)
class Rigid:
    """A policy that sees every job in the shape that it asked for, and in no other."""

    inner: Policy

    @property
    def name(self) -> str:
        """The inner policy's name, marked."""
        return f"{self.inner.name}-rigid"

    @property
    def preemptive(self) -> bool:
        """As the inner policy."""
        return bool(getattr(self.inner, "preemptive", False))

    def __call__(self, view: View, now: float) -> Plan:
        """What the inner policy decides for the narrowed view."""
        asked = {job.job_id: job.gpus for job in view.snapshot.pending()}
        facts = {key: _only(fact, asked.get(key, 0)) for key, fact in view.facts.items()}
        return self.inner(replace(view, facts=facts), now)


def _only(fact: JobFacts, gpus: int) -> JobFacts:
    same = tuple(item for item in fact.candidates if item.gpus == gpus)
    return replace(fact, candidates=same) if same else fact


def _fifo() -> Policy:
    from slurm_ext.policy.backfill import Backfill

    return Backfill(reserve=False)


def _backfill() -> Policy:
    from slurm_ext.policy.backfill import Backfill

    return Backfill()


def _srtf(waiting_limit_s: float = math.inf) -> Policy:
    from slurm_ext.policy.srtf import SrtfPolicy

    return SrtfPolicy(waiting_limit_s)


def _srtf_preemptive() -> Policy:
    from slurm_ext.policy.preemptive import PreemptiveSrtf

    return PreemptiveSrtf()


def _tiresias() -> Policy:
    from slurm_ext.policy.tiresias import TiresiasPolicy

    return TiresiasPolicy()


def _optimus() -> Policy:
    from slurm_ext.policy.optimus import OptimusPolicy

    return OptimusPolicy()


def _titan(waiting_limit_s: float = math.inf) -> Policy:
    from slurm_ext.policy.titan import TitanConfig, TitanPolicy

    return TitanPolicy(TitanConfig(waiting_limit_s=waiting_limit_s))


def _titan_rigid(waiting_limit_s: float = math.inf) -> Policy:
    return Rigid(_titan(waiting_limit_s))


def _titan_grow(waiting_limit_s: float = math.inf) -> Policy:
    from slurm_ext.policy.titan import GROWING, TitanPolicy

    return TitanPolicy(replace(GROWING, waiting_limit_s=waiting_limit_s))


def _titan_published() -> Policy:
    from slurm_ext.policy.titan_published import PublishedTitan

    return PublishedTitan()


POLICIES: Mapping[str, tuple[Callable[[], Policy], str]] = {
    "fifo": (_fifo, "in order of submission; the first that does not fit stops the rest"),
    "backfill": (
        _backfill,
        "EASY backfilling with users' time limits (1.5 x the true time where unknown)",
    ),
    "srtf": (_srtf, "shortest remaining time first, nothing is stopped"),
    "srtf-preemptive": (_srtf_preemptive, "the same, and longer jobs are stopped for shorter ones"),
    "tiresias": (_tiresias, "least attained service in discrete queues, preemptive"),
    "optimus": (_optimus, "GPUs by marginal gain, preemptive"),
    "titan": (_titan, "as the daemon: order and GPU counts of waiting jobs by an exact knapsack"),
    "titan-rigid": (_titan_rigid, "titan at the requested GPU counts"),
    "titan-grow": (_titan_grow, "titan that also restarts running jobs on more GPUs"),
    "titan-published": (
        _titan_published,
        "the formulation of Titan's author, preemptive; made for --interval titan-published=120",
    ),
}


# Policies that put jobs in front which have waited for longer than a limit.
LIMITED: Mapping[str, Callable[[float], Policy]] = {
    "srtf": _srtf,
    "titan": _titan,
    "titan-rigid": _titan_rigid,
    "titan-grow": _titan_grow,
}


def policy_named(name: str, waiting_limit_s: float = math.inf) -> Policy:
    """A policy by its name. Raises DataError that lists the names."""
    if name not in POLICIES:
        raise DataError(f"policy {name!r}", "unknown", f"use one of {', '.join(POLICIES)}")
    return LIMITED[name](waiting_limit_s) if name in LIMITED else POLICIES[name][0]()

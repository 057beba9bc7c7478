"""The policies that a replay can be asked for, by the names that users write.

``srtf`` and ``fifo`` need nothing but the queue; the names with a dash are variants that tell where
a gain comes from: ``titan-rigid`` keeps every job at the count it asked for, ``titan-grow`` also
restarts running jobs on more GPUs where that pays. Policies are imported when they are asked for,
since `titan` brings a solver along.
"""

from __future__ import annotations

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


def _srtf() -> Policy:
    from slurm_ext.policy.srtf import SrtfPolicy

    return SrtfPolicy()


def _srtf_preemptive() -> Policy:
    from slurm_ext.policy.preemptive import PreemptiveSrtf

    return PreemptiveSrtf()


def _tiresias() -> Policy:
    from slurm_ext.policy.tiresias import TiresiasPolicy

    return TiresiasPolicy()


def _optimus() -> Policy:
    from slurm_ext.policy.optimus import OptimusPolicy

    return OptimusPolicy()


def _titan() -> Policy:
    from slurm_ext.policy.titan import TitanPolicy

    return TitanPolicy()


def _titan_rigid() -> Policy:
    return Rigid(_titan())


def _titan_grow() -> Policy:
    from slurm_ext.policy.titan import GROWING, TitanPolicy

    return TitanPolicy(GROWING)


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


def policy_named(name: str) -> Policy:
    """A policy by its name. Raises DataError that lists the names."""
    if name not in POLICIES:
        raise DataError(f"policy {name!r}", "unknown", f"use one of {', '.join(POLICIES)}")
    return POLICIES[name][0]()

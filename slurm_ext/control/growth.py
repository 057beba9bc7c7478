"""Keeps growth and longer limits from delaying jobs that are not ours to plan.

Our jobs only permute the places that they hold, so a small job may stand where a bigger one would
have started before somebody else's. Bigger or longer than submitted, it could delay that one.
Slurm's backfill guards what it has planned against jobs that stand behind; this guards it against
ours that stand in front. It is a conservative rule, never a second backfill.

It is asked for each count that is offered and again for each start, so the jobs of others are
ranked once per pool and an answer costs a binary search.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from slurm_ext.control.pools import PoolIndex
from slurm_ext.domain.job import Job, Shape
from slurm_ext.domain.node import Pool
from slurm_ext.domain.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class _Others:
    """Jobs of others that may use the nodes of one pool, by falling priority.

    ``first_promised[i]`` is the job with the earliest promised start among the first ``i + 1``.
    """

    negated: Sequence[int]
    first_promised: Sequence[Job | None]
    first_without_promise: Job | None


class GrowthGuard:
    """The rule for one snapshot.

    In the presence of pending, eligible jobs that we do not plan (``planned`` are ours) and that
    may use the same nodes, a job takes more GPUs, nodes or time than submitted only if it ends
    before the earliest start that Slurm has promised any of them; and where one of them that
    natively stands ahead has no promise yet, not at all. A longer limit on no more GPUs is
    measured against those that natively stand ahead only, growth against all of them.
    """

    def __init__(self, snapshot: Snapshot, planned: Collection[str], index: PoolIndex) -> None:
        nodes_of = {p.name: frozenset(p.node_names) for p in snapshot.partitions}
        self._index = index
        self._now = snapshot.taken_s
        self._jobs = [
            (job, frozenset().union(*(nodes_of.get(p, frozenset()) for p in job.partitions)))
            for job in snapshot.pending()
            # What Slurm will not start as it is cannot be delayed.
            if job.competes and job.job_id not in planned
        ]
        self._jobs.sort(key=lambda pair: (-pair[0].priority, pair[0].base_id, pair[0].job_id))
        self._others: dict[str, _Others] = {}

    def refusal(
        self,
        job: Job,
        wanted: Shape,
        limit_s: float | None,
        submitted: Shape,
        submitted_limit_s: float | None,
    ) -> str:
        """Why the job may not start in this shape now; empty when it may."""
        grows = wanted.gpus > submitted.gpus or wanted.nodes > submitted.nodes
        longer = (
            limit_s is not None and submitted_limit_s is not None and limit_s > submitted_limit_s
        )
        if not self._jobs or not (grows or longer):
            return ""
        pool = self._index.pool_of(job)
        others = self._others_in(pool) if pool is not None else None
        if others is None or not others.negated:
            return ""
        native = job.priority - job.site_factor
        runs_s = limit_s if limit_s is not None else job.time_limit_s
        what = f"{wanted.gpus} GPUs" if grows else f"a limit of {(limit_s or 0) / 60:.0f} min"
        open_end = others.first_without_promise
        if open_end is not None and open_end.priority >= native:
            return f"{what} could delay job {open_end.job_id}, which Slurm has not planned yet"
        ahead = bisect.bisect_right(others.negated, -native)
        counted = len(others.negated) if grows else ahead
        first = others.first_promised[counted - 1] if counted else None
        if first is None:
            return ""
        if runs_s is None or self._now + runs_s > (first.start_s or 0.0):
            return f"{what} could delay job {first.job_id}, which Slurm has planned"
        return ""

    def _others_in(self, pool: Pool) -> _Others:
        found = self._others.get(pool.key)
        if found is None:
            found = self._others[pool.key] = self._ranked(frozenset(n.name for n in pool.nodes))
        return found

    def _ranked(self, names: frozenset[str]) -> _Others:
        negated: list[int] = []
        firsts: list[Job | None] = []
        without: Job | None = None
        first: Job | None = None
        for job, nodes in self._jobs:
            if names.isdisjoint(nodes):
                continue
            if job.start_s is None or job.start_s <= self._now:
                without = without or job
            elif first is None or job.start_s < (first.start_s or 0.0):
                first = job
            negated.append(-job.priority)
            firsts.append(first)
        return _Others(negated, firsts, without)

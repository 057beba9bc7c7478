"""Keeps growth and longer limits from delaying jobs that are not ours to plan.

Our jobs only permute the places that they hold, so a small job may stand where a bigger one would
have started before somebody else's. Bigger or longer than submitted, it could delay that one.
Slurm's backfill guards what it has planned against jobs that stand behind; this guards it against
ours that stand in front. It is a conservative rule, never a second backfill.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_ext.control.pools import PoolIndex
from slurm_ext.domain.job import Job, Shape
from slurm_ext.domain.snapshot import Snapshot


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
        self._others = [
            (job, frozenset().union(*(nodes_of.get(p, frozenset()) for p in job.partitions)))
            for job in snapshot.pending()
            if job.eligible and not job.held and job.job_id not in planned
        ]

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
        if not self._others or not (grows or longer):
            return ""
        pool = self._index.pool_of(job)
        names = frozenset(n.name for n in pool.nodes) if pool is not None else frozenset()
        native = job.priority - job.site_factor
        runs_s = limit_s if limit_s is not None else job.time_limit_s
        for other, nodes in self._others:
            if names.isdisjoint(nodes):
                continue
            ahead = other.priority >= native
            promised = other.start_s is not None and other.start_s > self._now
            if not grows and not ahead:
                continue
            what = f"{wanted.gpus} GPUs" if grows else f"a limit of {(limit_s or 0) / 60:.0f} min"
            if not promised:
                if ahead:
                    return f"{what} could delay job {other.job_id}, which Slurm has not planned yet"
                continue
            if runs_s is None or self._now + runs_s > (other.start_s or 0.0):
                return f"{what} could delay job {other.job_id}, which Slurm has planned"
        return ""

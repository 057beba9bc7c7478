"""Policy ``tiresias``: discretised two-dimensional least attained service, preemptive.

Nothing is estimated. Jobs are ranked by the GPU-seconds that they have held so far, in a few
queues: a job that passes a queue's limit falls into the next one, and inside a queue the first
submission counts. GPUs are given out in that order, each job in its submitted shape; a job that
does not fit is passed over, and a running job that comes too late is stopped.

The default limit is the one that the published results were made with: two queues, 4 GPU-hours
(the second limit of that program, 1,000 GPU-hours, ends no queue). Held GPU-seconds include
start-up and checkpoints there, and the rank is looked at when a decision is made only.

The choice a reader would question: no promotion of starved jobs. The published results have none
(its factor is 0), and under finite workloads the lower queue drains.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from slurm_ext.domain.errors import SolverError
from slurm_ext.domain.plan import Decision, Plan, Term
from slurm_ext.domain.policy import View
from slurm_ext.policy.preemptive import (
    Contender,
    arrange,
    by_count,
    contenders,
    leave_the_rest,
    total_gpus,
    write,
)
from slurm_ext.policy.queue import fields

QUEUE_LIMITS_GPU_S = (4 * 3600.0,)


class TiresiasPolicy:
    """See the module. ``limits_gpu_s`` ascend; a job is in the queue after the limits it passed.

    Without ``spare`` a job that comes too late is stopped also where its GPUs then stay idle
    because what should start finds no seat on them, as in the published results.
    """

    name = "tiresias"
    preemptive = True

    def __init__(
        self, limits_gpu_s: Sequence[float] = QUEUE_LIMITS_GPU_S, *, spare: bool = True
    ) -> None:
        if any(low >= high for low, high in itertools.pairwise(limits_gpu_s)):
            raise SolverError(f"queue limits {tuple(limits_gpu_s)} do not ascend; sort them")
        self.limits_gpu_s = tuple(limits_gpu_s)
        self.spare = spare

    def __call__(self, view: View, now: float) -> Plan:
        decisions: dict[str, Decision] = {}
        for part in fields(view):
            everyone = contenders(view, part, now)
            ranked = sorted(everyone, key=self._rank)
            wanted, rest = by_count(ranked, total_gpus(part, everyone))
            done = arrange(view, part, wanted, rest, spare=self.spare)
            words = {item.key: self._words(item) for item in ranked}
            write(decisions, ranked, wanted, done, words)
        leave_the_rest(view, decisions)
        return Plan(self.name, now, decisions)

    def queue_of(self, attained_gpu_s: float) -> int:
        """Number of limits that are reached: 0 is the first queue."""
        return bisect.bisect_right(self.limits_gpu_s, attained_gpu_s)

    def _rank(self, item: Contender) -> tuple[int, float, int, str]:
        queue = self.queue_of(item.fact.attained_gpu_s)
        return (queue, item.fact.waiting_since_s, item.job.base_id, item.key)

    def _words(self, item: Contender) -> tuple[str, Term]:
        attained = item.fact.attained_gpu_s
        return (
            f"queue {self.queue_of(attained) + 1}, then the first submission",
            Term("attained service", attained, f"has held {attained:.0f} GPU-seconds so far"),
        )

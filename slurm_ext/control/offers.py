"""Whether a job may run in another shape now: the time limit it would get, and what forbids it.

Asked twice, so that the two cannot disagree: when counts are offered to the policy (a GPU that is
planned for a size which is refused later stays idle), and once more when a start is carried out,
since the queue has moved on. The submitted size with the submitted limit is never refused here.
"""

from __future__ import annotations

from slurm_ext.control.growth import GrowthGuard
from slurm_ext.control.limits import Usage
from slurm_ext.control.pools import PoolIndex
from slurm_ext.control.shapes import LimitChoice, scaled_limit
from slurm_ext.control.submitted import Frame
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.job import Job, Shape
from slurm_ext.domain.journal import LedgerEntry


class Offers:
    """The rules for one snapshot."""

    def __init__(self, index: PoolIndex, growth: GrowthGuard, usage: Usage) -> None:
        self._index = index
        self._growth = growth
        self._usage = usage

    def limit(
        self,
        job: Job,
        entry: LedgerEntry,
        frame: Frame,
        shape: Shape,
        remaining: Estimate | None,
        at_submitted: Estimate | None,
    ) -> LimitChoice:
        """The time limit to write with this shape (``None`` leaves it), or why not this shape."""
        if shape.gpus == frame.gpus:
            back = entry.written_limit_s is not None
            choice = LimitChoice(entry.submitted_limit_s if back else None)
        else:
            longest_s = self._usage.longest_s(job)
            choice = scaled_limit(entry.submitted_limit_s, remaining, at_submitted, longest_s)
        if choice.refusal:
            return choice
        limit_s = choice.limit_s
        if limit_s is not None and (name := self._index.reaches_into(job, limit_s)):
            return LimitChoice(
                None,
                f"its time limit of {limit_s / 60:.0f} min would reach into reservation {name}",
            )
        delays = self._growth.refusal(job, shape, limit_s, frame.shape, entry.submitted_limit_s)
        return LimitChoice(None, delays) if delays else choice

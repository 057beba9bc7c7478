"""Watches jobs run and tells, when they end, how long they took against what was declared.

Seen from the queue alone: a job that ran in the last cycle and is gone in this one has ended. That
it failed is not seen; since habits never shorten an estimate, a job that died early does no harm.
A job that was requeued has not ended. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.estimate.history import Declared, PastRun

# Shorter runs end in start-up errors, and one cycle's error would be most of them.
MIN_RUN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Running:
    user: str
    start_s: float
    limit_s: float | None
    expected_s: float | None
    attempt: int


class RunWatch:
    """Remembers what runs between two cycles."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def watch(
        self, snapshot: Snapshot, expected_s: Mapping[str, float], now: float
    ) -> list[PastRun]:
        """Runs that ended since the last call.

        ``expected_s`` is, for jobs that are seen running for the first time, the run time that
        was expected at their start from declared work; jobs without it are known by limit only.
        """
        present = {job.job_id: job for job in snapshot.jobs}
        ended: list[PastRun] = []
        for job_id, run in list(self._running.items()):
            job = present.get(job_id)
            if job is not None and job.running and job.restarts == run.attempt:
                continue
            del self._running[job_id]
            actual = now - run.start_s
            if job is not None or actual < MIN_RUN_S:
                continue
            if run.limit_s:
                ended.append(PastRun(run.user, run.limit_s, actual, Declared.LIMIT))
            if run.expected_s:
                ended.append(PastRun(run.user, run.expected_s, actual, Declared.WORK))
        for job in snapshot.running():
            if job.job_id not in self._running and job.start_s is not None:
                self._running[job.job_id] = _Running(
                    job.user,
                    job.start_s,
                    job.time_limit_s,
                    expected_s.get(job.job_id),
                    job.restarts,
                )
        return ended

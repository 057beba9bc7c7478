"""Counts what attempts cost: recovery, lost work, time for saves. For metrics only.

Every ended attempt counts once. Attempts that had ended when the daemon first looked belong to its
predecessor and are not counted again: counters of Prometheus begin at zero with the process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from slurm_ext.control.metrics import Metrics
from slurm_ext.control.observe import Observation
from slurm_ext.domain.attempt import Attempt, Attempts, Cause


def lost_gpu_s(attempt: Attempt) -> float:
    """GPU seconds of steps that no checkpoint held when the attempt ended.

    A step takes what the attempt's steps took on average. 0 where the record does not say enough;
    a job that came to its end has lost nothing.
    """
    if attempt.ended_s is None or attempt.cause is Cause.COMPLETED or attempt.last_step is None:
        return 0.0
    begun = attempt.restored_step or 0
    kept = max(attempt.saved_step or 0, begun)
    steps = attempt.last_step - begun
    if steps <= 0 or attempt.last_step <= kept:
        return 0.0
    since = attempt.first_step_s if attempt.first_step_s is not None else attempt.started_s
    step_s = max(0.0, attempt.ended_s - since) / steps
    return (attempt.last_step - kept) * step_s * attempt.gpus


def recovery_s(before: Attempt, after: Attempt) -> float | None:
    """From the end of an attempt to the first step of the next one; ``None`` where unknown."""
    if before.ended_s is None or after.first_step_s is None or after.number != before.number + 1:
        return None
    return max(0.0, after.first_step_s - before.ended_s)


def checkpoint_share(seen: Observation) -> float | None:
    """Share of running attempts' GPU time that stood still for saves; ``None`` if none tells."""
    spent = stalled = 0.0
    for job in seen.snapshot.running():
        report = seen.sources.progress.get(job.job_id)
        if report is None or job.start_s is None or report.attempt != job.restarts:
            continue
        if report.stall_s is None or report.at_s <= job.start_s:
            continue
        run_s = report.at_s - job.start_s
        spent += job.gpus * run_s
        stalled += job.gpus * min(report.stall_s, run_s)
    return stalled / spent if spent else None


class AttemptTally:
    """Remembers which attempts were counted."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counted: dict[str, frozenset[tuple[str, int]]] | None = None

    def notice(self, attempts: Mapping[str, Attempts]) -> None:
        """Count what is new in these records; a job that is absent for a while is still known."""
        first = self._counted is None
        known = self._counted or {}
        self._counted = dict(known)
        for job_id, record in attempts.items():
            before = known.get(job_id, frozenset())
            now = frozenset(self._events(record))
            self._counted[job_id] = before | now
            if not first:
                for kind, number in sorted(now - before):
                    self._count(record, kind, number)

    def forget(self, base_ids: Collection[int]) -> None:
        """These jobs and arrays are gone for good, and their numbers are used again some day."""
        for job_id in list(self._counted or ()):
            if self._counted and int(job_id.partition("_")[0]) in base_ids:
                del self._counted[job_id]

    @staticmethod
    def _events(record: Attempts) -> list[tuple[str, int]]:
        ended = [("ended", a.number) for a in record.attempts if a.ended_s is not None]
        pairs = zip(record.attempts, record.attempts[1:], strict=False)
        back = [("back", b.number) for a, b in pairs if recovery_s(a, b) is not None]
        return ended + back

    def _count(self, record: Attempts, kind: str, number: int) -> None:
        place = next(i for i, a in enumerate(record.attempts) if a.number == number)
        attempt = record.attempts[place]
        if kind == "back":
            took_s = recovery_s(record.attempts[place - 1], attempt)
            if took_s is not None:
                self._metrics.recovery_seconds.observe(took_s)
            return
        cause = (attempt.cause or Cause.UNKNOWN).value
        self._metrics.lost_gpu_seconds.labels(cause).inc(lost_gpu_s(attempt))
        run_s = max(0.0, (attempt.ended_s or attempt.started_s) - attempt.started_s)
        self._metrics.attempt_gpu_seconds.inc(run_s * attempt.gpus)
        self._metrics.checkpoint_gpu_seconds.inc(min(attempt.stall_s, run_s) * attempt.gpus)

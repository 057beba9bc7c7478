"""Slurm's own record of a job, read from one line of ``scontrol show job -o``. No I/O here.

Text and not JSON: the line has the same fields in every release that we support. While a job is
completing, the text hides whether it was cancelled, timed out or was preempted (JobState is
COMPLETING); Reason and PreemptTime still tell (seen on 24.11).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from slurm_ext.domain.errors import ProtocolError

# The name comes first and may hold anything, also what looks like other fields.
_NAME = re.compile(r"JobName=.*? (?=UserId=\S+\(\d+\) GroupId=)", re.DOTALL)
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/&]*)=(\S*)")
_NO_TIME = frozenset({"", "Unknown", "None", "N/A", "(null)"})
_RUNNING = frozenset({"RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "CONFIGURING", "STOPPED"})


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What matters of the record. Times are seconds since the epoch.

    ``job_id`` is the raw id of the job (also for a task of an array). ``end_s`` is when the time
    limit ends it, or when it ended; ``preempt_s`` is when it was last preempted. ``own_requeues``
    is how often Slurm itself brought it back because it had ended within a preemption's grace.
    ``array_task`` is ``123_4`` for a task of an array, empty for any other job.
    """

    job_id: int
    state: str
    reason: str
    restarts: int
    batch: bool
    requeue: bool
    partition: str = ""
    start_s: float | None = None
    end_s: float | None = None
    preempt_s: float | None = None
    own_requeues: int = 0
    array_task: str = ""

    @property
    def running(self) -> bool:
        """Whether Slurm still means the job to run."""
        return self.state in _RUNNING

    @property
    def held(self) -> bool:
        """Whether it will not start before somebody releases it."""
        return "held" in self.reason.lower()

    @property
    def preempted(self) -> bool:
        """Whether this attempt was preempted."""
        return self.preempt_s is not None and self.preempt_s >= (self.start_s or 0.0)


def fields(line: str) -> dict[str, str]:
    """Words ``Key=value`` of a line of scontrol; the first of each key counts."""
    found: dict[str, str] = {}
    for key, value in _FIELD.findall(_NAME.sub("", line)):
        found.setdefault(key, value)
    return found


def parse_record(text: str, job_id: int) -> JobRecord:
    """The record of one job. Raises ProtocolError where it is not in the answer."""
    for line in text.splitlines():
        words = fields(line)
        if words.get("JobId") == str(job_id):
            break
    else:
        raise ProtocolError(f"scontrol show job: no record of job {job_id} in {text[:200]!r}")
    try:
        return JobRecord(
            job_id=job_id,
            state=words["JobState"],
            reason=words.get("Reason", "None"),
            restarts=int(words.get("Restarts", "0")),
            batch=words["BatchFlag"] != "0",
            requeue=words["Requeue"] != "0",
            partition=words.get("Partition", ""),
            start_s=_epoch(words.get("StartTime", "")),
            end_s=_epoch(words.get("EndTime", "")),
            preempt_s=_epoch(words.get("PreemptTime", "")),
            # 1 is a batch job; each such requeue adds one (seen on 24.11).
            own_requeues=max(0, int(words["BatchFlag"]) - 1),
            array_task=_array_task(words),
        )
    except (KeyError, ValueError) as exc:
        raise ProtocolError(f"scontrol show job {job_id}: {exc} in {text[:200]!r}") from exc


def _array_task(words: dict[str, str]) -> str:
    array, task = words.get("ArrayJobId", ""), words.get("ArrayTaskId", "")
    return f"{array}_{task}" if array.isdigit() and task.isdigit() else ""


def _epoch(text: str) -> float | None:
    """A time as scontrol prints it with SLURM_TIME_FORMAT=standard, in the local time zone."""
    if text in _NO_TIME:
        return None
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))

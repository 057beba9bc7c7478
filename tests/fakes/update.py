"""What ``scontrol update JobId=...`` does to a job of the in-memory Slurm.

It keeps Slurm's unpleasant sides, because the product has to survive them (each seen on 24.11.5):
fields of one update are written one after the other and stay where a later one fails; ``NumNodes=``
and ``NodeList=`` on a running job shrink it and kill ranks, unless the same update changes
``NumTasks=`` or ``TresPerNode=``, which refuses it whole; ``NumTasks=`` sets the number of CPUs to
that of the tasks; an array takes neither ``NumNodes=`` nor ``NodeList=``.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slurm_ext.domain.job import JobState
from slurm_ext.domain.nodelist import expand
from tests.fakes.model import FakeJob, tres_gpus

if TYPE_CHECKING:
    from tests.fakes.slurm import FakeSlurm

NOT_PENDING = "Job is no longer pending execution"
SIZE_KEYWORDS = frozenset(
    {
        "numnodes",
        "numtasks",
        "numcpus",
        "nodelist",
        "reqnodelist",
        "tresperjob",
        "trespernode",
        "trespertask",
    }
)
MAX_SITE_FACTOR = 2**31 - 4
_UNITS = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}


class UpdateRefusedError(Exception):
    """Slurm's answer to one field."""


def start_time(text: str, now: float) -> float:
    """``now``, ``now+300``, ``now+5minutes``, ``uts1700000000`` or an ISO time (as UTC)."""
    word = text.strip().lower()
    if word == "now":
        return now
    if match := re.fullmatch(r"now\+(\d+)\s*([a-z]*)", word):
        unit = match[2].rstrip("s")
        if unit not in _UNITS:
            raise UpdateRefusedError("Invalid time specification")
        return now + int(match[1]) * _UNITS[unit]
    if match := re.fullmatch(r"uts(\d+)", word):
        return float(match[1])
    try:
        return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()
    except ValueError as exc:
        raise UpdateRefusedError("Invalid time specification") from exc


def limit_s(text: str, present: float | None) -> float | None:
    """``minutes``, ``D-HH[:MM[:SS]]``, ``HH:MM:SS``, ``MM:SS``, ``+=MIN``, ``UNLIMITED``."""
    if text.upper() in {"UNLIMITED", "INFINITE", "-1"}:
        return None
    if text[:2] in {"+=", "-="}:
        by = float(text[2:]) * 60
        return (present or 0.0) + (by if text[0] == "+" else -by)
    days, _, rest = text.rpartition("-")
    parts = [int(p) for p in rest.split(":")]
    if days:
        h, m, s = [*parts, 0, 0][:3]
        return int(days) * 86400 + h * 3600 + m * 60 + s
    if len(parts) == 1:
        return parts[0] * 60
    if len(parts) == 2:
        return -(-(parts[0] * 60 + parts[1]) // 60) * 60
    return -(-(parts[0] * 3600 + parts[1] * 60 + parts[2]) // 60) * 60


def refuse_whole(job: FakeJob, fields: Sequence[tuple[str, str]]) -> None:
    """Raise UpdateRefusedError where Slurm refuses the update before it writes any field."""
    keys = {keyword.lower(): value for keyword, value in fields}
    if job.state not in {JobState.PENDING, JobState.RUNNING}:
        raise UpdateRefusedError("Job/step already completing or completed")
    if job.state is JobState.RUNNING:
        changes = (keys.get("numtasks", str(job.ntasks)) != str(job.ntasks)) or (
            tres_gpus(keys.get("trespernode", job.tres_per_node)) != tres_gpus(job.tres_per_node)
        )
        if changes:
            raise UpdateRefusedError(NOT_PENDING)
    elif job.array_id is not None and keys.keys() & {"numnodes", "nodelist", "reqnodelist"}:
        raise UpdateRefusedError(f"Invalid job ID {job.job_id}")


def update_field(slurm: FakeSlurm, job: FakeJob, keyword: str, value: str) -> None:
    """Write one field. Raises UpdateRefusedError with Slurm's words."""
    key = keyword.lower()
    running = job.state is JobState.RUNNING
    if running and key in SIZE_KEYWORDS:
        if key in {"numnodes", "nodelist", "reqnodelist"}:
            if slurm.disable_job_shrink:
                raise UpdateRefusedError("Requested operation not supported on this system")
            slurm.shrink(job, key, value)
        return
    if key == "sitefactor":
        number = int(value)
        if abs(number) > MAX_SITE_FACTOR:
            raise UpdateRefusedError("Invalid SiteFactor")
        job.site_factor = number
    elif key == "starttime":
        if running:
            raise UpdateRefusedError(NOT_PENDING)
        job.begin_s = max(slurm.now, start_time(value, slurm.now))
        job.expected_s = None
    elif key == "timelimit":
        if running:
            slurm.late_limit_writes.append((job.job_id, value))
        job.time_limit_s = limit_s(value, job.time_limit_s)
        if running:
            slurm.plan_end(job)
    elif key == "numnodes":
        low, _, high = value.partition("-")
        job.nodes = int(low)
        job.max_nodes = (int(high) or None) if high else int(low)
    elif key == "numtasks":
        job.ntasks = job.min_cpus = int(value)
    elif key == "numcpus":
        job.min_cpus = int(value)
    elif key == "cpuspertask":
        job.cpus_per_task = int(value)
        job.min_cpus = None
    elif key in {"minmemorynode", "minmemorycpu"}:
        job.memory[key] = int(value.rstrip("MmBb"))
    elif key in {"trespernode", "trespertask", "tresperjob"}:
        if value and not tres_gpus(value):
            raise UpdateRefusedError("Invalid Trackable RESource (TRES) specification")
        name = {"trespernode": "tres_per_node", "trespertask": "tres_per_task"}.get(
            key, "tres_per_job"
        )
        setattr(job, name, value)
    elif key in {"reqnodelist", "nodelist"}:
        names = expand(value)
        unknown = [n for n in names if n not in slurm.nodes]
        if unknown:
            raise UpdateRefusedError("Invalid node name specified")
        job.req_nodes = names
    elif key == "excnodelist":
        job.exc_nodes = expand(value)
    elif key == "nice":
        job.nice = int(value)
    elif key == "priority":
        if job.held:
            raise UpdateRefusedError("Job is in held state, pending scheduler release")
        job.set_priority = int(value)
        job.nice = 0
    elif key == "features":
        job.features = value
    elif key == "comment":
        job.comment = value
    elif key == "admincomment":
        if not slurm.administrator:
            raise UpdateRefusedError("Access/permission denied")
        job.admin_comment = value
    else:
        raise UpdateRefusedError(f"Update of this parameter is not supported: {keyword}={value}")

"""Rows of ``squeue -O`` to jobs.

Every column that this module asks for is made by Slurm or checked by it, except the account, which
is last. Rows are cached by their text: in a quiet queue nearly every row is as it was, and costs
one dictionary look-up. ``site_factor`` is not in squeue; the caller puts it in from sprio.

GPUs are read from the requested and allocated TRES (``gres/gpu``), never from one request option
alone: a job may have used any of ``--gres``, ``--gpus``, ``--gpus-per-node``, ``--gpus-per-task``.
The node count of a pending job comes from the same text, because squeue's own column holds the
scheduler's last estimate once it has looked at the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.nodelist import expand
from slurm_ext.domain.tres import parse_gpu_request, parse_tres
from slurm_ext.domain.walltime import parse_slurm_limit
from slurm_ext.slurm.arrays import exact_id
from slurm_ext.slurm.rows import SEPARATOR, RowFormat
from slurm_ext.slurm.state import ended, job_state

SOURCE = "squeue"
# What changes while a job waits comes first; the rest of a row is the same for hours.
_CHANGING = (
    "JobID",
    "State",
    "Reason",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "PriorityLong",
)
_LASTING = (
    "JobArrayID",
    "UserName",
    "UserID",
    "Partition",
    "QOS",
    "SubmitTime",
    "TimeLimit",
    "Nice",
    "NumNodes",
    "NumTasks",
    "NumCPUs",
    "tres-per-job",
    "tres-per-node",
    "tres-per-task",
    "tres-per-socket",
    "tres-alloc",
    "ReqNodes",
    "ExcNodes",
    "NodeList",
    "Feature",
    "Licenses",
    "Dependency",
    "Reservation",
    "OverSubscribe",
    "HetJobID",
    "RestartCnt",
    "BatchFlag",
    "Account",
)
COLUMNS = (*_CHANGING, *_LASTING)
# Whether a job wants whole nodes stands in one of two columns. Slurm 24.11 has the first alone, and
# says NO there of such a job; 26.05 has both, and there the first says NO of nearly every job.
_SHARES, _EXCLUSIVE = "OverSubscribe", "Exclusive"
_SHARES_AT = COLUMNS.index(_SHARES)
_NONE = frozenset({"", "(null)", "N/A", "None", "NONE", "n/a"})
_NO_LIMIT = frozenset({"PARTITION_LIMIT", "PARTITION LIMIT", "NONE"})
_SHARING = frozenset({"OK", "YES"})
_NOT_EXCLUSIVE = frozenset({"NO", *(word.upper() for word in _NONE)})
HELD_STATES = frozenset({JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT})
# Slurm zeroes the priority of such a job, but no person holds it: it waits for a new look.
NOT_A_HOLD = frozenset({"BadConstraints"})
MAX_CACHE = 200_000


def columns(known: str) -> tuple[str, ...]:
    """The columns to ask for, by the names that this squeue knows (``squeue --helpFormat``)."""
    names = {name.lower() for name in known.split()}
    own = _EXCLUSIVE if _EXCLUSIVE.lower() in names else _SHARES
    return tuple(own if name == _SHARES else name for name in COLUMNS)


def wants_whole_nodes(column: str, word: str) -> bool:
    """Whether the job shares its nodes with no other, by the word in its column."""
    return word.upper() not in (_NOT_EXCLUSIVE if column == _EXCLUSIVE else _SHARING)


def text_or_empty(text: str) -> str:
    """The text, empty where Slurm wrote one of its words for "none"."""
    return "" if text in _NONE else text


def epoch(text: str) -> float | None:
    """Epoch seconds; ``None`` for N/A, NONE, Unknown and 0 (Slurm's "not set")."""
    return float(text) if text.isdigit() and text != "0" else None


def _limit_s(text: str) -> float | None:
    return None if text.upper() in _NO_LIMIT else parse_slurm_limit(text)


@dataclass(frozen=True, slots=True)
class _Lasting:
    """Fields of Job that the lasting part of a row says."""

    fields: Mapping[str, Any]


class JobParser:
    """Parses rows, and remembers them between calls (see ``forget``).

    Two memories: a row that is as it was costs one look-up; of a row in which only priority, times,
    state or reason have changed (every PriorityCalcPeriod that is all of them) the larger part need
    not be read again.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Job | None] = {}
        self._lasting: dict[str, _Lasting] = {}
        self.rows = 0
        """Rows asked for, parsed before or not."""
        self.parsed = 0
        """Rows that had to be parsed."""

    @property
    def size(self) -> int:
        """Number of remembered rows."""
        return len(self._rows)

    def forget(self, rows: list[str]) -> None:
        """Drop rows that the last complete answer did not have, once the memory has grown large."""
        if len(self._rows) > min(MAX_CACHE, 4 * len(rows) + 1000):
            kept = self._rows
            self._rows = {row: kept[row] for row in rows if row in kept}
            self._lasting.clear()

    def parse(self, rows: list[str], form: RowFormat) -> list[Job]:
        """Jobs in the order of the rows, without those that have ended.

        Raises SourceMissingError naming the row that cannot be read.
        """
        cache = self._rows
        for row in rows:
            if row not in cache:
                cache[row] = self._parse(row, form)
                self.parsed += 1
        self.rows += len(rows)
        return [job for row in rows if (job := cache[row]) is not None]

    def _parse(self, row: str, form: RowFormat) -> Job | None:
        """One job, or ``None`` where it has ended."""
        try:
            *changing, rest = row.split(SEPARATOR, len(_CHANGING))
            if len(changing) != len(_CHANGING):
                raise ValueError("columns are missing")
            state = job_state(changing[1])
            if ended(state):
                form.fields(row, SOURCE)
                return None
            lasting = self._lasting.get(rest)
            if lasting is None:
                fields = form.fields(row, SOURCE)
                alone = wants_whole_nodes(form.columns[_SHARES_AT], fields[_SHARES_AT])
                lasting = _lasting(*fields[len(_CHANGING) :], exclusive=alone)
                self._lasting[rest] = lasting
            return _job(lasting, state, *changing)
        except (DataError, ValueError) as exc:
            raise SourceMissingError(
                SOURCE, f"the row {row[:120]!r} cannot be read: {exc}"
            ) from exc


def _job(
    lasting: _Lasting,
    state: JobState,
    raw_id: str,
    _state_text: str,
    reason: str,
    eligible: str,
    start: str,
    end: str,
    priority: str,
) -> Job:
    pending = state is JobState.PENDING
    value = int(priority)
    eligible_s = epoch(eligible)
    held_by_user = reason == "JobHeldUser"
    return Job(
        **lasting.fields,
        raw_id=int(raw_id),
        state=state,
        reason=text_or_empty(reason),
        eligible_s=eligible_s,
        start_s=epoch(start),
        end_s=epoch(end),
        priority=value,
        eligible=pending and eligible_s is not None and value > 0,
        held_by_user=held_by_user,
        held_by_admin=state in HELD_STATES
        or (pending and not held_by_user and value == 0 and reason not in NOT_A_HOLD),
    )


def _lasting(
    squeue_id: str,
    user: str,
    uid: str,
    partitions: str,
    qos: str,
    submit: str,
    limit: str,
    nice: str,
    num_nodes: str,
    num_tasks: str,
    num_cpus: str,
    tres_per_job: str,
    tres_per_node: str,
    tres_per_task: str,
    tres_per_socket: str,
    tres_text: str,
    req_nodes: str,
    exc_nodes: str,
    node_list: str,
    features: str,
    licenses: str,
    dependency: str,
    reservation: str,
    _sharing: str,
    het_job_id: str,
    restarts: str,
    batch: str,
    account: str,
    *,
    exclusive: bool,
) -> _Lasting:
    job_id, tasks = exact_id(squeue_id)
    base = re.match(r"\d+", job_id)
    if base is None:
        raise ValueError(f"job id {job_id!r} does not begin with a number")
    submit_s = epoch(submit)
    if submit_s is None:
        raise ValueError(f"submit time {submit!r}")
    tres = parse_tres(tres_text)
    texts = (tres_per_job, tres_per_node, tres_per_task, tres_per_socket)
    requests = [parse_gpu_request(text) for text in texts]
    nodes = tres.nodes or _count(num_nodes)
    ntasks = _count(num_tasks)
    types = {kind for part in (tres, *requests) for kind in part.gpu_types}
    return _Lasting(
        {
            "job_id": job_id,
            "base_id": int(base[0]),
            "user": user,
            "uid": int(uid),
            "account": text_or_empty(account),
            "partitions": tuple(p for p in partitions.split(",") if p),
            "qos": text_or_empty(qos),
            "submit_s": submit_s,
            "time_limit_s": _limit_s(limit),
            "nice": int(nice),
            "gpus": requested_gpus(tres.gpus, [r.gpus for r in requests], nodes, ntasks),
            "gpu_type": next(iter(types)) if len(types) == 1 else "",
            "nodes": nodes,
            "ntasks": ntasks,
            "cpus": tres.cpus or _count(num_cpus),
            "memory_mib": tres.memory_mib,
            "tres_per_job": text_or_empty(tres_per_job),
            "tres_per_node": text_or_empty(tres_per_node),
            "tres_per_task": text_or_empty(tres_per_task),
            "req_nodes": expand(req_nodes),
            "exc_nodes": expand(exc_nodes),
            "node_names": expand(node_list),
            "features": text_or_empty(features),
            "licenses": text_or_empty(licenses),
            "dependency": text_or_empty(dependency),
            "reservation": text_or_empty(reservation),
            "exclusive": exclusive,
            "array": "_" in job_id,
            "array_tasks": tasks,
            "het_job_id": int(het_job_id) if het_job_id.isdigit() and het_job_id != "0" else None,
            "restarts": int(restarts) if restarts.isdigit() else 0,
            "batch": batch != "0",
        }
    )


def _count(text: str) -> int:
    """A count, its lower end where a range is given (``2-4``); Slurm's "not set" counts as 1."""
    match = re.match(r"\d+", text)
    return max(1, int(match[0])) if match else 1


def requested_gpus(total: int | None, parts: Sequence[int | None], nodes: int, ntasks: int) -> int:
    """GPUs of a job: from its TRES, else from its requests per job, node, task and socket.

    TRES know GPUs only where the site lists gres/gpu in AccountingStorageTRES. Sockets are not
    counted, so that a request per socket gives at least this many.
    """
    if total is not None:
        return total
    per_job, per_node, per_task, per_socket = parts
    if per_job is not None:
        return per_job
    if per_node is not None:
        return per_node * nodes
    if per_task is not None:
        return per_task * ntasks
    return (per_socket or 0) * nodes


def eligible_at(job: Job, now_s: float) -> bool:
    """Whether the job waits for nothing but its turn: a lease ends without a change of its row."""
    return job.eligible and job.eligible_s is not None and job.eligible_s <= now_s


def observed(job: Job, eligible: bool, site_factor: int, priority_set: bool) -> Job:
    """The job with what its row alone cannot tell: the time, and the two facts that sprio knows."""
    if (eligible, site_factor, priority_set) == (job.eligible, job.site_factor, job.priority_set):
        return job
    return replace(job, eligible=eligible, site_factor=site_factor, priority_set=priority_set)

"""JSON of ``squeue --json`` and slurmrestd to jobs and nodes, whatever its age.

Read: the bare form of 21.08 and 22.05 (plain numbers, ``job_state`` a word) and data_parser v0.0.39
to v0.0.44 (``{set, infinite, number}``, lists of states). v0.0.45 tells of no job whether it wants
whole nodes (``shared`` is empty for all of them on 26.05.5), so it is refused. Used for details of
single jobs and by slurmrestd; the cycle reads text columns, which cost a thirtieth. No version has
``site_factor``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_ext.domain.errors import DataError, SourceMissingError
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.nodelist import expand
from slurm_ext.domain.tres import parse_gpu_request, parse_tres
from slurm_ext.slurm.arrays import exact_id
from slurm_ext.slurm.parse_jobs import HELD_STATES, NOT_A_HOLD, requested_gpus
from slurm_ext.slurm.state import ended, job_state

# First the one that all of 24.11 to 26.05 know, then later ones, for releases that have dropped it;
# then the one of 23.11, and what 22.05 knows. 26.05 has v0.0.42 to v0.0.45.
DATA_PARSERS = ("v0.0.42", "v0.0.43", "v0.0.44", "v0.0.40", "")
_FIRST_SILENT = 45
_NEVER_S = float(1 << 32)
_PARSER = re.compile(r"v0\.0\.(\d+)", re.ASCII)
_SHARED_ANYWAY = frozenset({"oversubscribe", "true", "yes"})


def number(value: object) -> float | None:
    """A number in any of its shapes; ``None`` where it is not set or infinite."""
    if isinstance(value, Mapping):
        if value.get("infinite") or value.get("set") is False:
            return None
        return number(value.get("number"))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def whole(value: object, default: int = 0) -> int:
    """A whole number, or the default where there is none."""
    found = number(value)
    return default if found is None else int(found)


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed answer: release and data_parser that wrote it, and its list of things."""

    release: str
    items: tuple[Mapping[str, Any], ...]
    parser: str = ""


def parse_document(text: str, key: str, source: str) -> Document:
    """The list ``key`` of an answer.

    Raises SourceMissingError where the text is not JSON, reports errors, or has no such list.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise SourceMissingError(source, f"the answer is not JSON, cut off? ({exc})") from exc
    if not isinstance(raw, dict):
        raise SourceMissingError(source, "the answer is not a JSON object")
    errors = raw.get("errors")
    if errors:
        raise SourceMissingError(source, f"it reports {json.dumps(errors)[:300]}")
    items = raw.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise SourceMissingError(source, f"it has no list of {key}")
    meta = raw.get("meta") or {}
    slurm = meta.get("slurm") or meta.get("Slurm") or {}
    plugin = meta.get("plugin") or {}
    parser = str(plugin.get("data_parser", "")).removeprefix("data_parser/")
    return Document(str(slurm.get("release", "")), tuple(items), parser)


def jobs_from_json(text: str, source: str = "squeue --json") -> tuple[Job, ...]:
    """Jobs that wait or hold resources.

    Raises SourceMissingError as ``parse_document`` does, and where a data_parser wrote them that
    leaves out what is asked of a job here.
    """
    document = parse_document(text, "jobs", source)
    known = _PARSER.match(document.parser)
    if known and int(known[1]) >= _FIRST_SILENT:
        raise SourceMissingError(
            source,
            f"data_parser {document.parser} does not tell which jobs want whole nodes; ask for"
            f" {' or '.join(name for name in DATA_PARSERS if name)}",
        )
    jobs = []
    for item in document.items:
        try:
            job = job_from_json(item)
        except (DataError, KeyError, TypeError, ValueError) as exc:
            raise SourceMissingError(
                source, f"job {item.get('job_id')!r} cannot be read: {exc!r}"
            ) from exc
        if not ended(job.state):
            jobs.append(job)
    return tuple(jobs)


def job_from_json(item: Mapping[str, Any]) -> Job:
    """One job, in whatever state."""
    state = job_state(item["job_state"])
    pending = state is JobState.PENDING
    job_id, base, tasks = _ids(item)
    alloc, asked = (
        parse_tres(_text(item, "tres_alloc_str")),
        parse_tres(_text(item, "tres_req_str")),
    )
    tres = alloc if not pending and _text(item, "tres_alloc_str") else asked
    per = [_text(item, f"tres_per_{what}") for what in ("job", "node", "task", "socket")]
    requests = [parse_gpu_request(text) for text in per]
    nodes = tres.nodes or max(1, whole(item.get("node_count"), 1))
    ntasks = max(1, whole(item.get("tasks"), 1))
    held = [parse_gpu_request(str(text)) for text in item.get("gres_detail") or ()]
    total = tres.gpus
    if total is None and held:
        total = sum(part.gpus or 0 for part in held)
    types = {
        kind for part in (tres, *requests, *held) for kind, count in part.gpu_types.items() if count
    }
    reason = _text(item, "state_reason")
    priority = whole(item.get("priority"))
    eligible_s = _moment(item.get("eligible_time"))
    limit = number(item.get("time_limit"))
    held_by_user = reason == "JobHeldUser"
    het = whole(item.get("het_job_id"))
    return Job(
        job_id=job_id,
        base_id=base,
        raw_id=int(item["job_id"]),
        user=_text(item, "user_name"),
        uid=whole(item.get("user_id"), -1) if "user_id" in item else None,
        account=_text(item, "account"),
        partitions=tuple(p for p in _text(item, "partition").split(",") if p),
        qos=_text(item, "qos"),
        state=state,
        reason="" if reason == "None" else reason,
        submit_s=_moment(item.get("submit_time")) or 0.0,
        eligible_s=eligible_s,
        start_s=_moment(item.get("start_time")),
        end_s=_moment(item.get("end_time")),
        time_limit_s=None if limit is None else limit * 60,
        priority=priority,
        nice=whole(item.get("nice")),
        eligible=pending and eligible_s is not None and priority > 0,
        gpus=requested_gpus(total, [r.gpus for r in requests], nodes, ntasks),
        gpu_type=next(iter(types)) if len(types) == 1 else "",
        nodes=nodes,
        ntasks=ntasks,
        cpus=tres.cpus or max(1, whole(item.get("cpus"), 1)),
        memory_mib=tres.memory_mib,
        tres_per_job=per[0],
        tres_per_node=per[1],
        tres_per_task=per[2],
        req_nodes=expand(_text(item, "required_nodes")),
        exc_nodes=expand(_text(item, "excluded_nodes")),
        node_names=() if pending else expand(_text(item, "nodes")),
        features=_text(item, "features"),
        licenses=_text(item, "licenses"),
        dependency=_text(item, "dependency"),
        reservation=_text(item, "resv_name"),
        exclusive=_exclusive(item),
        array="_" in job_id,
        array_tasks=tasks,
        het_job_id=het or None,
        restarts=whole(item.get("restart_cnt")),
        held_by_user=held_by_user,
        held_by_admin=state in HELD_STATES
        or (pending and not held_by_user and priority == 0 and reason not in NOT_A_HOLD),
        batch=bool(item.get("batch_flag", True)),
    )


def _text(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) and value not in {"(null)", "N/A"} else ""


def _moment(value: object) -> float | None:
    """Epoch seconds; Slurm writes 0 for a time that is not known.

    The end of a job without a time limit is its start and about 2^32 s (seen on 26.05.5).
    """
    found = number(value)
    return found if found and found < _NEVER_S else None


def _ids(item: Mapping[str, Any]) -> tuple[str, int, int]:
    """Id as scontrol takes it, number of its array, het job or own, and its tasks."""
    raw = int(item["job_id"])
    array = whole(item.get("array_job_id"))
    het = whole(item.get("het_job_id"))
    if array:
        pending_rest = _text(item, "array_task_string")
        if pending_rest:
            job_id, tasks = exact_id(f"{array}_[{pending_rest}]")
            return job_id, array, tasks
        task = number(item.get("array_task_id"))
        return (str(raw) if task is None else f"{array}_{int(task)}"), array, 1
    if het:
        return f"{het}+{whole(item.get('het_job_offset'))}", het, 1
    return str(raw), raw, 1


def _exclusive(item: Mapping[str, Any]) -> bool:
    """Whether the job wants whole nodes: ``shared`` is ["none"] or a word, by release."""
    shared = item.get("shared")
    words = [shared] if isinstance(shared, str) else list(shared or ())
    own = [str(word).lower() for word in (*words, *(item.get("exclusive") or ()))]
    return any(word not in _SHARED_ANYWAY or word == "true" for word in own if word) and bool(own)

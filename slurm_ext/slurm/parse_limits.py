"""``sacctmgr -nP show qos`` and ``show assoc`` to limits that we have to keep ourselves.

Once an Operator has changed a job's size, Slurm no longer checks most of these for it, and what it
still checks (GPUs) keeps a job of which we did not know it from starting. ``sacctmgr`` prints for
an association the limits per job that it inherits from its parents, but not their group limits:
those stand at ``assoc:PARENT``. What has been used of a budget of minutes is told by slurmctld
only (``scontrol show assoc_mgr``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.node import Limits
from slurm_ext.domain.tres import Tres, parse_tres
from slurm_ext.domain.walltime import parse_slurm_limit

QOS_COLUMNS = (
    "Name",
    "Flags",
    "MaxTRES",
    "GrpTRES",
    "MaxTRESPU",
    "MaxTRESPA",
    "MaxWall",
    "MinTRES",
    "MaxTRESMins",
    "GrpTRESRunMins",
    "GrpTRESMins",
)
ASSOC_COLUMNS = (
    "Account",
    "User",
    "Partition",
    "ParentName",
    "MaxTRES",
    "GrpTRES",
    "MaxWall",
    "MaxTRESMins",
    "GrpTRESRunMins",
    "GrpTRESMins",
)
# Flags of a QOS that let its jobs go past a limit of the partition, and the field that holds it.
_WAIVES = {
    "PartitionMaxNodes": "max_nodes",
    "PartitionMinNodes": "min_nodes",
    "PartitionTimeLimit": "max_time_s",
}
USAGE_COMMAND = ("scontrol", "-o", "show", "assoc_mgr", "flags=assoc,qos")
_RECORD = re.compile(
    r"^(?:ClusterName=\S* Account=(\S+) UserName=([^\s(]*)\S* |QOS=([^\s(]+)\(\d+\) )"
)
_GRP_MINUTES = re.compile(r" GrpTRESMins=(\S*)")
_USED = re.compile(r"(?:^|,)(cpu|gres/gpu)=[^,(]*\(([0-9.]+)\)")


def _rows(text: str, columns: tuple[str, ...], source: str) -> list[list[str]]:
    if text and not text.endswith("\n"):
        raise SourceMissingError(source, f"cut off in its last row {text[-60:]!r}")
    rows = [line.split("|") for line in text.splitlines()]
    for row in rows:
        if len(row) != len(columns):
            raise SourceMissingError(
                source, f"the row {'|'.join(row)[:80]!r} has {len(row)} of {len(columns)} columns"
            )
    return rows


def parse_qos(text: str) -> dict[str, Limits]:
    """Limits by ``qos:NAME``."""
    found: dict[str, Limits] = {}
    for name, flags, *rest in _rows(text, QOS_COLUMNS, "sacctmgr qos"):
        per_job, group, per_user, per_account, wall, least, job_mins, run_mins, mins = rest
        limits = _limits(
            f"qos {name}",
            per_job,
            group,
            wall,
            job_mins,
            run_mins,
            mins,
            per_user,
            per_account,
            least,
        )
        words = flags.split(",")
        found[f"qos:{name}"] = replace(
            limits,
            over_partition="OverPartQOS" in words,
            waives=frozenset(_WAIVES[word] for word in words if word in _WAIVES),
        )
    return found


def parse_associations(text: str) -> dict[str, Limits]:
    """Limits by ``assoc:ACCOUNT`` and ``assoc:ACCOUNT:USER``, each with the key of its parent.

    Associations of one partition only are passed over: a job's partition decides, and plans do
    not change it, but no limit of ours may be laxer, so the tighter value of each pair is kept.
    """
    found: dict[str, Limits] = {}
    for account, user, partition, parent, *rest in _rows(text, ASSOC_COLUMNS, "sacctmgr assoc"):
        key = f"assoc:{account}:{user}" if user else f"assoc:{account}"
        words = f"user {user} of account {account}" if user else f"account {account}"
        above = account if user else parent
        limits = replace(_limits(words, *rest), parent=f"assoc:{above}" if above else "")
        if partition:
            limits = replace(limits, exact=False)
        found[key] = _tighter(found[key], limits) if key in found else limits
    return found


def with_usage(limits: Mapping[str, Limits], text: str) -> dict[str, Limits]:
    """The limits with the minutes that have been used, from the answer to `USAGE_COMMAND`."""
    found = dict(limits)
    for line in text.splitlines():
        record, minutes = _RECORD.match(line), _GRP_MINUTES.search(line)
        if record is None or minutes is None:
            continue
        account, user, qos = record.groups()
        key = f"qos:{qos}" if qos else f"assoc:{account}:{user}" if user else f"assoc:{account}"
        known = found.get(key)
        if known is None:
            continue
        used = {name: int(float(value)) for name, value in _USED.findall(minutes[1])}
        found[key] = replace(
            known,
            used_gpu_minutes=max(known.used_gpu_minutes, used.get("gres/gpu", 0)),
            used_cpu_minutes=max(known.used_cpu_minutes, used.get("cpu", 0)),
        )
    return found


def has_budget(limits: Mapping[str, Limits]) -> bool:
    """Whether any of them bounds what may be used in total, so that usage has to be asked for."""
    return any(
        found.grp_gpu_minutes is not None or found.grp_cpu_minutes is not None
        for found in limits.values()
    )


def _limits(
    name: str,
    per_job: str,
    group: str,
    wall: str,
    job_minutes: str,
    run_minutes: str,
    minutes: str,
    per_user: str = "",
    per_account: str = "",
    least: str = "",
) -> Limits:
    texts = (per_job, group, job_minutes, run_minutes, minutes, per_user, per_account, least)
    try:
        job, grp, job_mins, run_mins, mins, user, account, low = map(parse_tres, texts)
        wall_s = parse_slurm_limit(wall)
    except ValueError as exc:
        raise SourceMissingError("sacctmgr", f"limits of {name} cannot be read: {exc}") from exc
    return Limits(
        name=name,
        max_gpus_per_job=_gpus(job),
        max_nodes_per_job=job.nodes,
        max_cpus_per_job=job.cpus,
        max_memory_mib_per_job=job.memory_mib,
        max_wall_s=wall_s,
        max_gpu_minutes_per_job=_gpus(job_mins),
        max_cpu_minutes_per_job=job_mins.cpus,
        grp_gpus=_gpus(grp),
        grp_nodes=grp.nodes,
        grp_cpus=grp.cpus,
        grp_memory_mib=grp.memory_mib,
        grp_gpu_run_minutes=_gpus(run_mins),
        grp_cpu_run_minutes=run_mins.cpus,
        grp_gpu_minutes=_gpus(mins),
        grp_cpu_minutes=mins.cpus,
        max_gpus_per_user=_gpus(user),
        max_nodes_per_user=user.nodes,
        max_cpus_per_user=user.cpus,
        max_memory_mib_per_user=user.memory_mib,
        max_gpus_per_account=_gpus(account),
        max_nodes_per_account=account.nodes,
        max_cpus_per_account=account.cpus,
        max_memory_mib_per_account=account.memory_mib,
        min_gpus_per_job=low.gpus,
        exact=not (job.gpu_types or job_mins.gpu_types),
    )


def _gpus(tres: Tres) -> int | None:
    """The tightest of a limit on all GPUs and of those on single types.

    Which type a job will get is not known for every job, so a limit on one type binds all.
    """
    present = [*tres.gpu_types.values(), *([] if tres.gpus is None else [tres.gpus])]
    return min(present) if present else None


def _tighter(one: Limits, other: Limits) -> Limits:
    """The tighter of each pair of limits."""
    changes: dict[str, float] = {}
    for field in fields(Limits):
        if not field.name.startswith(("max_", "grp_")):
            continue
        values = (getattr(one, field.name), getattr(other, field.name))
        present = [value for value in values if value is not None]
        if present:
            changes[field.name] = min(present)
    return replace(one, exact=False, **changes)  # type: ignore[arg-type]

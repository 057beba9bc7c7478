"""``sacctmgr -nP show qos`` and ``show assoc`` to limits that we have to keep ourselves.

Once an Operator has changed a job's size, Slurm no longer checks these for it. ``sacctmgr`` prints
for an association the limits per job that it inherits from its parents, but not their group limits:
those stand at ``assoc:PARENT``.
"""

from __future__ import annotations

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.domain.node import Limits
from slurm_ext.domain.walltime import parse_slurm_limit
from slurm_ext.slurm.tres import Tres, parse_tres

QOS_COLUMNS = ("Name", "MaxTRES", "GrpTRES", "MaxTRESPU", "MaxWall", "MinTRES")
ASSOC_COLUMNS = ("Account", "User", "Partition", "MaxTRES", "GrpTRES", "MaxWall")


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
    for name, per_job, group, per_user, wall, least in _rows(text, QOS_COLUMNS, "sacctmgr qos"):
        found[f"qos:{name}"] = _limits(f"qos {name}", per_job, group, wall, per_user, least)
    return found


def parse_associations(text: str) -> dict[str, Limits]:
    """Limits by ``assoc:ACCOUNT`` and ``assoc:ACCOUNT:USER``.

    Associations of one partition only are passed over: a job's partition decides, and plans do
    not change it, but no limit of ours may be laxer, so the tighter value of each pair is kept.
    """
    found: dict[str, Limits] = {}
    for account, user, _partition, per_job, group, wall in _rows(
        text, ASSOC_COLUMNS, "sacctmgr assoc"
    ):
        key = f"assoc:{account}:{user}" if user else f"assoc:{account}"
        words = f"user {user} of account {account}" if user else f"account {account}"
        limits = _limits(words, per_job, group, wall)
        found[key] = _tighter(found[key], limits) if key in found else limits
    return found


def _limits(
    name: str, per_job: str, group: str, wall: str, per_user: str = "", least: str = ""
) -> Limits:
    try:
        job, grp, user, low = (parse_tres(text) for text in (per_job, group, per_user, least))
        wall_s = parse_slurm_limit(wall)
    except ValueError as exc:
        raise SourceMissingError("sacctmgr", f"limits of {name} cannot be read: {exc}") from exc
    return Limits(
        name=name,
        max_gpus_per_job=_gpus(job),
        max_nodes_per_job=job.nodes,
        max_cpus_per_job=job.cpus,
        max_wall_s=wall_s,
        grp_gpus=_gpus(grp),
        grp_nodes=grp.nodes,
        max_gpus_per_user=_gpus(user),
        max_nodes_per_user=user.nodes,
        min_gpus_per_job=low.gpus,
    )


def _gpus(tres: Tres) -> int | None:
    """The tightest of a limit on all GPUs and of those on single types.

    Which type a job will get is not known for every job, so a limit on one type binds all.
    """
    present = [*tres.gpu_types.values(), *([] if tres.gpus is None else [tres.gpus])]
    return min(present) if present else None


def _least(one: float | None, other: float | None) -> float | None:
    present = [value for value in (one, other) if value is not None]
    return min(present) if present else None


def _whole(one: int | None, other: int | None) -> int | None:
    found = _least(one, other)
    return None if found is None else int(found)


def _tighter(one: Limits, other: Limits) -> Limits:
    return Limits(
        name=one.name,
        max_gpus_per_job=_whole(one.max_gpus_per_job, other.max_gpus_per_job),
        max_nodes_per_job=_whole(one.max_nodes_per_job, other.max_nodes_per_job),
        max_cpus_per_job=_whole(one.max_cpus_per_job, other.max_cpus_per_job),
        max_wall_s=_least(one.max_wall_s, other.max_wall_s),
        grp_gpus=_whole(one.grp_gpus, other.grp_gpus),
        grp_nodes=_whole(one.grp_nodes, other.grp_nodes),
        max_gpus_per_user=_whole(one.max_gpus_per_user, other.max_gpus_per_user),
        max_nodes_per_user=_whole(one.max_nodes_per_user, other.max_nodes_per_user),
        min_gpus_per_job=one.min_gpus_per_job,
    )

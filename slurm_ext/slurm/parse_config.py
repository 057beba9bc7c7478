"""``scontrol show config`` and ``sdiag`` to facts."""

from __future__ import annotations

import re

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.facts import RpcCount, RpcStats, SlurmConfig

_LINE = re.compile(r"^(\S+)\s*= ?(.*)$")
_RPC = re.compile(
    r"^\s+(\S+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.ASCII
)


def parse_config(text: str) -> SlurmConfig:
    """Keys in lower case. Raises SourceMissingError where the version is not in it: cut off."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            # Later blocks (cgroup, MPI) repeat no key of the main one; the first counts.
            values.setdefault(match[1].lower(), match[2].strip())
    version = values.get("slurm_version", "")
    if not version:
        raise SourceMissingError("scontrol show config", "it names no SLURM_VERSION: cut off?")
    return SlurmConfig(version, values)


def parse_sdiag(text: str) -> RpcStats:
    """Counts since the last reset. Raises SourceMissingError where the RPC table is missing."""
    if "statistics by message type" not in text:
        raise SourceMissingError("sdiag", "no statistics by message type: cut off?")
    head, _, tables = text.partition("Remote Procedure Call statistics by message type")
    by_type, _, by_user = tables.partition("Remote Procedure Call statistics by user")
    main, _, backfill = head.partition("Backfilling stats")
    return RpcStats(
        server_threads=_after(head, "Server thread count:") or 0,
        agent_queue=_after(head, "Agent queue size:") or 0,
        jobs_pending=_after(head, "Jobs pending:"),
        jobs_running=_after(head, "Jobs running:"),
        cycle_last_us=_after(main, "Last cycle:"),
        backfill_last_us=_after(backfill, "Last cycle:"),
        by_type=_rpcs(by_type),
        by_user=_rpcs(by_user.partition("Pending RPC")[0]),
    )


def _after(text: str, label: str) -> int | None:
    match = re.search(rf"^\s*{re.escape(label)}\s*(\d+)", text, re.MULTILINE | re.ASCII)
    return int(match[1]) if match else None


def _rpcs(text: str) -> dict[str, RpcCount]:
    found: dict[str, RpcCount] = {}
    for line in text.splitlines():
        match = _RPC.match(line)
        if match:
            found[match[1]] = RpcCount(int(match[2]), int(match[3]))
    return found

"""What ``slurm-ext simulate`` says beside its table: what is left out and why, what to do about it,
and what the numbers must not be taken for. Nothing is decided here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from slurm_ext.domain.spans import span
from slurm_ext.sim.build import NO_ROW_FOR_TYPE, UNKNOWN_BATCH, UNKNOWN_WORK, Built
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.jobs import LIMIT_FACTOR
from slurm_ext.sim.model import Schedule

# More lines than this about rows that were left out are counted, not printed.
TOLD = 10
# From this share of the jobs on, a waiting limit rather than the policy has made the order.
MOST = 0.5


def tell(lines: Sequence[str]) -> None:
    """Say the first of these lines."""
    for line in lines[:TOLD]:
        print(f"slurm-ext: {line}", file=sys.stderr)
    if len(lines) > TOLD:
        print(f"slurm-ext: and {len(lines) - TOLD} more like these", file=sys.stderr)


def tell_left_out(built: Built, remedy: str) -> None:
    """Also where notes are not wanted: numbers without these jobs look better than they are."""
    if not built.left_out:
        return
    jobs = len(built.jobs) + len(built.left_out)
    lines = [f"{len(built.left_out)} of {jobs} jobs are left out"]
    firsts: dict[str, str] = {}
    for line in built.left_out:
        job, _, reason = line.partition(" is left out: ")
        firsts.setdefault(reason, job)
    lines += [f"  {count}: {why} ({firsts[why]} first)" for why, count in built.reasons]
    if remedy:
        lines.append(f"  {remedy}")
    tell(lines)


def remedies(
    built: Built, hardware: Hardware, table_types: Sequence[str], fmt: str
) -> dict[str, str]:
    """Reason -> what to do about it, of those for which there is something to do."""
    found: dict[str, str] = {}
    for reason, _ in built.reasons:
        if NO_ROW_FOR_TYPE in reason and table_types:
            usual = hardware.retyped(table_types[0]).text
            found[reason] = f"try --cluster {usual}, or give a --table with rows for that type"
        elif UNKNOWN_WORK in reason or UNKNOWN_BATCH in reason:
            what = "published Pollux workloads tell no run times" if fmt == "pollux" else ""
            found[reason] = (
                f"{what}{'; ' if what else ''}add a column duration_s (seconds) to the workload"
                + ("" if fmt == "pollux" else ", or model, batch_size and total_samples")
                + ", or replay another one: neither --table nor --cluster helps"
            )
    return found


def limits(built: Built) -> str:
    """That backfill is told more than users know."""
    return (
        f"{built.no_limit} of {len(built.jobs)} jobs have no time limit in the workload: backfill"
        f" is told {LIMIT_FACTOR:g} times their true run time, whatever --estimate-error says"
    )


def by_age(
    schedules: Mapping[str, Schedule], limited: Iterable[str], limit_s: float | None
) -> list[str]:
    """Policies in which the waiting limit, and not the policy, has made the order of most jobs."""
    if limit_s is None:
        return []
    lines = []
    for name in limited:
        if name not in schedules:
            continue
        waits: dict[str, float] = {}
        for run in schedules[name].runs:
            waits.setdefault(run.job_id, run.start_s - run.submit_s)
        late = sum(wait > limit_s for wait in waits.values())
        if late >= MOST * len(waits):
            lines.append(
                f"{name}: {late} of {len(waits)} jobs first started after the waiting limit"
                f" ({span(limit_s)}), in order of submission and not of the policy; see"
                " --waiting-limit"
            )
    return lines

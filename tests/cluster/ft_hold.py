"""How long a requeued job waits on a free node, and what of that is Slurm's delay.

A job that requeues itself at once, on one node that nobody else wants: from the last thing that its
first attempt does to the first line of its second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from ci.cluster import Cluster

# Slurm's cred_expire is 120 s; a requeued job waits one second longer.
DEFAULT_HOLD_S = 121
SCRIPT = """#!/bin/bash
#SBATCH --open-mode=append --ntasks=1 --gpus-per-task=1 --time=5 --nodelist={node}
{directive}
mark() {{ echo "mark $1 $(date +%s.%N) $SLURM_JOB_NODELIST"; }}
mark begin
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0
# A step, so that there is a credential to be revoked.
srun true
mark end
scontrol requeue $SLURM_JOB_ID
sleep 100
"""
DIRECTIVE = "#SBATCH --ft-model=vit-large --ft-samples=20000 --ft-batch=256 --ft-gpus=1"


@dataclass(frozen=True, slots=True)
class Hold:
    """One requeue: the wait in seconds, and the nodes before and after."""

    wait_s: float
    before: str
    after: str


def submit(cluster: Cluster, node: str, *, ours: bool) -> int:
    """A job that requeues itself; ``ours``: with a directive, so that the daemon cares for it."""
    return cluster.sbatch(SCRIPT.format(node=node, directive=DIRECTIVE if ours else ""))


def measure(cluster: Cluster, *nodes: str, ours: bool, limit_s: float = 60) -> list[Hold]:
    """Let a job on each of the nodes requeue itself, and wait until all have run again."""
    jobs = [submit(cluster, node, ours=ours) for node in nodes]
    return [_read(cluster, job, limit_s) for job in jobs]


def _read(cluster: Cluster, job: int, limit_s: float) -> Hold:
    cluster.wait_state(job, "COMPLETED", "FAILED", limit_s=limit_s)
    text = cluster.get(f"/home/alice/slurm-{job}.out").decode()
    rows = [line.split() for line in text.splitlines() if line.startswith("mark ")]
    if [row[1] for row in rows] != ["begin", "end", "begin"]:
        raise AssertionError(f"job {job} did not run twice:\n{text}")
    (_, _, _, before), (_, _, ended, _), (_, _, begun, after) = rows
    return Hold(float(begun) - float(ended), before, after)


def announced(cluster: Cluster, node: str, limit_s: float = 30) -> float:
    """Seconds that Slurm means to hold a requeued job, as its record says; not waited for."""
    job = submit(cluster, node, ours=False)
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", limit_s, f"requeue of job {job}")

    def settled() -> bool:
        facts = cluster.job(job)
        return facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime"

    cluster.wait(settled, limit_s, f"job {job} held")
    facts = cluster.job(job)
    ended = cluster.get(f"/home/alice/slurm-{job}.out").decode().split("mark end ")[1].split()[0]
    cluster.exec(["scancel", str(job)])
    begin = datetime.fromisoformat(facts["StartTime"]).replace(tzinfo=UTC).timestamp()
    return begin - float(ended)

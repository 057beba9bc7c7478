"""Builders of small views, so that a test states only what it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node, Partition, Topology
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import JobFacts, Permit, View
from slurm_ext.domain.snapshot import Snapshot

FULL = Permit(order=True, resize=True, lease=True, pin=True)


def placement(gpus: int, per_node: int = 4) -> tuple[int, ...]:
    whole, rest = divmod(gpus, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())


def candidate(job_id: str, gpus: int, seconds: float, spread: float = 1.0) -> Candidate:
    left = Estimate(seconds, seconds / spread, seconds * spread, Source.MEASURED)
    return Candidate((job_id,), Configuration(gpus, placement(gpus)), left)


def job(number: int, gpus: int = 1, submit_s: float = 0.0, **fields: object) -> Job:
    return Job(
        job_id=str(number),
        base_id=number,
        user="alice",
        partitions=("main",),
        state=JobState.PENDING,
        submit_s=submit_s,
        gpus=gpus,
        **fields,  # type: ignore[arg-type]
    )


def facts(
    number: int,
    times: Mapping[int, float],
    permit: Permit = FULL,
    since: float = 0.0,
    pool: str = "main",
    weight: float = 1.0,
    spread: float = 1.0,
) -> JobFacts:
    options = tuple(candidate(str(number), g, s, spread) for g, s in times.items())
    return JobFacts(options, permit, since, weight, pool)


def nodes(count: int, gpus: int = 4, used: Sequence[int] = ()) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=f"n{i:02d}",
            gpus=gpus,
            gpu_type="v100",
            gpus_alloc=used[i] if i < len(used) else 0,
            cpus=32,
            partitions=frozenset({"main"}),
        )
        for i in range(count)
    )


def view(
    jobs: Sequence[Job],
    known: Mapping[str, JobFacts],
    machines: Sequence[Node],
    pools: Mapping[str, tuple[str, ...]] | None = None,
    previous: Plan | None = None,
    free_at: Mapping[str, float] | None = None,
    topology: Topology | None = None,
) -> View:
    names = tuple(n.name for n in machines)
    snapshot = Snapshot(
        taken_s=0.0,
        jobs=tuple(jobs),
        nodes=tuple(machines),
        partitions=(Partition("main", names),),
        topology=topology or Topology(),
    )
    return View(snapshot, known, pools or {"main": names}, free_at or {}, previous)

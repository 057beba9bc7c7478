"""The published numbers, the jobs and the policies that the titan_fm benchmark compares."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slurm_ext.domain.policy import Policy
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.optimus import OptimusPolicy
from slurm_ext.policy.preemptive import PreemptiveSrtf
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.tiresias import TiresiasPolicy
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.policy.titan_published import PublishedTitan
from slurm_ext.sim.author import INTERVALS_S, AuthorsRule, authors_jobs
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.jobs import AUTO_COUNTS
from slurm_ext.sim.library import find_workload, starter_truth
from slurm_ext.sim.metrics import outcomes_of
from slurm_ext.sim.model import Run, SimJob
from slurm_ext.sim.workload import read_workload

REFERENCE = Path(__file__).parents[1] / "data" / "titan_fm" / "reference_results.csv"
WORKLOADS = (
    "FM-1-vit-large",
    "FM-1.5-vit-large",
    "FM-1-vit",
    "FM-1.5-vit",
    "FM-2-vit",
    "FM-1-roberta-base",
    "FM-1.5-roberta-base",
    "FM-2-roberta-base",
)
HARDWARE = Hardware(nodes=8, gpus_per_node=4)
# Throughput per GPU over the job's best below which no count is offered, as in the daemon.
EFFICIENCY_FLOOR = 0.5
# No policy here leaves a job waiting for so long that age comes before its rank.
NO_LIMIT_S = 1e12
# The largest count with a measured placement on nodes of four GPUs.
EVERY_COUNT = tuple(range(1, 17))


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the published results, in hours."""

    avg_jct_h: float
    p99_jct_h: float
    makespan_h: float
    starts: float


@cache
def published() -> Mapping[tuple[str, str], Published]:
    """(policy, workload) -> results of experiment ``main``; of titan the rows without merge."""
    rows = {}
    with REFERENCE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["experiment"] == "main" and "merge(multi-task)=True" not in row["setting"]:
                rows[row["policy"], row["workload"]] = Published(
                    float(row["avg_jct_h"]),
                    float(row["p99_jct_h"]),
                    float(row["makespan_h"]),
                    float(row["avg_starts_per_job"]),
                )
    return rows


@cache
def _rule() -> AuthorsRule:
    return AuthorsRule(starter_truth())


@cache
def jobs_as_published(workload: str) -> tuple[SimJob, ...]:
    """Jobs at their requested counts, with the predictions that the author's policies saw."""
    return authors_jobs(read_workload(find_workload(workload)), _rule(), HARDWARE)


@cache
def jobs_any_count(workload: str) -> tuple[SimJob, ...]:
    """Jobs at every count that was measured, as the author's elastic policies may use them.

    Their times are the rule's own: progress that is reckoned in the author's predictions would be
    off by the error that these have.
    """
    workload_jobs = read_workload(find_workload(workload))
    return authors_jobs(workload_jobs, _rule(), HARDWARE, EVERY_COUNT, as_predicted=False)


@cache
def jobs_as_ours(workload: str) -> tuple[SimJob, ...]:
    """Jobs as the daemon would offer them: whole batch, no count that wastes half of its GPUs."""
    return authors_jobs(
        read_workload(find_workload(workload)),
        _rule(),
        HARDWARE,
        AUTO_COUNTS,
        as_predicted=False,
        whole_batch=True,
        efficiency_floor=EFFICIENCY_FLOOR,
    )


@cache
def jobs_rigid(workload: str) -> tuple[SimJob, ...]:
    """Jobs at their requested counts, with the rule's own times."""
    return authors_jobs(
        read_workload(find_workload(workload)), _rule(), HARDWARE, as_predicted=False
    )


def start_up_s(workload: str) -> float:
    """Seconds of every start; the jobs of one workload all train the same model."""
    return jobs_rigid(workload)[0].start_up_s


def lower_bound_s(workload: str) -> float:
    """No schedule has a smaller average JCT, whatever it knows and does.

    The larger of two bounds. Each job alone on its fastest count. And each job, as work in
    GPU-seconds at its most efficient count, on a single machine of all GPUs that is shared at will
    and served shortest remaining work first, which is optimal for the average there; start-up is
    left out, since a stopped job may have it in any of its parts.
    """
    jobs = jobs_any_count(workload)
    alone = [min(job.true_run_s.values()) for job in jobs]
    areas = [
        min(count * (run - job.start_up_s) for count, run in job.true_run_s.items()) for job in jobs
    ]
    shared = _fluid([job.submit_s for job in jobs], [a / HARDWARE.gpus for a in areas])
    each = max(math.fsum(alone), math.fsum(shared))
    return each / len(jobs)


def _fluid(submits: Sequence[float], works: Sequence[float]) -> list[float]:
    """JCTs of shortest remaining work first on one server that may switch at any time."""
    order = sorted(range(len(submits)), key=lambda i: submits[i])
    waiting: list[tuple[float, int]] = []
    now, place = 0.0, 0
    jcts = [0.0] * len(submits)
    while waiting or place < len(order):
        if not waiting:
            now = max(now, submits[order[place]])
        while place < len(order) and submits[order[place]] <= now:
            heapq.heappush(waiting, (works[order[place]], order[place]))
            place += 1
        left, index = heapq.heappop(waiting)
        until = submits[order[place]] if place < len(order) else math.inf
        if now + left <= until:
            now += left
            jcts[index] = now - submits[index]
        else:
            heapq.heappush(waiting, (left - (until - now), index))
            now = until
    return jcts


def p99_s(runs: Sequence[Run]) -> float:
    """As the published results have it: the lower of the two neighbouring ranks."""
    ascending = sorted(item.jct_s for item in outcomes_of(runs))
    return ascending[math.floor((len(ascending) - 1) * 0.99)]


@dataclass(frozen=True, slots=True)
class Case:
    """One policy on one workload: with which jobs, and the interval that was published for it.

    ``theirs`` names the published policy that it stands beside.
    """

    name: str
    policy: Policy
    jobs: tuple[SimJob, ...]
    theirs: str
    interval_s: float


def reproduced(workload: str) -> list[Case]:
    """The author's policies under the author's rules."""
    any_count = jobs_any_count(workload)
    as_told = jobs_as_published(workload)
    formulation = PublishedTitan(INTERVALS_S["titan"], start_up_s(workload))
    srtf = SrtfPolicy(NO_LIMIT_S, by_count=True)
    return [
        Case("srtf", srtf, as_told, "srtf", INTERVALS_S["srtf"]),
        Case("tiresias", TiresiasPolicy(spare=False), as_told, "tiresias", INTERVALS_S["tiresias"]),
        Case("optimus", OptimusPolicy(), any_count, "optimus", INTERVALS_S["optimus"]),
        Case("titan-published", formulation, any_count, "titan", INTERVALS_S["titan"]),
    ]


def ours(workload: str) -> list[Case]:
    """Our policies, which decide when something happens."""
    elastic, rigid = jobs_as_ours(workload), jobs_rigid(workload)
    return [
        Case("backfill", Backfill(), rigid, "", 0.0),
        Case("srtf-preemptive", PreemptiveSrtf(), rigid, "srtf", 0.0),
        Case("titan-rigid", TitanPolicy(), rigid, "titan", 0.0),
        Case("titan", TitanPolicy(), elastic, "titan", 0.0),
        Case("titan-grow", TitanPolicy(GROWING), elastic, "titan", 0.0),
    ]

"""What the same jobs would do without Slurm's own delays: event-driven replays to measure against.

The ideal EASY replay guards the comparison: whole-minute limits cripple Slurm's backfill in
compressed time, and a plain run that is worse than it should be would flatter us.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_ext.domain.policy import Policy
from slurm_ext.estimate.remaining import EFFICIENCY_FLOOR
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.titan import TitanPolicy
from slurm_ext.sim.engine import Hardware, Run, SimJob, replay
from slurm_ext.sim.jobs import Rules, build_jobs
from slurm_ext.sim.metrics import Metrics, measure, outcomes_of
from slurm_ext.sim.truth import Truth
from slurm_ext.sim.workload import WorkloadJob

GPUS_PER_NODE = 4


@dataclass(frozen=True, slots=True)
class Ideal:
    """One ideal replay."""

    name: str
    runs: tuple[Run, ...]
    metrics: Metrics


def real_jobs(
    workload: Sequence[WorkloadJob], truth: Truth, nodes: int, seed: int
) -> tuple[SimJob, ...]:
    """The jobs with their hidden error, as every variant and every ideal replay has them."""
    return build_jobs(workload, truth, Hardware(nodes, GPUS_PER_NODE), Rules(seed=seed))


def easy(workload: Sequence[WorkloadJob], truth: Truth, nodes: int, seed: int) -> Ideal:
    """EASY backfilling with exact limits; the better of any free GPUs and fewest nodes."""
    found = [
        _replay("EASY", Backfill(), workload, truth, Hardware(nodes, GPUS_PER_NODE, pooled), seed)
        for pooled in (False, True)
    ]
    return min(found, key=lambda ideal: ideal.metrics.avg_jct_s)


def titan(workload: Sequence[WorkloadJob], truth: Truth, nodes: int, seed: int) -> Ideal:
    """The daemon's policy, reacting at once, on the table and with the floor of the daemon."""
    hardware = Hardware(nodes, GPUS_PER_NODE)
    return _replay("titan", TitanPolicy(), workload, truth, hardware, seed, floor=EFFICIENCY_FLOOR)


def _replay(
    name: str,
    policy: Policy,
    workload: Sequence[WorkloadJob],
    truth: Truth,
    hardware: Hardware,
    seed: int,
    floor: float = 0.0,
) -> Ideal:
    jobs = build_jobs(workload, truth, hardware, Rules(seed=seed, efficiency_floor=floor))
    schedule = replay(jobs, hardware, policy)
    return Ideal(name, schedule.runs, measure(outcomes_of(schedule.runs), hardware.gpus))

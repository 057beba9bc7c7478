"""From a workload and the truth to the jobs of a replay: candidates, true times, limits.

One place for the rules that the ideal replay and the replay on a real cluster share, so that the
two cannot drift apart: which GPU counts there are, what the user's time limit is, which hidden
error a job has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.sim.engine import Hardware, SimJob
from slurm_ext.sim.truth import ERROR_FACTOR, Truth, consolidated, hidden_error
from slurm_ext.sim.workload import WorkloadJob

# `--ft-gpus=auto` with a cap of 16: 1, 2 and multiples of 4.
AUTO_COUNTS = (1, 2, 4, 8, 12, 16)
# Users ask for half as much again as the job takes.
LIMIT_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Rules:
    """What is the same for all jobs of a replay.

    ``gpus_per_node`` belongs to the truth: how long a job takes depends on how many nodes it
    spans, also where the replay itself ignores node borders. ``limit_step_s`` is the step to which
    limits are rounded up (Slurm: one minute; 0 = not rounded). ``seed`` None: no hidden error.
    Below ``efficiency_floor`` (throughput per GPU over the job's best) a count is not offered,
    unless it is the requested one.
    """

    counts: tuple[int, ...] = AUTO_COUNTS
    gpus_per_node: int = 4
    limit_factor: float = LIMIT_FACTOR
    limit_step_s: float = 0.0
    seed: int | None = None
    error_factor: float = ERROR_FACTOR
    efficiency_floor: float = 0.0


def counts_for(job: WorkloadJob, counts: Iterable[int]) -> tuple[int, ...]:
    """The GPU counts that keep the job's global batch constant, and always the requested one."""
    fitting = {count for count in counts if job.batch_size % count == 0}
    return tuple(sorted(fitting | {job.gpus}))


def error_of(job: WorkloadJob, rules: Rules) -> float:
    """The job's hidden error, 1 where the replay has none."""
    return 1.0 if rules.seed is None else hidden_error(job.job_id, rules.seed, rules.error_factor)


def true_times(job: WorkloadJob, truth: Truth, rules: Rules) -> dict[int, float]:
    """GPU count -> true run time (s), hidden error included."""
    error = error_of(job, rules)
    return {
        count: error * _by_rule(job, truth, rules, count) for count in counts_for(job, rules.counts)
    }


def limit_s(run_s: float, rules: Rules) -> float:
    """The user's time limit for a job that takes ``run_s`` as submitted."""
    limit = rules.limit_factor * run_s
    if rules.limit_step_s:
        # The tiny allowance keeps a limit that is whole up to rounding from gaining a step.
        limit = math.ceil(limit / rules.limit_step_s - 1e-9) * rules.limit_step_s
    return limit


def build_jobs(
    workload: Sequence[WorkloadJob],
    truth: Truth,
    hardware: Hardware,
    rules: Rules,
    user_of: Callable[[int], str] = lambda index: "user",
) -> tuple[SimJob, ...]:
    """Jobs for `engine.replay`. What the policy sees is the rule, never the hidden error."""
    return tuple(
        _build(job, truth, hardware, rules, user_of(index)) for index, job in enumerate(workload)
    )


def _build(job: WorkloadJob, truth: Truth, hardware: Hardware, rules: Rules, user: str) -> SimJob:
    times = true_times(job, truth, rules)
    return SimJob(
        job_id=job.job_id,
        submit_s=job.submit_s,
        gpus=job.gpus,
        limit_s=limit_s(times[job.gpus], rules),
        candidates=tuple(
            _candidate(job, truth, hardware, rules, count)
            for count in _offered(job, truth, rules)
            if count <= hardware.gpus
        ),
        true_run_s=times,
        error_free_s=_by_rule(job, truth, rules, job.gpus),
        user=user,
    )


def _offered(job: WorkloadJob, truth: Truth, rules: Rules) -> list[int]:
    """Counts that waste no more than the efficiency floor allows, and the requested one."""
    start_s = truth.start_up_s(job.model)
    per_gpu = {
        count: 1 / (count * (_by_rule(job, truth, rules, count) - start_s))
        for count in counts_for(job, rules.counts)
    }
    least = rules.efficiency_floor * max(per_gpu.values())
    return [count for count, speed in per_gpu.items() if speed >= least or count == job.gpus]


def _candidate(
    job: WorkloadJob, truth: Truth, hardware: Hardware, rules: Rules, count: int
) -> Candidate:
    run_s = _by_rule(job, truth, rules, count)
    configuration = Configuration(
        gpus=count,
        placement=hardware.placement(count),
        local_batch=math.ceil(job.batch_size / count),
    )
    estimate = Estimate(
        run_s, run_s / rules.error_factor, run_s * rules.error_factor, Source.MEASURED
    )
    return Candidate((job.job_id,), configuration, estimate)


def _by_rule(job: WorkloadJob, truth: Truth, rules: Rules, count: int) -> float:
    placement = consolidated(count, rules.gpus_per_node)
    return truth.run_s(job.model, job.batch_size, job.total_samples, placement)

"""The rules of the simulator that the published results of the titan_fm workloads come from.

Written from reading and running that program, to reproduce its numbers: not for anything else. Its
run-time rule is the one of `truth` but for the rounding, which cuts where `truth` rounds up:

    steps = samples / (gpus * local * micro), run_s = checkpoint + switch + steps * (sync + (step
    - sync) * micro), with micro = ceil(ceil(batch / gpus) / largest local batch) and local =
    floor(batch / (gpus * micro)), at least the smallest local batch that was measured

Rules that are stated nowhere, and are needed to come out where it does:

* What its policies are told is not this time. The prediction counts one micro-batch too many per
  step, leaves start-up out, and is rounded to whole seconds. So single-GPU jobs look up to twice
  as long as they are, 8-GPU jobs nearly so too, but not in proportion: the order of SRTF changes.
* It decides at multiples of the interval only, beginning with the start of the trace; jobs end in
  between, at their own time, but their GPUs are free at the next multiple.
* SRTF and Tiresias choose jobs by counts and then seat them, largest first; a chosen job that finds
  no seat waits, and the GPUs that it was counted with stay idle until the next interval.
* Tiresias has one limit that matters, 4 GPU-hours, of GPU time held (start-up and checkpoint
  included); it is looked at when a decision is made.
* A stop loses no work. Every start pays checkpoint and switch in full.

The choice a reader would question: none of these is a bug to be mended here. Ours are compared with
what was published, and that was made with these rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.model import SimJob
from slurm_ext.sim.truth import Truth, consolidated
from slurm_ext.sim.workload import WorkloadJob

# Seconds between two decisions of each policy in the published results.
INTERVALS_S: Mapping[str, float] = {
    "srtf": 300.0,
    "tiresias": 300.0,
    "optimus": 300.0,
    "titan": 120.0,
}


@dataclass(frozen=True, slots=True)
class Split:
    """How one optimizer step is cut: samples per GPU and micro-batch, and micro-batches."""

    local_batch: int
    micro_batches: int


class AuthorsRule:
    """Run times of the published simulator, from a truth's curves and start-up costs."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._range: dict[str, tuple[float, float]] = {}
        for (model, _), curve in truth.curves.items():
            low, high = self._range.get(model, (math.inf, 0.0))
            self._range[model] = (min(low, curve.local[0]), max(high, curve.local[-1]))

    def split(self, model: str, batch: int, gpus: int) -> Split:
        """The largest measured local batch decides over micro-batches, whatever the placement."""
        smallest, largest = self._range[model]
        micro = math.ceil(math.ceil(batch / gpus) / largest)
        return Split(max(batch // (gpus * micro), int(smallest)), micro)

    def work_s(self, job: WorkloadJob, placement: Sequence[int]) -> float:
        """Seconds of training, start-up not included."""
        return self._steps(job, placement, extra=0)

    def predicted_s(self, job: WorkloadJob, placement: Sequence[int]) -> float:
        """What its policies take the training to be: one micro-batch too many in every step."""
        return float(round(self._steps(job, placement, extra=1)))

    def run_s(self, job: WorkloadJob, placement: Sequence[int]) -> float:
        """Seconds from start to end of a job that is never stopped."""
        return self._truth.start_up_s(job.model) + self.work_s(job, placement)

    def start_up_s(self, model: str) -> float:
        """Seconds of every start without training."""
        return self._truth.start_up_s(model)

    def knows(self, model: str, placement: Sequence[int]) -> bool:
        """Whether a placement was measured."""
        return (model, tuple(placement)) in self._truth.curves

    def _steps(self, job: WorkloadJob, placement: Sequence[int], extra: int) -> float:
        gpus = sum(placement)
        cut = self.split(job.model, job.batch_size, gpus)
        step_s, sync_s = self._truth.curves[job.model, tuple(placement)].at(cut.local_batch)
        steps = job.total_samples / (gpus * cut.local_batch * cut.micro_batches)
        return steps * (sync_s + (step_s - sync_s) * (cut.micro_batches + extra))


def authors_jobs(
    workload: Iterable[WorkloadJob],
    rule: AuthorsRule,
    hardware: Hardware,
    counts: Sequence[int] = (),
    *,
    as_predicted: bool = True,
    whole_batch: bool = False,
    efficiency_floor: float = 0.0,
) -> tuple[SimJob, ...]:
    """Jobs for `engine.replay`: true times by the rule, on the fewest nodes.

    Beside the requested count those of ``counts`` are offered that were measured; with
    ``whole_batch`` only those that divide the global batch, which then stays exactly what the user
    gave. ``as_predicted`` shows policies the author's predictions, else the rule's own times.
    Below ``efficiency_floor`` (throughput per GPU over the job's best) no count is offered.
    """
    return tuple(
        _build(job, rule, hardware, counts, as_predicted, whole_batch, efficiency_floor)
        for job in workload
    )


def _build(
    job: WorkloadJob,
    rule: AuthorsRule,
    hardware: Hardware,
    counts: Sequence[int],
    as_predicted: bool,
    whole_batch: bool,
    floor: float,
) -> SimJob:
    start_s = rule.start_up_s(job.model)
    work: dict[int, float] = {}
    for count in sorted({*counts, job.gpus}):
        measured = consolidated(count, hardware.gpus_per_node)
        if count > hardware.gpus or not rule.knows(job.model, measured):
            continue
        if whole_batch and job.batch_size % count and count != job.gpus:
            continue
        work[count] = rule.work_s(job, measured)
    best = max(1 / (count * each) for count, each in work.items())
    offered = [
        count
        for count, each in work.items()
        if count == job.gpus or 1 / (count * each) >= floor * best
    ]
    candidates = []
    for count in offered:
        measured = consolidated(count, hardware.gpus_per_node)
        seen = rule.predicted_s(job, measured) if as_predicted else work[count]
        value = start_s + seen
        candidates.append(
            Candidate(
                (job.job_id,),
                Configuration(
                    gpus=count,
                    placement=hardware.placement(count),
                    local_batch=rule.split(job.model, job.batch_size, count).local_batch,
                ),
                Estimate(value, value, value, Source.MEASURED),
            )
        )
    times = {count: start_s + each for count, each in work.items()}
    return SimJob(
        job_id=job.job_id,
        submit_s=job.submit_s,
        gpus=job.gpus,
        limit_s=2.0 * times[job.gpus],
        candidates=tuple(candidates),
        true_run_s=times,
        error_free_s=times[job.gpus],
        model=job.model,
        start_up_s=start_s,
    )

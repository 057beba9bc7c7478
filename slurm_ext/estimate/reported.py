"""From a job's report to a sample for the calibration: is it about what the table was asked? Pure.

A report counts when it comes from the attempt that runs now, on the GPUs that were granted, after
enough steps that compilation and warm-up are over.
"""

from __future__ import annotations

from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job
from slurm_ext.estimate.calibration import Sample
from slurm_ext.estimate.remaining import EstimateSources, present_placement, request_of

# Steps of an attempt before its speed is believed: the first ones compile and fill caches.
WARM_UP_STEPS = 10


def sample_of(
    job: Job, directive: Directive, gpus_per_node: int, gpu_type: str, sources: EstimateSources
) -> Sample | None:
    """What the job's last report tells about the table, ``None`` where it tells nothing."""
    report = sources.progress.get(job.job_id)
    if report is None or not job.running or report.attempt != job.restarts:
        return None
    if report.gpus != job.gpus or report.samples_per_s <= 0:
        return None
    if report.step - (report.restored_step or 0) < WARM_UP_STEPS:
        return None
    request, _ = request_of(directive, gpu_type, sources)
    if request is None:
        return None
    return Sample(
        # The tasks of an array are one job: they are alike, and may be thousands.
        job_id=str(job.base_id),
        user=job.user,
        request=request,
        placement=present_placement(job, gpus_per_node),
        samples_per_s=report.samples_per_s,
        at_s=report.at_s,
    )

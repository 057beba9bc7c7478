"""Small builders: a measurement, a job, a directive, in one line each."""

from __future__ import annotations

from typing import Any

from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind
from slurm_ext.domain.job import Job, JobState
from slurm_ext.estimate.enumerate import consolidated
from slurm_ext.estimate.measurement import Key, Measurement, Settings

AUTO = GpuRequest(GpuRequestKind.AUTO)


def row(
    local: int,
    throughput: float,
    gpus: int = 1,
    *,
    placement: tuple[int, ...] | None = None,
    accumulation: int = 1,
    model: str = "m",
    gpu_type: str = "V100",
    sync: float | None = None,
    source: str = "s",
    settings: Settings | None = None,
    **values: Any,
) -> Measurement:
    """A point on the fewest nodes of four GPUs; throughput 0 is out of memory."""
    place = consolidated(gpus, 4) if placement is None else placement
    key = Key(
        model,
        gpu_type,
        gpus,
        len(place),
        place,
        local,
        accumulation,
        settings or Settings(),
    )
    if throughput == 0:
        return Measurement(key, count=0, out_of_memory=1, source=source)
    step = key.global_batch / throughput
    return Measurement(key, throughput, step, sync, source=source, **values)


def job(gpus: int = 1, **values: Any) -> Job:
    """A pending job with a time limit of one hour."""
    fields: dict[str, Any] = {
        "job_id": "7",
        "base_id": 7,
        "user": "ann",
        "partitions": ("main",),
        "state": JobState.PENDING,
        "submit_s": 0.0,
        "gpus": gpus,
        "time_limit_s": 3600.0,
    }
    return Job(**{**fields, **values})


def directive(batch: int | None = 128, **values: Any) -> Directive:
    """A resizable directive for model ``m`` with 10,000 samples."""
    fields: dict[str, Any] = {
        "model": "m",
        "samples": 10_000,
        "batch_min": batch,
        "batch_max": batch,
        "gpus": AUTO,
    }
    return Directive(**{**fields, **values})

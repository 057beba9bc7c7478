"""One recorded job and one recorded workload, whatever file they came from.

A field that the source does not have keeps its default; nothing is guessed here. In particular a
duration is ``None`` where only the amount of work is known: how long that takes on which GPUs is
the business of the replay, not of the reader.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One submission.

    ``submit_s`` counts from the trace's own origin. ``duration_s`` is the time that the job held
    its GPUs, over all of its starts. ``batch`` is the global batch (0 = unknown) and ``samples``
    the work (0 = unknown). ``vc`` is the virtual cluster, account or queue that the job was
    charged to. ``limit_s`` is the user's time limit (``None`` = none or unknown).
    """

    job_id: str
    submit_s: float
    duration_s: float | None
    gpus: int
    model: str = ""
    batch: int = 0
    samples: float = 0.0
    user: str = ""
    vc: str = ""
    state: str = ""
    limit_s: float | None = None
    task: str = ""
    partition: str = ""
    gpu_type: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a file in order of submission.

    ``skipped`` holds one line for every unusable row: file, line, column, value, reason and fix.
    ``notes`` tells how many sound rows were left out and why (jobs without GPUs, jobs that never
    ran), since a replay without them is a lighter one. ``origin_s`` is the time of ``submit_s=0``
    in the source's own clock, 0 where the source is relative already.
    """

    jobs: tuple[TraceJob, ...]
    skipped: tuple[str, ...] = ()
    fmt: str = ""
    notes: tuple[str, ...] = ()
    origin_s: float = 0.0

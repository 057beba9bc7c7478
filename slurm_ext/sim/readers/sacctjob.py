"""A job as accounting knows it, and how several records of one job become one.

No text is read here. Records that cannot belong together are refused rather than guessed: a job
id used twice would otherwise give one job with a queue time of months.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from slurm_ext.domain.directive import Directive
from slurm_ext.sim.readers.harvest import Harvest, Row

# A running job this much past its limit has ended without telling the database ("runaway").
RUNAWAY_S = 86400
# After a requeue the new record is submitted as the old one ends; a later one is a reused id.
REQUEUE_GAP_S = 600
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})
ACTIVE = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING", "STOPPED"})
# Ends after which Slurm may start the job again under the same id.
_AGAIN = frozenset({"REQUEUED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "RESIZING", "RECONFIG_FAIL"})


@dataclass(frozen=True, slots=True)
class Span:
    """One start of a job: from, until (``None`` = still running), and where."""

    start_s: float
    end_s: float | None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SacctJob:
    """One job as accounting saw it. Times are seconds of the site's own clock.

    ``gpus`` are those it got, or asked for as long as it got none. ``node_count`` is how many
    nodes it took or asks for (0 = unknown). ``ready_s`` is when its waiting began. ``copies`` is
    the number of jobs behind one row (the rest of a pending array).
    """

    job_id: str
    state: str
    submit_s: float
    ready_s: float
    gpus: int
    spans: tuple[Span, ...] = ()
    ended_s: float | None = None
    gpu_type: str = ""
    node_count: int = 0
    user: str = ""
    account: str = ""
    partition: str = ""
    name: str = ""
    limit_s: float | None = None
    directive: Directive | None = None
    model: str = ""
    copies: int = 1

    @property
    def waiting(self) -> bool:
        """Whether it was still in the queue when the file was written."""
        return self.state in WAITING

    @property
    def running(self) -> bool:
        """Whether it still ran when the file was written."""
        return bool(self.spans) and self.spans[-1].end_s is None

    @property
    def ran_s(self) -> float:
        """Seconds for which it held its GPUs, over all starts that ended."""
        return sum(s.end_s - s.start_s for s in self.spans if s.end_s is not None)

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """From and until of each of its waits that ended in a start."""
        begins = [self.ready_s, *(s.end_s for s in self.spans if s.end_s is not None)]
        return tuple((b, max(b, s.start_s)) for b, s in zip(begins, self.spans, strict=False))

    @property
    def waited_s(self) -> float:
        """Seconds in the queue until its last start."""
        return sum(until - since for since, until in self.waits)

    @property
    def times(self) -> Iterator[float]:
        """Every time that it is known by."""
        yield self.submit_s
        if self.ended_s is not None:
            yield self.ended_s
        for span in self.spans:
            yield span.start_s


@dataclass(frozen=True, slots=True)
class SacctLog:
    """A whole file. ``horizon_s`` is its latest time; see `Trace` for ``skipped`` and ``notes``."""

    file: str
    jobs: tuple[SacctJob, ...]
    horizon_s: float
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One row as a job of at most one start, and the row for complaints."""

    job: SacctJob
    row: Row


def one_job(records: list[Record], harvest: Harvest) -> SacctJob:
    """All starts of one id, in order of time; records that do not fit are refused."""
    ordered = sorted(records, key=lambda record: _begin(record.job))
    first = last = ordered[0].job
    spans = list(first.spans)
    for record in ordered[1:]:
        job = record.job
        if replace(job, name=last.name) == last:
            harvest.leave_out("the same record again")  # exports that overlap
        elif last.ended_s is None or _begin(job) < last.ended_s:
            harvest.refuse(
                record.row.refuse("jobid", "two records of the same time", "export it only once")
            )
        elif last.state not in _AGAIN and job.submit_s - last.ended_s > REQUEUE_GAP_S:
            harvest.refuse(
                record.row.refuse(
                    "jobid",
                    "the id of another job that had ended",
                    "export a period in which job ids were not reset",
                )
            )
        else:
            last = job
            spans += job.spans
    return replace(
        last,
        submit_s=first.submit_s,
        ready_s=first.ready_s,
        spans=tuple(spans),
        gpus=last.gpus or first.gpus,
        model=last.model or first.model,
        directive=last.directive or first.directive,
    )


def join_components(jobs: Iterable[SacctJob]) -> list[SacctJob]:
    """Components of a heterogeneous job (``14+0``, ``14+1``) start together: one job."""
    joined: dict[str, SacctJob] = {}
    for job in jobs:
        base, plus, _ = job.job_id.partition("+")
        if not plus:
            joined[job.job_id] = job
        elif base not in joined:
            joined[base] = replace(job, job_id=base)
        else:
            joined[base] = _joined(joined[base], job)
    return list(joined.values())


def without_runaways(jobs: list[SacctJob], horizon_s: float) -> tuple[list[SacctJob], int]:
    """The jobs that can be believed, and how many of those that "run" cannot."""
    kept = [
        job
        for job in jobs
        if not (
            job.running
            and job.limit_s is not None
            and horizon_s - job.spans[-1].start_s > job.limit_s + RUNAWAY_S
        )
    ]
    return kept, len(jobs) - len(kept)


def _begin(job: SacctJob) -> float:
    return job.spans[0].start_s if job.spans else job.submit_s


def _joined(one: SacctJob, other: SacctJob) -> SacctJob:
    spans = tuple(
        Span(
            max(a.start_s, b.start_s),
            None if a.end_s is None or b.end_s is None else max(a.end_s, b.end_s),
            (*a.nodes, *b.nodes),
        )
        for a, b in zip(one.spans, other.spans, strict=False)
    )
    return replace(
        one,
        gpus=one.gpus + other.gpus,
        node_count=one.node_count + other.node_count,
        spans=spans,
        gpu_type=one.gpu_type if one.gpu_type == other.gpu_type else "",
        model=one.model or other.model,
        directive=one.directive or other.directive,
    )

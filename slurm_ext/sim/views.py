"""What a policy is shown of a replay: rows as Slurm has them, and estimates, never the truth.

A view must not change after it was given, and building one from nothing at every event would cost
more than the decision. So every part that lives longer than an event (the row of a waiting job, its
facts, the row of a running job) is built once; the facts of running jobs, of which the estimates
change with time, are worked out when a policy asks for them.

The choice a reader would question: the queue and the facts of waiting jobs, which may be many
thousands, are handed out without a copy. Before either changes, `Rows` looks whether anybody still
holds it (by its reference count), and if so goes on with a copy and leaves the old one to them.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.node import Node, Partition, Topology
from slurm_ext.domain.policy import JobFacts, Permit
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.policy.queue import present_candidate
from slurm_ext.sim.attempt import Attempt, Progress, restarts
from slurm_ext.sim.hardware import PARTITION
from slurm_ext.sim.model import SimJob

Standing = Callable[[Job, JobFacts], float | None]
_Key = TypeVar("_Key", str, int)
_FULL_PERMIT = Permit(order=True, resize=True, lease=True, pin=True)


class Picture(Snapshot):
    """A snapshot that knows which of its jobs wait and which run, and joins them when asked."""

    __slots__ = ("_queues", "_started")
    _queues: Mapping[str, Sequence[Job]]
    _started: tuple[Job, ...]

    def __init__(
        self,
        taken_s: float,
        nodes: tuple[Node, ...],
        partitions: tuple[Partition, ...],
        queues: Mapping[str, Sequence[Job]],
        started: tuple[Job, ...],
    ) -> None:
        for name, value in (
            ("taken_s", taken_s),
            ("nodes", nodes),
            ("partitions", partitions),
            ("reservations", ()),
            ("limits", {}),
            ("topology", Topology()),
            ("_queues", queues),
            ("_started", started),
        ):
            object.__setattr__(self, name, value)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All rows, the running ones first."""
        return (*self._started, *self.pending())

    def pending(self) -> Iterator[Job]:
        return (job for queue in self._queues.values() for job in queue)

    def running(self) -> Iterator[Job]:
        return iter(self._started)


class Restarts(Mapping[str, JobFacts]):
    """The facts of running jobs as of one moment, worked out on demand.

    ``delay_s`` is how long after the order to stop a job can start again.
    """

    def __init__(
        self,
        attempts: Mapping[str, Attempt],
        facts: Mapping[str, JobFacts],
        now: float,
        delay_s: float,
    ) -> None:
        self._attempts = attempts
        self._delay_s = delay_s
        self._facts = facts
        self._now = now
        self._known: dict[str, JobFacts] = {}

    def __getitem__(self, job_id: str) -> JobFacts:
        found = self._known.get(job_id)
        if found is None:
            live = self._attempts[job_id]
            progress = live.progress(self._now)
            found = replace(
                self._facts[job_id],
                candidates=restarts(live.job, progress, self._delay_s),
                attained_gpu_s=progress.attained_gpu_s,
            )
            self._known[job_id] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)


@dataclass(slots=True)
class Rows:
    """Rows and facts of the jobs that are there now; those that wait by pool and submission."""

    queues: dict[str, list[Job]] = field(default_factory=dict)
    shortest: dict[str, list[Job]] = field(default_factory=dict)
    left_s: dict[str, float] = field(default_factory=dict)
    started: dict[str, Job] = field(default_factory=dict)
    facts: dict[str, JobFacts] = field(default_factory=dict)
    started_facts: dict[str, JobFacts] = field(default_factory=dict)
    standing: Standing | None = None
    alike: dict[str, dict[int, list[Job]]] = field(default_factory=dict)
    apart: dict[str, list[Job]] = field(default_factory=dict)
    stand_at: dict[str, float] = field(default_factory=dict)

    def wait(self, job: SimJob, place: int, pool: str, progress: Progress) -> None:
        """A job came, or came back."""
        row = Job(
            job_id=job.job_id,
            base_id=place,
            user=job.user,
            partitions=(PARTITION,),
            state=JobState.PENDING,
            submit_s=job.submit_s,
            gpus=job.gpus,
            ntasks=job.gpus,
            cpus=job.gpus,
            time_limit_s=job.limit_s,
            gpu_type=job.gpu_type,
            restarts=progress.starts,
        )
        fact = JobFacts(
            candidates=restarts(job, progress),
            permit=_FULL_PERMIT,
            waiting_since_s=job.submit_s,
            pool=pool,
            attained_gpu_s=progress.attained_gpu_s,
        )
        self._own_facts()[job.job_id] = fact
        self.left_s[job.job_id] = present_candidate(row, fact).remaining_s.value
        bisect.insort(_change(self.queues, pool), row, key=_by_submission)
        bisect.insort(_change(self.shortest, pool), row, key=self._by_time)
        if self.standing is not None:
            self._stand(row, fact, self.standing(row, fact))

    def ride(self, job: SimJob, place: int) -> None:
        """A waiting job was merged into another one."""
        self._leave(job, place)

    def _leave(self, job: SimJob, place: int) -> tuple[Job, JobFacts]:
        """A job does not wait any more."""
        key = job.job_id
        fact = self._own_facts().pop(key)
        shortest = _change(self.shortest, fact.pool)
        del shortest[bisect.bisect_left(shortest, (self.left_s[key], place), key=self._by_time)]
        queue = _change(self.queues, fact.pool)
        row = queue.pop(bisect.bisect_left(queue, (job.submit_s, place), key=_by_submission))
        if self.standing is not None:
            self._rise(row, fact)
        return row, fact

    def start(self, live: Attempt, place: int) -> None:
        """A waiting job started."""
        key = live.job.job_id
        row, fact = self._leave(live.job, place)
        self.started[key] = replace(
            row,
            state=JobState.RUNNING,
            gpus=live.configuration.gpus,
            nodes=len(live.seats),
            ntasks=live.configuration.gpus,
            cpus=live.configuration.gpus,
            start_s=live.start_s,
            end_s=live.start_s + live.job.limit_s,
            node_names=tuple(live.seats),
        )
        self.started_facts[key] = fact

    def save(self, job_id: str) -> None:
        """A running job was told to stop, and saves its state first."""
        self.started[job_id] = replace(self.started[job_id], state=JobState.SIGNALING)

    def complete(self, job_id: str, free_s: float) -> None:
        """A job ended, but its GPUs are not free before ``free_s``."""
        self.started[job_id] = replace(
            self.started[job_id], state=JobState.COMPLETING, end_s=free_s
        )

    def gone(self, job_id: str) -> None:
        """A started job is not there any more."""
        del self.started[job_id]
        del self.started_facts[job_id]

    def _stand(self, row: Job, fact: JobFacts, standing: float | None) -> None:
        if standing is None:
            bisect.insort(_change(self.apart, fact.pool), row, key=_by_submission)
            return
        self.stand_at[row.job_id] = -standing
        sizes = self.alike.setdefault(fact.pool, {})
        bisect.insort(_change(sizes, fact.candidates[0].gpus), row, key=self._by_standing)

    def _rise(self, row: Job, fact: JobFacts) -> None:
        at = self.stand_at.get(row.job_id)
        if at is None:
            apart = _change(self.apart, fact.pool)
            del apart[bisect.bisect_left(apart, _by_submission(row), key=_by_submission)]
            return
        sizes, gpus = self.alike[fact.pool], fact.candidates[0].gpus
        alike = _change(sizes, gpus)
        del alike[bisect.bisect_left(alike, (at, row.base_id), key=self._by_standing)]
        del self.stand_at[row.job_id]
        if not alike:
            del sizes[gpus]

    def _by_standing(self, row: Job) -> tuple[float, int]:
        return self.stand_at[row.job_id], row.base_id

    def _by_time(self, row: Job) -> tuple[float, int]:
        return self.left_s[row.job_id], row.base_id

    def _own_facts(self) -> dict[str, JobFacts]:
        own, self.facts = self.facts, {}
        if _references(own) > _ALONE:
            own = own.copy()
        self.facts = own
        return own


def _change(parts: dict[_Key, list[Job]], key: _Key) -> list[Job]:
    """One of several lists, to be changed: a copy where somebody still holds the present one."""
    own = parts.get(key, [])
    parts[key] = []
    if _references(own) > _ALONE:
        own = own.copy()
    parts[key] = own
    return own


def _references(part: object) -> int:
    return sys.getrefcount(part)


def _alone() -> int:
    """References that are counted where nobody but the asking function holds a thing: their
    number differs between releases of Python."""
    fresh: list[Job] = []
    return _references(fresh)


_ALONE = _alone()


def _by_submission(row: Job) -> tuple[float, int]:
    return row.submit_s, row.base_id

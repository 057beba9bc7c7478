"""What is ours, held in memory and kept in step with the journal.

The memory is the working copy; the journal outlives us. Changes are staged and written before
Slurm is asked for anything. When the journal fails in between, the memory is still right: it is
written whole into the next journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry

# A job that left the queue may come back under its number (a requeue by hand within MinJobAge);
# its first submission is remembered for this long.
KEEP_S = 3600.0
# Slurm shows whole seconds, and rounds the same time always the same way; this is for safety.
_SLACK_S = 2.0


def given_away(job: Job, first_submit_s: float, restarts: int = 0) -> bool:
    """Whether the job's number belonged to another job when this was noted about it.

    slurmctld that dies gives the numbers of its last unsaved seconds away again; it also begins
    anew after the last one. A requeue moves SubmitTime later, and raises the restart count first.
    """
    if job.restarts < restarts or job.submit_s < first_submit_s - _SLACK_S:
        return True
    return not job.restarts and job.submit_s > first_submit_s + _SLACK_S


class Ledger(Mapping[str, LedgerEntry]):
    """Entries by job id, with the changes that the journal has not seen yet."""

    def __init__(self, entries: Mapping[str, LedgerEntry] | None = None) -> None:
        self._entries = dict(entries or {})
        self._changed: set[str] = set()
        self._removed: set[str] = set()
        self._gone_since: dict[str, float] = {}

    def __getitem__(self, job_id: str) -> LedgerEntry:
        return self._entries[job_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: LedgerEntry) -> bool:
        """Take over an entry; false where it says nothing new."""
        if self._entries.get(entry.job_id) == entry:
            return False
        self._entries[entry.job_id] = entry
        self._changed.add(entry.job_id)
        self._removed.discard(entry.job_id)
        return True

    def drop(self, job_id: str) -> None:
        """Forget a job."""
        if self._entries.pop(job_id, None) is not None:
            self._removed.add(job_id)
            self._changed.discard(job_id)

    def meet(self, jobs: Iterable[Job], now_s: float) -> None:
        """Make an entry for every new job, and forget those that have long left the queue.

        An entry made here holds nothing of ours, only the first submission. An array's pending
        rest changes its id when tasks start: the new id, and each task that split off, inherit
        the old one's entry, since Slurm copies the record with everything that we wrote to it.
        An entry under a number that was given away since is another job's, and is forgotten.
        """
        jobs = list(jobs)
        self.forget_given_away(jobs)
        present: set[str] = set()
        by_base: dict[int, LedgerEntry] = {}
        for job_id, entry in self._entries.items():
            base = _base(job_id)
            if "[" in job_id and base is not None:
                by_base[base] = entry
        for job in jobs:
            present.add(job.job_id)
            if job.job_id in self._entries:
                continue
            parent = by_base.get(job.base_id) if job.array else None
            if parent is None or _of_another(job, parent):
                self.put(LedgerEntry(job.job_id, job.submit_s, attempt=job.restarts))
                continue
            self.put(replace(parent, job_id=job.job_id))
            if job.pending and "[" in job.job_id:
                # The old set of pending tasks exists no more under its name.
                self.drop(parent.job_id)
        for job_id in list(self._entries):
            if job_id in present:
                self._gone_since.pop(job_id, None)
            elif now_s - self._gone_since.setdefault(job_id, now_s) > KEEP_S:
                self.drop(job_id)
                del self._gone_since[job_id]

    def forget_given_away(self, jobs: Iterable[Job]) -> None:
        """Forget what is noted under the numbers of these jobs about earlier ones: of anybody's
        jobs, since what was ours on the earlier one must never be taken back from a foreign one."""
        stale = {
            job.base_id: job
            for job in jobs
            if (entry := self._entries.get(job.job_id)) is not None and _of_another(job, entry)
        }
        # The other ids of a job's number tell nothing about themselves: an array that is gone left
        # the names of its tasks, which the new one's tasks would inherit from.
        for job_id, entry in list(self._entries.items()) if stale else ():
            job = stale.get(_base(job_id) or 0)
            if job is not None and _of_another(job, entry):
                self.drop(job_id)

    @property
    def submitted(self) -> dict[int, float]:
        """First submission of each job and array, by its number."""
        return {
            b: e.first_submit_s for i, e in self._entries.items() if (b := _base(i)) is not None
        }

    @property
    def base_ids(self) -> frozenset[int]:
        """Numbers of all remembered jobs and arrays."""
        return frozenset(b for b in map(_base, self._entries) if b is not None)

    def staged(self) -> tuple[list[LedgerEntry], list[str]]:
        """Changed entries and removed ids since `settle`."""
        return [self._entries[job_id] for job_id in sorted(self._changed)], sorted(self._removed)

    def settle(self) -> None:
        """The journal has everything now."""
        self._changed.clear()
        self._removed.clear()

    def unsettle(self) -> None:
        """A new journal knows nothing: everything has to be written again."""
        self._changed = set(self._entries)
        self._removed.clear()


def holds_something(entry: LedgerEntry) -> bool:
    """Whether anything of ours is out on the job."""
    return (
        entry.factor not in (None, 0)
        or entry.lease_until_s is not None
        or entry.written is not None
        or entry.written_limit_s is not None
        or entry.pinned
    )


def _of_another(job: Job, entry: LedgerEntry) -> bool:
    seen = entry.attempt if entry.restarts is None else entry.restarts
    return given_away(job, entry.first_submit_s, seen)


def _base(job_id: str) -> int | None:
    digits = job_id.split("_", 1)[0]
    return int(digits) if digits.isdigit() else None

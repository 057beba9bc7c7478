"""Notices jobs that came back to the queue, and why, as far as it can be known.

Slurm's queue tells that a job was requeued (its restart count), never why. The job's own record
does, where it runs under ``ft-run``; otherwise, or where that knows only that a peer was lost, a
node of its last attempt that is down now tells enough. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ext.control.outages import failed
from slurm_ext.control.resume import noted
from slurm_ext.domain.attempt import Attempts
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.snapshot import Snapshot


class RequeueWatch:
    """Remembers on which nodes jobs run."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, ...]] = {}
        self._failed: frozenset[str] = frozenset()

    def look(self, snapshot: Snapshot) -> None:
        """Take in a snapshot; to be called before `note` asks about its jobs."""
        self._failed = frozenset(node.name for node in snapshot.nodes if failed(node.state))
        present = {job.job_id: job for job in snapshot.jobs}
        self._nodes = {i: nodes for i, nodes in self._nodes.items() if i in present}
        for job in present.values():
            if job.running and job.node_names:
                self._nodes[job.job_id] = job.node_names

    def note(self, job: Job, entry: LedgerEntry, attempts: Mapping[str, Attempts]) -> LedgerEntry:
        """The entry with a requeue that was not noted yet."""
        if entry.restarts == job.restarts:
            return entry
        # A job that runs again already tells nothing about the nodes of the attempt before.
        nodes = () if job.running else self._nodes.get(job.job_id, ())
        lost = not self._failed.isdisjoint(nodes)
        return noted(entry, job, attempts.get(job.job_id), lost)

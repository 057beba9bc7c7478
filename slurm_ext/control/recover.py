"""Rebuilds the ledger from the plan documents in the spool after the journal was lost.

The daemon wrote into each job's document what is ours on it. A job number may have been given away
again since, so a document counts only for a job of the same user that was not submitted after it.
Pure: the documents and the queue come in as arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from slurm_ext.control.ledger import Ledger, given_away
from slurm_ext.domain.document import PlanDocument
from slurm_ext.domain.job import Job


def recover(ledger: Ledger, plans: Mapping[int, PlanDocument], jobs: Iterable[Job]) -> list[str]:
    """Take over what the documents say is ours; returns the ids of the jobs recovered."""
    recovered: list[str] = []
    for job in jobs:
        document = plans.get(job.base_id)
        entry = document.ours if document is not None else None
        if document is None or entry is None:
            continue
        if document.user != job.user or given_away(job, entry.first_submit_s):
            continue
        if job.array and "[" in document.job_id and "[" not in job.job_id and job.pending:
            continue  # a single requeued task of the array has an entry of its own
        if not job.array and document.job_id != job.job_id:
            continue
        if ledger.put(replace(entry, job_id=job.job_id)):
            recovered.append(job.job_id)
    return recovered

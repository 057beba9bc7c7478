"""Notices sizes in which Slurm does not start a job although it was let go.

There are limits that we cannot know (billing, licences, a counter of Slurm's that is wrong), and a
job that was grown over one would wait where it could have run as submitted. So such a count is
taken back and not offered again in this attempt. It is noticed at once where Slurm names a limit
as the reason, and otherwise when the policy has lost its patience (`Decision.left_to_slurm`).

Slurm goes on showing an old reason until it next looks at the job, so one that it showed already
when the size was written proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace

from slurm_ext.control.lease import begin_s
from slurm_ext.control.submitted import present_shape, same_size
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry

# Slurm's words for limits of associations, QOS and partitions: AssocGrpGRES, QOSMaxCpuPerUserLimit,
# MaxGRESPerAccount, PartitionTimeLimit ...
_LIMIT = re.compile(r"Assoc\w+|QOS\w+|Max\w+Per\w+|Partition(?:Node|Time)Limit", re.ASCII)


def names_a_limit(reason: str) -> bool:
    """Whether Slurm's reason says that a limit keeps the job from starting."""
    return _LIMIT.fullmatch(reason) is not None


def notice_unstarted(job: Job, entry: LedgerEntry, now: float) -> LedgerEntry:
    """The entry with the present count struck off where Slurm says that a limit is in its way."""
    begin = begin_s(job)
    if (
        not names_a_limit(job.reason)
        or job.reason == entry.reason_before
        or (begin is not None and begin > now)
    ):
        return entry
    return struck_off(job, entry)


def struck_off(job: Job, entry: LedgerEntry) -> LedgerEntry:
    """The entry with the present count struck off, where that is one that we wrote."""
    written, submitted = entry.written, entry.submitted
    if (
        written is None
        or submitted is None
        or entry.given_back
        or job.restarts != entry.attempt
        or written.gpus == submitted.gpus
        or written.gpus in entry.unstarted
        or not same_size(present_shape(job, written.kind), written)
    ):
        return entry
    return replace(entry, unstarted=(*entry.unstarted, written.gpus))

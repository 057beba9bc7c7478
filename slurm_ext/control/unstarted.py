"""Notices sizes in which Slurm does not start a job although it was let go.

There are limits that we cannot know (billing, licences, a counter of Slurm's that is wrong), and a
job that was grown over one would wait where it could have run as submitted. So such a count is
taken back and not offered again in this attempt. It is noticed at once where Slurm names a limit
as the reason, and otherwise when the policy has lost its patience (`Decision.left_to_slurm`).

Slurm goes on showing an old reason until it next looks at the job, so one that it showed already
when the size was written proves nothing.

The submitted size is Slurm's to check, and is struck off only where Slurm's reason bars it for good
(`slurm_ext.domain.reasons`). That is remembered, since a job that waits under a lease has no other
reason than BeginTime.
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

# Shown until Slurm has looked at a job that is new, or whose lease has ended.
_SAYS_NOTHING = frozenset({"", "BeginTime"})


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


def notice_barred(job: Job, entry: LedgerEntry, now: float) -> LedgerEntry:
    """The entry with what Slurm last said about the submitted size, where that bars it."""
    begin, submitted = begin_s(job), entry.submitted
    if (
        job.reason in _SAYS_NOTHING
        or (begin is not None and begin > now)
        or submitted is None
        or job.restarts != entry.attempt
        or (entry.written is not None and job.reason == entry.reason_before)
        or not same_size(present_shape(job, submitted.kind), submitted)
    ):
        return entry
    barred = job.reason if job.bar is not None and job.bar.by_size else ""
    return entry if barred == entry.barred else replace(entry, barred=barred)


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

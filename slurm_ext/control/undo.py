"""What ``slurm-ext release`` writes: everything of ours is taken back.

The same state machine with a plan that wants nothing: shapes, limits and node lists are restored
under a lease, factors cleared, leases lifted last. With the ledger lost less is known, and what is
known suffices to let every job run: a future start that we cannot prove to be ours expires by
itself, once; a SiteFactor on a job with a directive is taken to be ours; a size is compared with
what job_submit.lua recorded. A node list cannot be told from the user's then, and stays.

Held jobs are given back as well: writing their size leaves the hold in place (seen on 24.11.5);
their factor is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_ext.control.reconcile import Reconciled, reconcile
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.submitted import first_sight
from slurm_ext.domain.directive import Directive
from slurm_ext.domain.job import Job
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Plan
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot

_RELEASED = Permit(order=False, reasons=("slurm-ext release took everything back",))


def release_actions(
    snapshot: Snapshot,
    ledger: Mapping[str, LedgerEntry],
    directives: Mapping[str, Directive],
    rules: ActingRules,
    now: float,
    *,
    max_writes: int | None = None,
) -> Reconciled:
    """The next wave that takes back what is ours. Call until there are no actions."""
    known = {
        job.job_id: _known(job, directives.get(job.job_id), ledger.get(job.job_id))
        for job in snapshot.pending()
        if job.job_id in directives or job.job_id in ledger
    }
    # A count that its owner pinned is given back too, while the pin itself is remembered.
    unpinned = {job_id: replace(entry, veto=False) for job_id, entry in known.items()}
    permits = dict.fromkeys(known, _RELEASED)
    nothing = Plan("release", now, {})
    done = reconcile(
        nothing,
        snapshot,
        unpinned,
        permits,
        directives,
        rules,
        now,
        max_writes=max_writes,
        bounded=False,
    )
    entries = {
        job_id: replace(done.entries.get(job_id, entry), veto=entry.veto)
        for job_id, entry in known.items()
    }
    news = {job_id: entry for job_id, entry in entries.items() if entry != ledger.get(job_id)}
    return replace(done, entries=news)


def _known(job: Job, directive: Directive | None, entry: LedgerEntry | None) -> LedgerEntry:
    """The entry, with what Slurm and the directive alone show to be ours filled in."""
    entry = first_sight(job, directive, entry)
    if directive is not None and entry.factor is None and job.site_factor:
        entry = replace(entry, factor=job.site_factor)
    return entry

"""What the daemon remembers about a job: journal rows, and the ledger of what is ours.

The ledger keeps, per job, the submitted values beside the last values that we wrote. Restore means
the last values that we did not write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_ext.domain.attempt import Cause
from slurm_ext.domain.job import Shape

JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Requeue:
    """One return of a job to the queue: when, and why as far as anybody knows."""

    at_s: float
    cause: Cause = Cause.UNKNOWN


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One line of history: a decision, a write, a refusal or an outcome.

    ``terms`` is the JSON text of the decision's terms (empty where there are none).
    """

    at_s: float
    cycle: int
    job_id: str
    event: str
    reason: str
    fields: str = ""
    terms: str = ""
    outcome: str = ""
    version: int = JOURNAL_VERSION


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What is ours on one job.

    ``first_submit_s`` survives requeues (Slurm overwrites SubmitTime). ``lease_until_s`` is the
    StartTime that we wrote last, ``None`` when none is out. ``submitted`` is the shape to restore,
    ``written`` the shape that we wrote last. ``pinned`` tells whether ReqNodeList is ours.
    ``attempt`` is Slurm's restart count at which the entry was made: another count means that the
    job was requeued and must be planned anew. ``veto`` is the user's ``slurm-ext pin``: resizing
    is off, ``veto_gpus`` the count that the user asked to keep (``None`` = as submitted).

    An entry is stored before Slurm is written to, so after a write that never arrived the job
    still carries the value before it: ``lease_before_s``, ``written_before`` and
    ``written_limit_before_s`` keep that one, so that it is not mistaken for the user's.
    ``tries`` counts writes of ``written`` that were not read back. ``given_back`` tells that it was
    written to restore the submitted one (a planned shape may have the same numbers). A shape that
    failed too often is ``failed`` and not tried again in this attempt.

    ``unstarted`` are GPU counts in which Slurm did not start the job in this attempt although it
    was let go: they are not tried again either. ``reason_before`` is Slurm's reason at the time of
    that write, which it goes on showing until it next looks at the job. ``barred`` is the reason
    for which Slurm does not start it in its submitted size, whatever becomes free; under a lease it
    says nothing about that. ``resized_by_hand`` tells that somebody else gave the job another size,
    which it keeps; ``first_nodes`` and ``first_cpus`` are the counts that Slurm showed at first, by
    which later ones are told from those that Slurm derived (``None`` = not known).

    ``requeues`` are the last returns to the queue, the oldest first, ``restarts`` Slurm's count up
    to which they were noted (``None`` = not looked at yet).
    """

    job_id: str
    first_submit_s: float
    attempt: int = 0
    factor: int | None = None
    lease_until_s: float | None = None
    submitted: Shape | None = None
    submitted_limit_s: float | None = None
    submitted_req_nodes: tuple[str, ...] = ()
    written: Shape | None = None
    written_limit_s: float | None = None
    pinned: bool = False
    veto: bool = False
    veto_gpus: int | None = None
    notes: tuple[str, ...] = field(default=())
    lease_before_s: float | None = None
    written_before: Shape | None = None
    written_limit_before_s: float | None = None
    tries: int = 0
    failed: Shape | None = None
    given_back: bool = False
    unstarted: tuple[int, ...] = ()
    reason_before: str = ""
    barred: str = ""
    resized_by_hand: bool = False
    first_nodes: int | None = None
    first_cpus: int | None = None
    requeues: tuple[Requeue, ...] = ()
    restarts: int | None = None

"""Whether a job goes back to the queue, who sends it there, and why. Pure.

Every "no" has a reason that is printed and kept: a job that does not come back without a word is
the worst outcome. The first rule that applies decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ft.requeue.limits import NAMES
from slurm_ft.requeue.record import JobRecord

# An attempt that ended within this time of its start did not get anywhere: it counts as one
# without progress where the program does not tell what it saved.
SHORT_ATTEMPT_S = 60.0


class By(StrEnum):
    """Who sends the job back."""

    NOBODY = "nobody"
    FT_RUN = "ft-run"
    SLURM = "Slurm"
    PROGRAM = "the program"
    SOMEBODY = "somebody"


@dataclass(frozen=True, slots=True)
class Case:
    """What the decision is made from.

    ``attempts`` are all attempts with this one last, its end filled in. ``mode`` is that of
    --requeue. ``saved`` says that the session left in order or that the hook succeeded, so that
    there is something to come back to. ``preempt_mode`` is the partition's, empty where unknown.
    ``slurm_holds`` says that Slurm would soon hold the job for coming back by itself too often.
    ``framework`` names one in the program that requeues by itself. ``restarts`` is Slurm's count,
    which bounds the job where no ledger could be kept.
    """

    cause: Cause
    words: str
    attempts: Sequence[Attempt]
    limits: Mapping[Cause, int | None]
    mode: str = "auto"
    saved: bool = False
    record: JobRecord | None = None
    preempt_mode: str = ""
    slurm_holds: bool = False
    framework: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The decision.

    When the job starts again is not decided here: Slurm keeps it back for some time, and the
    daemon for longer after each requeue too many (its cool-down).
    """

    by: By
    reason: str

    @property
    def requeued(self) -> bool:
        """Whether the job comes back."""
        return self.by is not By.NOBODY


def decide(case: Case) -> Answer:
    """The decision for a job whose program has ended."""
    cause, record = case.cause, case.record
    if cause in (Cause.COMPLETED, Cause.CANCELLED):
        return Answer(By.NOBODY, case.words)
    if record is not None and (
        record.restarts > case.restarts or record.state in ("PENDING", "REQUEUED")
    ):
        held = "; it is held there until it is released (scontrol release)"
        return Answer(
            By.SOMEBODY,
            f"{case.words}; the job is in the queue again{held if record.held else ''}"
            f"{_from_zero(case)}",
        )
    if cause is Cause.NODE_FAIL and (record is None or record.requeue):
        return Answer(By.SLURM, f"{case.words}: Slurm requeues the job{_from_zero(case)}")
    preempted = cause is Cause.PREEMPTED or (record is not None and record.preempted)
    if preempted and case.preempt_mode == "REQUEUE" and _requeueable(record):
        # Whatever the cause: Slurm takes every end within the grace for that of the preemption.
        # Asked to requeue it as well, it takes the next end for a preemption, too (seen on 24.11):
        # a start for nothing, which is still better than a job that is held for good.
        if cause is Cause.PREEMPTED and case.slurm_holds and not _forbidden(case):
            return Answer(
                By.FT_RUN, f"{case.words}, and would soon hold it (MaxBatchRequeue is reached)"
            )
        if cause is Cause.PREEMPTED:
            return Answer(By.SLURM, f"{case.words} and requeues it{_from_zero(case)}")
        return Answer(
            By.SLURM,
            f"{case.words}; Slurm is preempting the job and requeues it{_from_zero(case)}",
        )
    refusal = _forbidden(case)
    if not refusal and case.mode == "auto" and case.framework and cause is not Cause.USER_ERROR:
        return Answer(By.PROGRAM, f"{case.words}; {case.framework} requeues by itself")
    refusal = refusal or _refusal(case)
    if refusal:
        return Answer(By.NOBODY, f"{case.words}; {refusal}")
    return Answer(By.FT_RUN, case.words)


def _from_zero(case: Case) -> str:
    """What to tell where Slurm brings a job back that has saved nothing, as far as is known."""
    known = any(a.restored_step is not None or a.saved_step is not None for a in case.attempts)
    if case.saved or known or case.mode == "always" or case.framework:
        return ""
    return (
        "; nothing says that the program saved anything, so it may begin from its start (use a"
        " session or --on-preempt; --requeue=always where it saves by itself)"
    )


def _requeueable(record: JobRecord | None) -> bool:
    return record is not None and record.requeue and record.batch


def _forbidden(case: Case) -> str:
    """Why nobody may requeue the job; empty where somebody may."""
    record = case.record
    if case.mode == "never":
        return "--requeue=never"
    if record is not None and not record.batch:
        return "Slurm requeues batch jobs only; submit it with sbatch"
    if record is not None and not record.requeue:
        return "the job was submitted with --no-requeue; submit it with --requeue"
    return ""


def _refusal(case: Case) -> str:
    """Why ft-run does not requeue the job; empty where it does."""
    loses = not case.saved and case.cause is not Cause.LOST_PEER and not _barely_begun(case)
    if case.mode == "auto" and loses:
        return (
            "nothing says that the program saved anything; use a session or --on-preempt, or"
            " --requeue=always where it saves by itself"
        )
    allowed = case.limits.get(case.cause)
    used = _used(case)
    if allowed is not None and used >= allowed:
        word = NAMES.get(case.cause, case.cause.value)
        if allowed == 0:
            return f"that is not requeued; --max-requeues={word}=N changes it"
        return f"requeued {used} of {allowed} times for this already (--max-requeues={word}=N)"
    idle = _without_progress(case.attempts)
    most = case.limits.get(Cause.NO_PROGRESS)
    if most is not None and case.cause is not Cause.PREEMPTED and 0 < most <= idle:
        return (
            f"{idle} attempts in a row saved nothing new (--max-requeues=no-progress=N);"
            " look at the program's output and at how long a save takes"
        )
    return ""


def _barely_begun(case: Case) -> bool:
    """Whether the signal came before the program could listen, so that coming back loses nothing.

    A program that imports for half a minute dies of it like any other; one that had a session in an
    earlier attempt was about to open it again.
    """
    return _short(case.attempts[-1]) or any(a.restored_step is not None for a in case.attempts[:-1])


def _used(case: Case) -> int:
    """Requeues for this cause so far; where no ledger was kept, all restarts count."""
    earlier = case.attempts[:-1]
    if not earlier and case.restarts:
        return case.restarts
    return sum(1 for attempt in earlier if attempt.cause is case.cause and attempt.requeued)


def _without_progress(attempts: Sequence[Attempt]) -> int:
    """Attempts at the end of the list that saved nothing new.

    One that was paused has lost its time to somebody's wish, not to itself.
    """
    count = 0
    for attempt in reversed(attempts):
        if attempt.saved_step is not None:
            if attempt.saved_step > (attempt.restored_step or 0):
                break
        elif attempt.restored_step is None and not _short(attempt):
            break  # it does not tell; a long one is believed
        count += not attempt.paused_s
    return count


def _short(attempt: Attempt) -> bool:
    return attempt.ended_s is not None and attempt.ended_s - attempt.started_s < SHORT_ATTEMPT_S

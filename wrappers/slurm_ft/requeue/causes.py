"""Why an attempt ended, from what Slurm, the session and the program itself say. Pure.

The order matters. A program that ended well has ended, whatever Slurm meant to do with the job.
Then Slurm's record, because it knows what the program cannot (a preemption looks like a time limit
from inside). Then what the session wrote. What is left is an error of the program.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_ext.domain.attempt import Cause
from slurm_ext.domain.pausing import PAUSE_NOTE, read_paused
from slurm_ft import status as words
from slurm_ft.exits import ASKS_FOR_REQUEUE
from slurm_ft.requeue.record import JobRecord
from slurm_ft.status import Status

# A signal this long before the end of the time limit is taken for its warning, where nobody says
# how long the lead is; Slurm itself sends it up to a minute early.
LONGEST_LEAD_S = 3600.0
LEAD_SLACK_S = 90.0
# Of what a program says, in a reason: 64 attempts share one small file.
MOST_WORDS = 300
# The record of such a job does not tell which of the two it was; the accounting does.
BACK_ALREADY = "Slurm has requeued the job already (preempted, or requeued by somebody)"
# By these a rank dies that did nothing wrong: the OOM killer or a person (KILL), NCCL's watchdog
# after the loss of a peer (ABRT), a node that loses its file system or memory (BUS).
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGABRT, signal.SIGBUS, signal.SIGTERM})
_GIVEN_UP = frozenset({words.LOST_PEER, words.UNDECIDED, words.PLAN_DIFFERS})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known when the program has ended.

    ``asked`` says that a signal to save came, ``code`` is the program's own exit code, ``stopped``
    that ft-run ended the program after the hook, ``forced`` that it had to kill it. ``peers`` are
    exit codes of other ranks whose programs ended by themselves. ``record`` is ``None`` where
    Slurm did not answer. ``lead_s`` is the known time from the signal to the end. ``unlaunched``
    says that Slurm could not start the step on all of its nodes, and killed what it had started.
    """

    attempt: int
    code: int
    now_s: float
    asked: bool = False
    stopped: bool = False
    forced: bool = False
    status: Status | None = None
    record: JobRecord | None = None
    peers: Mapping[int, int] = field(default_factory=dict)
    lead_s: float | None = None
    launcher: bool = False
    unlaunched: bool = False

    @property
    def left(self) -> bool:
        """Whether the session says that it left, and the exit code agrees.

        A launcher has a code of its own, and a program that was killed while leaving has none.
        """
        if self.status is None or self.status.leaving is None:
            return False
        return self.code in ASKS_FOR_REQUEUE or self.launcher or self.code > 128 or self.forced

    @property
    def told(self) -> bool:
        """Whether a signal to save came, to this rank or to one of the others."""
        leaving = None if self.status is None else self.status.leaving
        return self.asked or leaving in (words.SIGNALLED, words.GRACE_OVER)


def classify(evidence: Evidence) -> tuple[Cause, str]:
    """The cause, and the same in plain words."""
    if evidence.code == 0 and not evidence.left:
        return Cause.COMPLETED, "the program ended"
    error = _error_of_a_peer(evidence)
    if evidence.record is not None:
        told = _by_record(evidence.record, evidence)
        if told is not None:
            return told
    if error is not None:
        return error
    if evidence.unlaunched:
        return Cause.LOST_PEER, "Slurm could not start the step: a node did not answer"
    if evidence.left:
        assert evidence.status is not None
        why = evidence.status.leaving or ""
        note = f": {evidence.status.note}" if evidence.status.note else ""
        if why in _GIVEN_UP:
            return Cause.LOST_PEER, f"{why}{note}"
        if why == words.ASKED:
            paused = read_paused(evidence.status.note.removeprefix(PAUSE_NOTE))
            if paused is not None:
                return Cause.OPERATOR, paused.words
            return Cause.DAEMON, f"{why}{note}"
        if why == words.STUCK and not evidence.asked:
            return Cause.NO_PROGRESS, f"{why}{note}"
    if evidence.told and (evidence.left or evidence.stopped or evidence.code > 128):
        if evidence.record is None:
            return Cause.UNKNOWN, "a signal to save came, and Slurm does not say why"
        return Cause.OPERATOR, "a signal to save came from somebody"
    if evidence.code > 128:
        return _by_signal(evidence)
    if evidence.code in ASKS_FOR_REQUEUE:
        return Cause.USER_ERROR, f"exit code {evidence.code} without a session that says so"
    return Cause.USER_ERROR, f"the program ended with {evidence.code}{_its_words(evidence.status)}"


def _its_words(status: Status | None) -> str:
    """The exception that the session saw; an exit by the program's own choice says nothing more."""
    failed = status.failed if status is not None else None
    if not failed or failed.startswith("SystemExit"):
        return ""
    return f": {failed[:MOST_WORDS]}"


def _by_record(record: JobRecord, evidence: Evidence) -> tuple[Cause, str] | None:
    if record.state == "NODE_FAIL" or record.reason.startswith("Node"):
        return Cause.NODE_FAIL, f"a node failed ({record.reason})"
    # By a signal: TERM of the preemption, where the user chose others to mean "save and come back".
    meant = evidence.told or evidence.left or evidence.code > 128 or not record.running
    if record.preempted and meant:
        return Cause.PREEMPTED, "Slurm preempted the job"
    if record.reason == "TimeLimit" or record.state == "TIMEOUT":
        return Cause.TIME_LIMIT, "the time limit was reached"
    if record.restarts > evidence.attempt or record.state in ("PENDING", "REQUEUED"):
        # A preemption without grace does this at once, and PreemptTime is gone (seen on 24.11).
        return Cause.OPERATOR, BACK_ALREADY
    if not record.running:
        return Cause.CANCELLED, f"the job was cancelled (state {record.state})"
    if evidence.told and record.end_s is not None:
        lead_s = LONGEST_LEAD_S if evidence.lead_s is None else evidence.lead_s + LEAD_SLACK_S
        left_s = record.end_s - evidence.now_s
        if left_s <= lead_s:
            return Cause.TIME_LIMIT, f"the time limit ends the job in {max(0.0, left_s):.0f} s"
    return None


def _error_of_a_peer(evidence: Evidence) -> tuple[Cause, str] | None:
    """A rank that fails by itself makes all the others lose a peer: the error is the cause."""
    for rank, code in sorted(evidence.peers.items()):
        if 0 < code <= 128 and code not in ASKS_FOR_REQUEUE:
            return Cause.USER_ERROR, f"the program of rank {rank} ended with {code}"
    return None


def _by_signal(evidence: Evidence) -> tuple[Cause, str]:
    number = evidence.code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if evidence.status is not None and number in _FROM_OUTSIDE:
        return Cause.LOST_PEER, f"the program was ended by {name}"
    return Cause.USER_ERROR, f"the program was ended by {name}"

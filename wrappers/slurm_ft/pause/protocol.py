"""Vocabulary of the coordinated pause: what lies on the board, what happens, what is to be done.

A pause has a number, its *epoch*. Per epoch there is a *board*: a handful of entries in a store
that all ranks and the controller reach. Every entry is written once, the first writer wins, and
nothing is ever taken back, so an old reading is never wrong, only incomplete, and a message that
arrives twice or late changes nothing. The two machines (member.py, controller.py) are pure: no
clock, no store, no torch; timers and readings come in as events, writes and actions go out as
effects. They are level-triggered: each reading yields the writes that the board still lacks, so a
lost write is written again without anybody keeping an account of messages.

    REQUEST   the controller asks                 PAUSED  per rank: memory is released
    ACK       per rank: at a safe point, bound    RESUME  restore and come back, with the reason
    DECISION  commit, or abort with the reason    UP      per rank: restored
    GONE      per rank: ended or died             GO      go, requeue, or abandon with the reason

What keeps ranks together: an acknowledged rank takes no step before it has read an abort or a go;
a commit needs every acknowledgement; a go needs every rank up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from slurm_ext.domain.pausing import Rung as Rung

S = TypeVar("S")

COMMIT = "commit"
GO = "go"
# Everything is saved: the job may leave the node.
REQUEUE = "requeue"
_ABORT = "abort: "
_ABANDON = "abandon: "
MAX_REASON = 300


class Key(StrEnum):
    """An entry of the board. ACK, PAUSED, UP and GONE hold one bit per rank."""

    REQUEST = "request"
    ACK = "ack"
    DECISION = "decision"
    PAUSED = "paused"
    RESUME = "resume"
    UP = "up"
    GO = "go"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Request:
    """One pause as asked for.

    ``wait_s`` bounds the time until the first rank is at a safe point (nobody waits meanwhile, so
    it may be long), ``hold_s`` the pause itself. ``by`` is who asked, for the message.
    """

    epoch: int
    id: str
    rung: Rung = Rung.HOLD
    wait_s: float = 60.0
    hold_s: float = 600.0
    by: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """What a reading found. Ranks are bits: rank r is ``1 << r``; text is empty where unset."""

    request: Request | None = None
    acks: int = 0
    decision: str = ""
    paused: int = 0
    resume: str = ""
    ups: int = 0
    go: str = ""
    gone: int = 0


def everyone(size: int) -> int:
    """The bits of all ranks."""
    return (1 << size) - 1


def abort(reason: str) -> str:
    """Text of a decision not to pause."""
    return _ABORT + reason[:MAX_REASON]


def abandon(reason: str) -> str:
    """Text of a GO that sends the job back to its last checkpoint."""
    return _ABANDON + reason[:MAX_REASON]


def reason_of(text: str) -> str:
    """What stands behind ``abort:`` or ``abandon:``; other texts as they are."""
    return text.removeprefix(_ABORT).removeprefix(_ABANDON)


def name_ranks(bits: int) -> str:
    """``rank 3`` or ``ranks 0-2,5``, for messages."""
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    parts: list[str] = []
    start = 0
    for index, rank in enumerate(ranks):
        if index + 1 == len(ranks) or ranks[index + 1] != rank + 1:
            first = ranks[start]
            parts.append(str(first) if first == rank else f"{first}-{rank}")
            start = index + 1
    return f"rank{'s' if len(ranks) != 1 else ''} {','.join(parts) or 'none'}"


# --- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreed:
    """All ranks stop at this safe point for this epoch: the flag that went through them all."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Read:
    """The board as just read."""

    board: Board


@dataclass(frozen=True, slots=True)
class Timer:
    """The time set by the last Arm is over. The driver delivers it after a fresh Read only, so
    that a process that was stopped does not judge by the clock what it could have read."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The store has not answered for as long as Limits.lost_s."""


@dataclass(frozen=True, slots=True)
class Released:
    """The release ended. A failure has put back what it took away; it says why."""

    failure: str = ""


@dataclass(frozen=True, slots=True)
class Restored:
    """The restore ended. After a failure the state of this rank cannot be trusted."""

    failure: str = ""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Something more urgent, such as a preemption: come back and go on soon."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """To the controller: make this pause."""

    request: Request


@dataclass(frozen=True, slots=True)
class Resume:
    """To the controller: end the pause."""

    reason: str


Event = Agreed | Read | Timer | Lost | Released | Restored | Interrupt | Ask | Resume

# --- effects ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Write an entry of the board unless it is written; the answer does not matter."""

    key: Key
    value: str | Request | int


class Limit(StrEnum):
    """Which duration an Arm means; Limits and the request turn it into seconds."""

    WAIT = "wait"
    ACK = "ack"
    DECIDE = "decide"
    RELEASE = "release"
    RELEASE_ALL = "release all"
    HOLD = "hold"
    HOLD_RANK = "hold on a rank"
    RESTORE = "restore"
    UP = "up"
    UP_ALL = "up all"


@dataclass(frozen=True, slots=True)
class Arm:
    """Start the one timer of this machine anew."""

    limit: Limit


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what the rung names, or leave everything as it was and say why not."""

    rung: Rung


@dataclass(frozen=True, slots=True)
class Restore:
    """Take back what Release gave."""


class End(StrEnum):
    """How a pause ended.

    SKIPPED   this rank did not take part, and nobody can have paused with it
    ABORTED   rolled back before anybody released anything
    RESUMED   paused and resumed (also where a rank could not release: the reason says so)
    SAVED     saved, and the job leaves for the queue
    ABANDONED the job is requeued from its last checkpoint
    UNDECIDED the outcome cannot be read; a bound rank exits for requeue
    REFUSED   the controller did not begin
    """

    SKIPPED = "skipped"
    ABORTED = "aborted"
    RESUMED = "resumed"
    SAVED = "saved"
    ABANDONED = "abandoned"
    UNDECIDED = "undecided"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Step:
    """Go on with training."""

    end: End
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process for a requeue; it must not take another step."""

    end: End
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Tell:
    """From the controller: what became of the request so far."""

    end: End | None
    reason: str = ""
    ranks: int = 0


Effect = Write | Arm | Release | Restore | Step | Exit | Tell


@dataclass(frozen=True, slots=True)
class Turn(Generic[S]):
    """A machine's next state and what is to be done."""

    state: S
    effects: tuple[Effect, ...] = field(default=())

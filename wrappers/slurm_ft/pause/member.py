"""The rank's side of a pause, as a pure state machine.

Before its acknowledgement a rank is free: nobody can commit without it, so whatever goes wrong it
just goes on. From the acknowledgement on it is *bound*: it leaves by reading an abort or a go, and
by nothing else; where the board cannot be read any more it exits for requeue. A controller that
died is replaced by the ranks' own timers: any bound rank may write the abort, the resume or the go,
since the first writer wins and all obey what they then read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slurm_ext.domain.pausing import Paused
from slurm_ft.pause.protocol import (
    COMMIT,
    GO,
    REQUEUE,
    Agreed,
    Arm,
    Board,
    Effect,
    End,
    Event,
    Exit,
    Interrupt,
    Key,
    Limit,
    Lost,
    Read,
    Release,
    Released,
    Request,
    Restore,
    Restored,
    Rung,
    Step,
    Timer,
    Turn,
    Write,
    abandon,
    abort,
    everyone,
    name_ranks,
    reason_of,
)


class Phase(StrEnum):
    """Where a rank is in a pause.

    IDLE      training
    ENTERING  at the safe point, not bound: looks at the board first
    BOUND     acknowledged, waits for the decision
    RELEASING committed, gives back what the rung names
    HELD      has given it back, waits for the resume
    RESTORING takes it back
    UP        whole again, waits until all are
    OUT       must exit
    """

    IDLE = "idle"
    ENTERING = "entering"
    BOUND = "bound"
    RELEASING = "releasing"
    HELD = "held"
    RESTORING = "restoring"
    UP = "up"
    OUT = "out"


# Phases in which the rank has read a commit.
COMMITTED = frozenset({Phase.RELEASING, Phase.HELD, Phase.RESTORING, Phase.UP})
# Phases from which only the board leads back to training.
BOUND = COMMITTED | {Phase.BOUND}


@dataclass(frozen=True, slots=True)
class Member:
    """A rank.

    ``epoch`` is the last one that it dealt with. ``expired`` means that the time of this phase is
    over, ``urgent`` holds the reason of an interrupt, ``failure`` what went wrong on this rank.
    """

    rank: int
    size: int
    epoch: int = 0
    phase: Phase = Phase.IDLE
    request: Request | None = None
    expired: bool = False
    urgent: str = ""
    failure: str = ""

    @property
    def bit(self) -> int:
        """This rank on the board."""
        return 1 << self.rank


def on_member(member: Member, event: Event) -> Turn[Member]:
    """The rank's answer to an event. Events that mean nothing in this phase change nothing."""
    match event:
        case Agreed(epoch):
            if member.phase is not Phase.IDLE:
                return Turn(member)
            if epoch <= member.epoch:
                return Turn(member, (Step(End.SKIPPED, f"pause {epoch} is over"),))
            return Turn(Member(member.rank, member.size, epoch, Phase.ENTERING))
        case Read(board):
            if board.request is None and member.phase in BOUND:
                # A new or an emptied store: what was decided here cannot be learnt any more.
                return _exit(member, End.UNDECIDED, f"pause {member.epoch} left the board")
            return _READ[member.phase](member, board)
        case Timer():
            return _late(member)
        case Lost():
            return _lost(member)
        case Released(failure):
            return _released(member, failure)
        case Restored(failure):
            return _restored(member, failure)
        case Interrupt(reason):
            return Turn(replace(member, urgent=member.urgent or reason))
        case _:
            return Turn(member)


def _leave(member: Member, end: End, reason: str) -> Turn[Member]:
    idle = Member(member.rank, member.size, member.epoch)
    return Turn(idle, (Step(end, reason),))


def _exit(member: Member, end: End, reason: str) -> Turn[Member]:
    return Turn(replace(member, phase=Phase.OUT), (Exit(end, reason),))


def _exit_by(member: Member, go: str) -> Turn[Member]:
    if go == REQUEUE:
        asked = member.request
        if asked is not None and asked.hold_s > 0:
            return _exit(member, End.SAVED, Paused(asked.by, asked.hold_s).words)
        return _exit(member, End.SAVED, "everything is saved")
    return _exit(member, End.ABANDONED, reason_of(go))


def _idle(member: Member, board: Board) -> Turn[Member]:
    return Turn(member)


def _entering(member: Member, board: Board) -> Turn[Member]:
    request = board.request
    if request is None or request.epoch != member.epoch:
        return _leave(member, End.SKIPPED, f"pause {member.epoch} is not on the board")
    if board.go:
        # A process that began after that pause: the others are through it, one way or another.
        return _leave(member, End.SKIPPED, f"pause {member.epoch} is over")
    if board.decision == COMMIT:
        # Nobody commits without this rank: an earlier process of this rank must have taken part.
        return _exit(member, End.UNDECIDED, "committed before this rank acknowledged")
    if board.decision:
        return _leave(member, End.ABORTED, reason_of(board.decision))
    if member.urgent or board.gone:
        reason = member.urgent or f"{name_ranks(board.gone)} ended"
        return Turn(
            Member(member.rank, member.size, member.epoch),
            (Write(Key.DECISION, abort(reason)), Step(End.ABORTED, reason)),
        )
    bound = replace(member, phase=Phase.BOUND, request=request)
    return Turn(bound, (Write(Key.ACK, member.bit), Arm(Limit.DECIDE)))


def _bound(member: Member, board: Board) -> Turn[Member]:
    assert member.request is not None
    if board.decision == COMMIT:
        releasing = replace(member, phase=Phase.RELEASING, expired=False)
        return Turn(releasing, (Arm(Limit.RELEASE), Release(member.request.rung)))
    if board.decision:
        return _leave(member, End.ABORTED, reason_of(board.decision))
    writes: list[Effect] = []
    if not board.acks & member.bit:
        writes.append(Write(Key.ACK, member.bit))
    if member.urgent:
        writes.append(Write(Key.DECISION, abort(member.urgent)))
    elif board.gone:
        writes.append(Write(Key.DECISION, abort(f"{name_ranks(board.gone)} ended")))
    elif member.expired:
        missing = everyone(member.size) & ~board.acks
        reason = f"{name_ranks(missing)} late" if missing else "no decision by the controller"
        writes.append(Write(Key.DECISION, abort(reason)))
    return Turn(member, tuple(writes))


def _releasing(member: Member, board: Board) -> Turn[Member]:
    if board.go:
        return _exit_by(member, board.go)
    if member.failure and not board.resume:
        return Turn(member, (Write(Key.RESUME, member.failure),))
    return Turn(member)


def _held(member: Member, board: Board) -> Turn[Member]:
    assert member.request is not None
    if board.go:
        return _exit_by(member, board.go)
    if board.gone:
        reason = f"{name_ranks(board.gone)} ended while the job was paused"
        return Turn(member, (Write(Key.GO, abandon(reason)),))
    if board.resume:
        # A failure to release was rolled back by the release itself: only the restore counts now.
        restoring = replace(member, phase=Phase.RESTORING, expired=False, failure="")
        return Turn(restoring, (Arm(Limit.RESTORE), Restore()))
    writes: list[Effect] = []
    if not member.failure and not board.paused & member.bit:
        writes.append(Write(Key.PAUSED, member.bit))
    saving = member.request.rung is Rung.JOB
    everybody = everyone(member.size)
    if saving and board.paused == everybody:
        writes.append(Write(Key.GO, REQUEUE))
    elif member.failure:
        writes.append(Write(Key.RESUME, member.failure))
    elif member.urgent:
        writes.append(Write(Key.RESUME, member.urgent))
    elif member.expired and saving:
        missing = everybody & ~board.paused
        writes.append(Write(Key.RESUME, f"{name_ranks(missing)} did not save in time"))
    elif member.expired:
        writes.append(Write(Key.RESUME, "the pause is over"))
    return Turn(member, tuple(writes))


def _restoring(member: Member, board: Board) -> Turn[Member]:
    if board.go:
        return _exit_by(member, board.go)
    if member.failure:
        return Turn(member, (Write(Key.GO, abandon(member.failure)),))
    return Turn(member)


def _up(member: Member, board: Board) -> Turn[Member]:
    if board.go == GO:
        return _leave(member, End.RESUMED, board.resume)
    if board.go:
        return _exit_by(member, board.go)
    if member.failure:
        return Turn(member, (Write(Key.GO, abandon(member.failure)),))
    if board.gone:
        reason = f"{name_ranks(board.gone)} ended while the job was paused"
        return Turn(member, (Write(Key.GO, abandon(reason)),))
    writes: list[Effect] = []
    if not board.ups & member.bit:
        writes.append(Write(Key.UP, member.bit))
    missing = everyone(member.size) & ~board.ups
    if not missing:
        writes.append(Write(Key.GO, GO))
    elif member.expired:
        writes.append(Write(Key.GO, abandon(f"{name_ranks(missing)} did not come back")))
    return Turn(member, tuple(writes))


def _out(member: Member, board: Board) -> Turn[Member]:
    return Turn(member)


_READ = {
    Phase.IDLE: _idle,
    Phase.ENTERING: _entering,
    Phase.BOUND: _bound,
    Phase.RELEASING: _releasing,
    Phase.HELD: _held,
    Phase.RESTORING: _restoring,
    Phase.UP: _up,
    Phase.OUT: _out,
}


def _late(member: Member) -> Turn[Member]:
    if member.phase in (Phase.IDLE, Phase.OUT) or member.expired:
        return Turn(member)
    late = replace(member, expired=True)
    if member.phase is Phase.RELEASING:
        reason = f"rank {member.rank} did not release in time"
        return Turn(replace(late, failure=reason), (Write(Key.RESUME, reason),))
    if member.phase is Phase.RESTORING:
        reason = f"rank {member.rank} did not restore in time"
        return Turn(replace(late, failure=reason), (Write(Key.GO, abandon(reason)),))
    return Turn(late)


def _lost(member: Member) -> Turn[Member]:
    if member.phase in (Phase.IDLE, Phase.OUT):
        return Turn(member)
    if member.phase is Phase.ENTERING:
        return _leave(member, End.SKIPPED, "the store of the pause does not answer")
    return _exit(
        member,
        End.UNDECIDED,
        f"the store of the pause does not answer; rank {member.rank} was {member.phase.value}",
    )


def _released(member: Member, failure: str) -> Turn[Member]:
    if member.phase is not Phase.RELEASING:
        return Turn(member)
    assert member.request is not None
    failed = member.failure or (failure and f"rank {member.rank} could not release: {failure}")
    held = replace(member, phase=Phase.HELD, expired=False, failure=failed)
    if failed:
        return Turn(held, (Arm(Limit.UP_ALL), Write(Key.RESUME, failed)))
    saving = member.request.rung is Rung.JOB
    limit = Limit.RELEASE_ALL if saving else Limit.HOLD_RANK
    return Turn(held, (Arm(limit), Write(Key.PAUSED, member.bit)))


def _restored(member: Member, failure: str) -> Turn[Member]:
    if member.phase is not Phase.RESTORING:
        return Turn(member)
    failed = member.failure
    if failure:
        failed = f"rank {member.rank} could not restore: {failure}"
    up = replace(member, phase=Phase.UP, expired=False, failure=failed)
    if failed:
        return Turn(up, (Arm(Limit.UP), Write(Key.GO, abandon(failed))))
    return Turn(up, (Arm(Limit.UP), Write(Key.UP, member.bit)))

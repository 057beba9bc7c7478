"""The controller's side of a pause, as a pure state machine.

It asks, counts acknowledgements, decides, and watches the way back; it never makes a rank do
anything that the board does not say. If it dies, the ranks finish without it (member.py), and a
new one begins with the next epoch after looking at how the last one stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slurm_ft.pause.protocol import (
    COMMIT,
    GO,
    REQUEUE,
    Arm,
    Ask,
    Board,
    Effect,
    End,
    Event,
    Key,
    Limit,
    Lost,
    Read,
    Request,
    Resume,
    Rung,
    Tell,
    Timer,
    Turn,
    Write,
    abandon,
    abort,
    everyone,
    name_ranks,
    reason_of,
)


class Stage(StrEnum):
    """Where the controller is.

    IDLE       nothing is asked
    ASKING     the request is out, no rank is at a safe point yet: nobody waits
    COLLECTING some ranks are bound
    RELEASING  committed, not all have released
    HELD       all are paused
    RETURNING  resume is on the board, no rank is up: nobody waits
    GATHERING  some ranks are up and wait for the others
    DONE       told how it ended
    """

    IDLE = "idle"
    ASKING = "asking"
    COLLECTING = "collecting"
    RELEASING = "releasing"
    HELD = "held"
    RETURNING = "returning"
    GATHERING = "gathering"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Controller:
    """One pause from the outside. ``resume`` is the reason of a wish to end it."""

    size: int
    stage: Stage = Stage.IDLE
    request: Request | None = None
    expired: bool = False
    resume: str = ""


def settled(board: Board) -> bool:
    """Whether the epoch of this board is over for good, so that the next one may begin."""
    if board.request is None:
        return False
    if board.decision and board.decision != COMMIT:
        return True
    return bool(board.go)


def on_controller(controller: Controller, event: Event) -> Turn[Controller]:
    """The controller's answer to an event."""
    match event:
        case Ask(request):
            if controller.stage is not Stage.IDLE:
                return Turn(controller)
            asking = replace(controller, stage=Stage.ASKING, request=request)
            return Turn(asking, (Write(Key.REQUEST, request), Arm(Limit.WAIT)))
        case Resume(reason):
            return Turn(replace(controller, resume=controller.resume or reason))
        case Timer():
            return Turn(replace(controller, expired=True))
        case Lost() if controller.stage not in (Stage.IDLE, Stage.DONE):
            return _tell(controller, End.UNDECIDED, "the store of the pause does not answer")
        case Read(board) if controller.stage not in (Stage.IDLE, Stage.DONE):
            return _read(controller, board)
        case _:
            return Turn(controller)


def _tell(controller: Controller, end: End, reason: str, ranks: int = 0) -> Turn[Controller]:
    return Turn(replace(controller, stage=Stage.DONE), (Tell(end, reason, ranks),))


def _to(controller: Controller, stage: Stage, *effects: Effect) -> Turn[Controller]:
    return Turn(replace(controller, stage=stage, expired=False), effects)


def _read(controller: Controller, board: Board) -> Turn[Controller]:
    request = controller.request
    assert request is not None
    everybody = everyone(controller.size)
    if board.request is not None and board.request.id != request.id:
        return _tell(controller, End.REFUSED, f"another pause is under way ({board.request.by})")
    if board.go == GO:
        return _tell(controller, End.RESUMED, board.resume)
    if board.go == REQUEUE:
        return _tell(controller, End.SAVED, "saved, the job goes back to the queue")
    if board.go:
        reason = reason_of(board.go)
        return _tell(controller, End.ABANDONED, reason, everybody & ~board.ups)
    if board.decision and board.decision != COMMIT:
        reason = reason_of(board.decision)
        return _tell(controller, End.ABORTED, reason, everybody & ~board.acks)
    if board.decision == COMMIT:
        return _committed(controller, request, board)
    return _undecided(controller, request, board)


def _undecided(controller: Controller, request: Request, board: Board) -> Turn[Controller]:
    everybody = everyone(controller.size)
    if controller.stage is Stage.ASKING and board.acks:
        return _to(controller, Stage.COLLECTING, Arm(Limit.ACK))
    effects: list[Effect] = []
    if board.request is None:
        effects.append(Write(Key.REQUEST, request))
    missing = everybody & ~board.acks
    if board.gone:
        effects.append(Write(Key.DECISION, abort(f"{name_ranks(board.gone)} ended")))
    elif controller.resume:
        effects.append(Write(Key.DECISION, abort(controller.resume)))
    elif not missing:
        effects.append(Write(Key.DECISION, COMMIT))
    elif controller.expired:
        # Ranks agree on a safe point first, so that a slow one keeps all of them from it.
        which = "no rank" if missing == everybody else f"not {name_ranks(missing)}"
        slow = "; one slow rank holds up all" if missing == everybody else ""
        effects.append(Write(Key.DECISION, abort(f"{which} at a safe point in time{slow}")))
    return Turn(controller, tuple(effects))


def _committed(controller: Controller, request: Request, board: Board) -> Turn[Controller]:
    everybody = everyone(controller.size)
    stage = controller.stage
    if stage in (Stage.ASKING, Stage.COLLECTING):
        return _to(controller, Stage.RELEASING, Arm(Limit.RELEASE_ALL))
    if board.gone:
        reason = f"{name_ranks(board.gone)} ended while the job was paused"
        return Turn(controller, (Write(Key.GO, abandon(reason)),))
    if board.resume:
        return _returning(controller, board)
    missing = everybody & ~board.paused
    if stage is Stage.RELEASING:
        if not missing:
            if request.rung is Rung.JOB:
                return Turn(controller, (Write(Key.GO, REQUEUE),))
            return _to(controller, Stage.HELD, Arm(Limit.HOLD), Tell(None, "paused"))
        if controller.resume:
            return Turn(controller, (Write(Key.RESUME, controller.resume),))
        if controller.expired:
            late = f"{name_ranks(missing)} did not release in time"
            return Turn(controller, (Write(Key.RESUME, late),))
        return Turn(controller)
    if controller.resume or controller.expired:
        return Turn(controller, (Write(Key.RESUME, controller.resume or "the pause is over"),))
    return Turn(controller)


def _returning(controller: Controller, board: Board) -> Turn[Controller]:
    missing = everyone(controller.size) & ~board.ups
    if controller.stage is Stage.GATHERING:
        if not missing:
            return Turn(controller, (Write(Key.GO, GO),))
        if controller.expired:
            lost = abandon(f"{name_ranks(missing)} did not come back")
            return Turn(controller, (Write(Key.GO, lost),))
        return Turn(controller)
    if board.ups:
        return _to(controller, Stage.GATHERING, Arm(Limit.UP_ALL))
    if controller.stage is not Stage.RETURNING:
        return _to(controller, Stage.RETURNING, Arm(Limit.UP_ALL))
    if controller.expired:
        # A job that Slurm suspended comes back when it is woken, however late: not a failure.
        late = Tell(None, f"no rank has come back yet ({board.resume})")
        return _to(controller, Stage.RETURNING, Arm(Limit.UP_ALL), late)
    return Turn(controller)

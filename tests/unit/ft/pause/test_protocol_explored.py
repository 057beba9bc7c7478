"""The protocol is searched exhaustively, and the search finds what is wrong with mutants of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from slurm_ft.pause.controller import Controller, on_controller
from slurm_ft.pause.member import Member, Phase, on_member
from slurm_ft.pause.protocol import (
    COMMIT,
    GO,
    End,
    Event,
    Key,
    Lost,
    Read,
    Restored,
    Rung,
    Step,
    Turn,
    Write,
    everyone,
)
from tests.bench.pause_explore import Explorer, Rules


@pytest.mark.parametrize("rung", [Rung.MEMORY, Rung.JOB])
def test_two_ranks_survive_any_single_fault(rung: Rung) -> None:
    found = Explorer(2, rung, faults=1, interrupts=False).run()
    assert not found.violation, "\n".join(found.trace)
    want = {"aborted", "never began", "requeued", "resumed"}
    assert found.ends == (want | {"saved"} if rung is Rung.JOB else want)


def test_three_ranks_without_faults_under_any_timing() -> None:
    found = Explorer(3, Rung.MEMORY, faults=0).run()
    assert not found.violation, "\n".join(found.trace)
    assert found.states > 10_000


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rung", [Rung.MEMORY, Rung.JOB])
@pytest.mark.parametrize(("size", "faults"), [(2, None), (3, 1)])
def test_unbounded_faults(size: int, faults: int | None, rung: Rung) -> None:
    found = Explorer(size, rung, faults=faults, interrupts=size == 2).run()
    assert not found.violation, "\n".join(found.trace)


# --- mutants: each breaks one rule of the protocol ----------------------------------------------


def _goes_without_all_up(member: Member, event: Event) -> Turn[Member]:
    """No all-up barrier: believes that everybody is up as soon as it is itself."""
    if isinstance(event, Read) and member.phase is Phase.UP:
        event = Read(replace(event.board, ups=everyone(member.size)))
    return on_member(member, event)


def _steps_when_up(member: Member, event: Event) -> Turn[Member]:
    """Goes on as soon as it has restored."""
    if isinstance(event, Restored) and not event.failure and member.phase is Phase.RESTORING:
        return Turn(Member(member.rank, member.size, member.epoch), (Step(End.RESUMED),))
    return on_member(member, event)


def _bound_rank_goes_on_when_lost(member: Member, event: Event) -> Turn[Member]:
    """Takes silence of the store for an abort."""
    if isinstance(event, Lost) and member.phase is Phase.BOUND:
        return Turn(Member(member.rank, member.size, member.epoch), (Step(End.ABORTED),))
    return on_member(member, event)


def _decides_alone(member: Member, event: Event) -> Turn[Member]:
    """Aborts by its own clock without asking the board who was first."""
    turn = on_member(member, event)
    if member.phase is Phase.BOUND and any(
        isinstance(effect, Write) and effect.key is Key.DECISION for effect in turn.effects
    ):
        idle = Member(member.rank, member.size, member.epoch)
        return Turn(idle, (*turn.effects, Step(End.ABORTED)))
    return turn


def _trains_on_what_it_could_not_restore(member: Member, event: Event) -> Turn[Member]:
    if isinstance(event, Restored):
        event = Restored()
    return on_member(member, event)


def _never_decides(member: Member, event: Event) -> Turn[Member]:
    """Waits for the controller for ever."""
    turn = on_member(member, event)
    if member.phase is Phase.BOUND:
        kept = tuple(
            e for e in turn.effects if not (isinstance(e, Write) and e.key is Key.DECISION)
        )
        return Turn(turn.state, kept)
    return turn


def _commits_early(controller: Controller, event: Event) -> Turn[Controller]:
    """Commits with the first acknowledgement."""
    if isinstance(event, Read) and event.board.acks and not event.board.decision:
        return Turn(controller, (Write(Key.DECISION, COMMIT),))
    return on_controller(controller, event)


def _goes_by_itself(controller: Controller, event: Event) -> Turn[Controller]:
    """Says go with the resume."""
    if isinstance(event, Read) and event.board.resume and not event.board.go:
        return Turn(controller, (Write(Key.GO, GO),))
    return on_controller(controller, event)


MEMBERS: dict[str, Callable[[Member, Event], Turn[Member]]] = {
    "go before all were up": _goes_without_all_up,
    "a bound rank took a step without an abort or a go": _steps_when_up,
    "a rank trains on with a state that it could not restore": (
        _trains_on_what_it_could_not_restore
    ),
}


@pytest.mark.parametrize(("what", "rule"), MEMBERS.items())
def test_search_finds_wrong_member(
    what: str, rule: Callable[[Member, Event], Turn[Member]]
) -> None:
    found = Explorer(2, Rung.MEMORY, Rules(member=rule), faults=1).run()
    assert found.violation == what


@pytest.mark.parametrize("rule", [_bound_rank_goes_on_when_lost, _decides_alone])
def test_search_finds_rank_that_decides_alone(
    rule: Callable[[Member, Event], Turn[Member]],
) -> None:
    found = Explorer(2, Rung.MEMORY, Rules(member=rule), faults=1).run()
    assert found.violation == "a bound rank took a step without an abort or a go"


def test_search_finds_waiting_for_ever() -> None:
    """With a dead controller, ranks that never decide are paused for ever."""
    found = Explorer(2, Rung.MEMORY, Rules(member=_never_decides), faults=1).run()
    assert found.violation in ("nothing can happen any more", "no allowed end can be reached")


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (_commits_early, "a rank is paused without the acknowledgement of all"),
        (_goes_by_itself, "go before all were up"),
    ],
)
def test_search_finds_wrong_controller(
    rule: Callable[[Controller, Event], Turn[Controller]], what: str
) -> None:
    found = Explorer(2, Rung.MEMORY, Rules(controller=rule), faults=1).run()
    assert found.violation == what


def test_search_finds_split_where_the_last_writer_wins() -> None:
    """A decision without compare-and-set."""
    found = Explorer(2, Rung.MEMORY, Rules(write_once=False), faults=1).run()
    assert "changed from" in found.violation

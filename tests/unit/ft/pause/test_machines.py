"""Single turns of the two machines, for what the search does not look at: reasons and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ConfigError
from slurm_ft.pause.controller import Controller, Stage, on_controller, settled
from slurm_ft.pause.limits import Limits, check_limits, fitting_limits
from slurm_ft.pause.member import Member, Phase, on_member
from slurm_ft.pause.protocol import (
    COMMIT,
    GO,
    REQUEUE,
    Agreed,
    Arm,
    Ask,
    Board,
    End,
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
    Tell,
    Timer,
    Write,
    abandon,
    abort,
    everyone,
    name_ranks,
)

REQUEST = Request(1, "a", Rung.MEMORY)
ASKED = Board(request=REQUEST)


def member(phase: Phase = Phase.BOUND, rank: int = 0, **more: object) -> Member:
    """One of three ranks in pause 1."""
    return Member(rank, 3, 1, phase, REQUEST, **more)  # type: ignore[arg-type]


def test_one_pause_from_a_ranks_side() -> None:
    turn = on_member(Member(0, 3), Agreed(1))
    assert turn.state.phase is Phase.ENTERING
    turn = on_member(turn.state, Read(ASKED))
    assert turn.effects == (Write(Key.ACK, 1), Arm(Limit.DECIDE))
    board = replace(ASKED, acks=7, decision=COMMIT)
    turn = on_member(turn.state, Read(board))
    assert turn.effects == (Arm(Limit.RELEASE), Release(Rung.MEMORY))
    turn = on_member(turn.state, Released())
    assert turn.effects == (Arm(Limit.HOLD_RANK), Write(Key.PAUSED, 1))
    board = replace(board, paused=7, resume="asked")
    turn = on_member(turn.state, Read(board))
    assert turn.effects == (Arm(Limit.RESTORE), Restore())
    turn = on_member(turn.state, Restored())
    assert turn.effects == (Arm(Limit.UP), Write(Key.UP, 1))
    turn = on_member(turn.state, Read(replace(board, ups=7, go=GO)))
    assert turn.effects == (Step(End.RESUMED, "asked"),)
    assert turn.state == Member(0, 3, 1)


def test_a_late_rank_reads_the_abort_and_goes_on() -> None:
    turn = on_member(member(Phase.ENTERING), Read(replace(ASKED, decision=abort("rank 0 late"))))
    assert turn.effects == (Step(End.ABORTED, "rank 0 late"),)


def test_a_rank_that_cannot_read_before_its_acknowledgement_goes_on() -> None:
    turn = on_member(member(Phase.ENTERING), Lost())
    assert isinstance(turn.effects[0], Step)


@pytest.mark.parametrize("phase", [Phase.BOUND, Phase.HELD, Phase.RESTORING, Phase.UP])
def test_a_bound_rank_that_cannot_read_never_steps(phase: Phase) -> None:
    turn = on_member(member(phase), Lost())
    assert isinstance(turn.effects[0], Exit)
    assert turn.effects[0].end is End.UNDECIDED
    # And nothing brings it back.
    for event in (Read(replace(ASKED, decision=abort("x"))), Timer(), Agreed(2), Restored()):
        assert on_member(turn.state, event).effects == ()


def test_a_bound_rank_whose_board_is_gone_exits() -> None:
    turn = on_member(member(), Read(Board()))
    assert isinstance(turn.effects[0], Exit)


def test_a_process_that_began_after_a_pause_is_not_taken_for_a_part_of_it() -> None:
    over = replace(ASKED, decision=COMMIT, resume="asked", ups=7, go=GO)
    turn = on_member(member(Phase.ENTERING), Read(over))
    assert turn.effects == (Step(End.SKIPPED, "pause 1 is over"),)


def test_an_epoch_that_is_over_is_skipped() -> None:
    """The flag of a rank that heard late goes round once more."""
    turn = on_member(Member(0, 3, 1), Agreed(1))
    assert isinstance(turn.effects[0], Step)
    assert turn.effects[0].end is End.SKIPPED


def test_missing_ranks_are_named_by_a_rank_in_place_of_a_dead_controller() -> None:
    late = on_member(member(), Timer()).state
    turn = on_member(late, Read(replace(ASKED, acks=0b001)))
    assert turn.effects == (Write(Key.DECISION, abort("ranks 1-2 late")),)


def test_a_failed_release_brings_everybody_back() -> None:
    turn = on_member(member(Phase.RELEASING), Released("no room"))
    assert Write(Key.RESUME, "rank 0 could not release: no room") in turn.effects
    # It was rolled back, so this rank can go on like the others.
    board = replace(ASKED, decision=COMMIT, resume="rank 0 could not release: no room")
    state = on_member(turn.state, Read(board)).state
    assert on_member(state, Restored()).effects == (Arm(Limit.UP), Write(Key.UP, 1))


def test_a_failed_restore_sends_the_job_back() -> None:
    """pause-restore-fails: nobody trains on with a state that one rank has lost."""
    turn = on_member(member(Phase.RESTORING), Restored("cannot allocate"))
    assert Write(Key.GO, abandon("rank 0 could not restore: cannot allocate")) in turn.effects
    turn = on_member(turn.state, Read(replace(ASKED, go=abandon("rank 0 could not restore"))))
    assert turn.effects == (Exit(End.ABANDONED, "rank 0 could not restore"),)


def test_a_preemption_while_paused_resumes() -> None:
    state = on_member(member(Phase.HELD), Interrupt("USR2")).state
    board = replace(ASKED, decision=COMMIT, paused=7)
    assert on_member(state, Read(board)).effects == (Write(Key.RESUME, "USR2"),)


def test_the_last_rung_leaves_when_all_have_saved() -> None:
    saving = replace(REQUEST, rung=Rung.JOB, hold_s=600.0, by="alice")
    state = Member(0, 3, 1, Phase.HELD, saving)
    board = Board(request=saving, decision=COMMIT, acks=7, paused=7)
    assert on_member(state, Read(board)).effects == (Write(Key.GO, REQUEUE),)
    turn = on_member(state, Read(replace(board, go=REQUEUE)))
    assert turn.effects == (Exit(End.SAVED, "paused by alice for 600 s"),)
    # The daemon moves a job: it holds for no time.
    moved = replace(state, request=replace(saving, hold_s=0.0))
    turn = on_member(moved, Read(replace(board, go=REQUEUE)))
    assert turn.effects == (Exit(End.SAVED, "everything is saved"),)


def test_the_controller_names_who_was_late() -> None:
    asking = on_controller(Controller(3), Ask(REQUEST)).state
    assert asking.stage is Stage.ASKING
    collecting = on_controller(asking, Read(replace(ASKED, acks=0b101)))
    assert collecting.effects == (Arm(Limit.ACK),)
    late = on_controller(collecting.state, Timer()).state
    turn = on_controller(late, Read(replace(ASKED, acks=0b101)))
    assert turn.effects == (Write(Key.DECISION, abort("not rank 1 at a safe point in time")),)
    turn = on_controller(late, Read(replace(ASKED, acks=0b101, decision=abort("late"))))
    assert turn.effects == (Tell(End.ABORTED, "late", 0b010),)


def test_a_second_controller_is_refused() -> None:
    other = Board(request=Request(1, "b", by="somebody"))
    asking = on_controller(Controller(3), Ask(REQUEST)).state
    turn = on_controller(asking, Read(other))
    assert isinstance(turn.effects[0], Tell)
    assert turn.effects[0].end is End.REFUSED


def test_a_suspended_job_is_not_given_up_by_the_controller() -> None:
    """No rank is up because all are stopped: the controller waits on, and says so."""
    board = replace(ASKED, acks=7, decision=COMMIT, paused=7, resume="the pause is over")
    state = Controller(3, Stage.RETURNING, REQUEST, expired=True)
    turn = on_controller(state, Read(board))
    assert not any(isinstance(effect, Write) for effect in turn.effects)
    assert turn.state.stage is Stage.RETURNING


def test_settled() -> None:
    assert not settled(Board())
    assert not settled(ASKED)
    assert settled(replace(ASKED, decision=abort("x")))
    assert not settled(replace(ASKED, decision=COMMIT))
    assert settled(replace(ASKED, decision=COMMIT, go=GO))


def test_names_of_ranks() -> None:
    assert name_ranks(0b1) == "rank 0"
    assert name_ranks(0b1000) == "rank 3"
    assert name_ranks(0b101110) == "ranks 1-3,5"


@given(st.sets(st.integers(0, 70), min_size=1))
def test_names_of_ranks_name_every_rank(ranks: set[int]) -> None:
    text = name_ranks(sum(1 << rank for rank in ranks)).split()[1]
    named: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        named.update(range(int(first), int(last or first) + 1))
    assert named == ranks
    assert everyone(71) & sum(1 << rank for rank in ranks) == sum(1 << rank for rank in ranks)


# --- limits -------------------------------------------------------------------------------------


def test_limits_must_fit_the_collective_timeout() -> None:
    """timeout-order: the sum is told, and every value in it."""
    with pytest.raises(ConfigError) as error:
        check_limits(Limits(ack_s=20, slack_s=5, lost_s=10), 36.0, 1.5)
    for part in ("ack_s=20", "slack_s=5", "lost_s=10", "1.5", "36"):
        assert part in str(error.value)
    check_limits(Limits(ack_s=20, slack_s=5, lost_s=10), 37.0, 1.5)


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(slack_s=0.05), "slack_s"),
        (Limits(up_s=10.0), "up_s"),
        (Limits(lost_s=0.0), "lost_s"),
    ],
)
def test_limits_that_undo_themselves(limits: Limits, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check_limits(limits, 600.0, 1.0)


@given(st.floats(0.5, 1e5), st.floats(0.0, 0.99))
def test_fitting_limits_fit(timeout_s: float, share: float) -> None:
    limits = fitting_limits(timeout_s, timeout_s * share)
    assert limits.spread_s + timeout_s * share < timeout_s


def test_no_room_beside_the_longest_step() -> None:
    with pytest.raises(ConfigError, match="600"):
        fitting_limits(600.0, 700.0)

"""Small pure parts: pace, departure, lost peers, what ranks must have in common, wishes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import status
from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.agreement import MOST_STEPS_A_ROUND, Agreement, Kind
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.session.departure import Departure, Word, agree, decide
from slurm_ft.session.errors import SessionError
from slurm_ft.session.interval import Bounds
from slurm_ft.session.lost import lost_peer
from slurm_ft.session.opening import PlanDiffersError, check_alone, compare, differences
from slurm_ft.session.pace import Pace
from slurm_ft.session.saving import ASYNC, Saving
from slurm_ft.session.settings import Settings
from slurm_ft.session.wishes import GATHER_FIRST_S, Wishes
from tests.unit.ft.session.fabric import ThreadComm, on_all

# --- pace ---------------------------------------------------------------------------------------


def test_rate_and_median_leave_out_what_training_stood_still_for() -> None:
    pace = Pace(0.0)
    now = 0.0
    for step in range(1, 21):
        now += 0.1
        if step % 5 == 0:
            now += 3.0
            pace.stood_still(3.0)
        pace.step(now, 32, None)
    assert pace.median_step_s == pytest.approx(0.1)
    assert pace.samples_per_s == pytest.approx(320)
    assert pace.steps == 20


def test_the_rate_is_that_of_the_last_minute() -> None:
    pace = Pace(0.0)
    now = 0.0
    for step_s, steps in ((1.0, 300), (0.5, 200)):
        for _ in range(steps):
            now += step_s
            pace.step(now, 10, None)
    assert pace.samples_per_s == pytest.approx(20)


def test_compute_seconds_are_a_mean_since_the_last_report() -> None:
    """straggler-hidden: the time before the collective, which differs where the step's does not."""
    pace = Pace(0.0)
    pace.step(1.0, 1, 0.2)
    pace.step(2.0, 1, 0.4)
    assert pace.take_compute_s() == pytest.approx(0.3)
    assert pace.take_compute_s() is None
    pace.step(3.0, 1, None)
    assert pace.take_compute_s() is None


def test_nothing_is_known_before_the_first_step() -> None:
    pace = Pace(0.0)
    assert (pace.median_step_s, pace.samples_per_s, pace.steps) == (None, 0.0, 0)


# --- departure ----------------------------------------------------------------------------------

SIGNALLED = Word(7, status.SIGNALLED, "SIGUSR2")


@pytest.mark.parametrize(
    ("left_s", "save_s", "under_way", "finish", "save"),
    [
        (None, 5.0, False, False, True),  # nobody knows of an end
        (None, 5.0, True, True, True),
        (3.0, None, False, False, True),  # nobody knows what a save takes: try
        (10.0, 5.0, False, False, True),  # exactly twice
        (9.9, 5.0, False, False, False),
        (14.9, 5.0, True, True, False),  # enough for the one under way only
        (15.0, 5.0, True, True, True),
        (4.9, 5.0, True, False, False),
        (-1.0, 5.0, False, False, False),
    ],
)
def test_a_save_needs_twice_its_measured_time(
    left_s: float | None, save_s: float | None, under_way: bool, finish: bool, save: bool
) -> None:
    words = [Word(7), replace(SIGNALLED, left_s=left_s), Word(7)]
    departure = decide(words, save_s, under_way=under_way)
    assert (departure.finish, departure.save) == (finish, save)
    assert departure.why == status.SIGNALLED
    assert ("not saved" in departure.note) is not save
    assert "SIGUSR2" in departure.note


@given(st.lists(st.floats(0, 100) | st.none(), min_size=1, max_size=6), st.floats(0.01, 60))
def test_the_rank_with_the_least_time_decides(left: list[float | None], save_s: float) -> None:
    words = [replace(SIGNALLED, left_s=one) for one in left]
    known = [one for one in left if one is not None]
    wanted = not known or min(known) >= 2 * save_s
    assert decide(words, save_s, under_way=False).save is wanted


def test_a_second_signal_on_any_rank_is_enough_to_leave_at_once() -> None:
    departure = decide([Word(7), replace(SIGNALLED, again=True)], 0.1, under_way=True)
    assert not departure.save
    assert not departure.finish
    assert "came again" in departure.note


def test_ranks_at_different_steps_do_not_save_a_mix() -> None:
    departure = decide([SIGNALLED, Word(8)], 0.1, under_way=False)
    assert not departure.save
    assert "rank 0 at 7, rank 1 at 8" in departure.note


def test_a_request_is_no_signal_but_a_signal_outweighs_it() -> None:
    asked = Word(7, status.ASKED, "pause")
    assert decide([asked], None, under_way=False) == Departure(False, True, status.ASKED, "pause")
    assert decide([asked, SIGNALLED], None, under_way=False).why == status.SIGNALLED


def test_all_ranks_take_the_same_decision() -> None:
    def run(comm: ThreadComm) -> Departure:
        word = replace(SIGNALLED, left_s=1.0) if comm.rank == 1 else Word(7)
        # Each rank has measured something else; rank 0's holds.
        return agree(comm, word, 10.0 / (1 + comm.rank), under_way=False, limit_s=5.0)

    first, *others = on_all(3, run)
    assert others == [first, first]
    assert not first.save
    assert "the last save took 10.0 s" in first.note


# --- lost peers ---------------------------------------------------------------------------------


class DistBackendError(RuntimeError):
    """Named as torch names its own."""


class DistNetworkError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    "exc",
    [
        ExchangeLostError("x"),
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:30001"),
        RuntimeError("[unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation"),
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        DistNetworkError("anything"),
    ],
)
def test_what_torch_says_when_a_peer_is_gone(exc: Exception) -> None:
    assert lost_peer(exc)


@pytest.mark.parametrize(
    "exc",
    [
        RuntimeError("CUDA out of memory"),
        ValueError("Connection closed by peer"),
        ConnectionResetError("Connection reset by peer"),  # the user's own download
        DistBackendError("NCCL error: unhandled cuda error"),
        KeyError("timed out waiting"),
    ],
)
def test_an_error_of_the_program_is_one(exc: Exception) -> None:
    assert not lost_peer(exc)


# --- opening ------------------------------------------------------------------------------------


def word(plan: str = "a", attempt: int = 0, directory: str = "/c") -> dict[str, object]:
    return {"plan": plan, "attempt": attempt, "directory": directory}


def test_equal_words_differ_in_nothing() -> None:
    assert differences([word()] * 3) == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([word(), word("b"), word("b")], "the plan (FT_PLAN_DIGEST) differs"),
        ([word(), word(attempt=1)], "the attempt (FT_ATTEMPT) differs"),
        ([word(), word(directory="/d")], "the checkpoint directory (FT_CHECKPOINT_DIR) differs"),
    ],
)
def test_a_difference_names_ranks_and_values(words: list[dict[str, object]], told: str) -> None:
    assert told in differences(words)
    assert "on rank 1" in differences(words)


def test_every_rank_is_told_of_a_difference() -> None:
    def run(comm: ThreadComm) -> str:
        with pytest.raises(PlanDiffersError) as told:
            compare(comm, Settings(plan_digest="abc" if comm.rank == 2 else ""))
        return str(told.value)

    first, *others = on_all(3, run)
    assert others == [first, first]
    assert "'abc' on rank 2" in first


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_many_does_not_take_itself_for_the_only_one(name: str) -> None:
    with pytest.raises(SessionError, match=f"{name}=4.*init_process_group"):
        check_alone(SoloComm(), {name: "4"})
    check_alone(SoloComm(), {name: "1"})
    on_all(2, lambda comm: check_alone(comm, {name: "2"}))


# --- wishes -------------------------------------------------------------------------------------


def test_rank_0_asks_by_its_clock() -> None:
    began = time.monotonic()
    agreement, pace = Agreement(SoloComm()), Pace(began)
    saving = Saving(None, ASYNC)
    wishes = Wishes(agreement, Bounds(10, 10), 1e6, began)
    assert not saving.possible
    for step in range(1, 4):
        pace.step(began + step, 1, None)
        wishes.ask(began + step, step, saving, pace)
    assert not agreement.wants(Kind.SAVE)  # there is nothing to save
    assert not agreement.wants(Kind.REPORT)
    pace.step(began + 4, 1, None)
    wishes.ask(began + GATHER_FIRST_S, 4, saving, pace)
    assert agreement.wants(Kind.REPORT)
    # Steps of a second: each is agreed on at once from here.
    assert agreement.wants(Kind.CADENCE)
    agreed = [agreement.safe_point() for _ in range(6)]
    assert [one.kind for one in agreed if one.kind] == [Kind.REPORT, Kind.CADENCE]
    assert agreement.every == 0


def test_steps_that_become_long_are_soon_agreed_on_one_by_one() -> None:
    """A loop that first skips data in no time, and then begins to train."""
    agreement, pace = Agreement(SoloComm()), Pace(0.0)
    saving = Saving(None, ASYNC)
    wishes = Wishes(agreement, Bounds(10, 10), 1e6, 1e9)
    now, seen = 0.0, []
    for step in range(1, 80):
        now += 0.001 if step < 40 else 0.1
        pace.step(now, 1, None)
        wishes.ask(now, step, saving, pace)
        agreement.safe_point()
        seen.append(agreement.every)
    assert max(seen[:39]) == MOST_STEPS_A_ROUND
    assert seen[40 + 2 * MOST_STEPS_A_ROUND :] == [1] * (39 - 2 * MOST_STEPS_A_ROUND)

"""Agreement: all ranks do the same at the same step, and every wish is granted."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.agreement import (
    MAX_PAYLOAD,
    Agreed,
    Agreement,
    Kind,
    best_cadence,
    pack,
    unpack,
    worth_changing,
)
from slurm_ft.session.comms.solo import SoloComm
from tests.unit.ft.session.fabric import ThreadComm, on_all

WISHES = [Kind.REPORT, Kind.SAVE, Kind.PAUSE, Kind.LEAVE]


@given(st.sampled_from(list(Kind)), st.integers(0, MAX_PAYLOAD))
def test_a_number_tells_kind_and_payload(kind: Kind, payload: int) -> None:
    assert unpack(pack(kind, payload)) == Agreed(kind, payload)
    assert 0 <= pack(kind, payload) < 2**63


@given(st.data())
def test_the_larger_kind_wins_whatever_the_payloads(data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.permutations(list(Kind)))[:2])
    payload = st.integers(0, MAX_PAYLOAD)
    assert pack(low, data.draw(payload)) < pack(high, data.draw(payload))


@pytest.mark.parametrize("payload", [-1, MAX_PAYLOAD + 1])
def test_a_payload_that_does_not_fit_is_refused(payload: int) -> None:
    with pytest.raises(ValueError, match="payload"):
        Agreement(SoloComm()).want(Kind.PAUSE, payload)


def test_a_word_of_another_release_is_no_agreement() -> None:
    with pytest.raises(ExchangeLostError, match="same release"):
        unpack(pack(Kind.LEAVE) + (1 << 60))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 4),
    cadence=st.sampled_from([None, 0, 2, 3]),
    wishes=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.sampled_from(WISHES)), max_size=8
    ),
)
def test_ranks_agree_on_everything_at_the_same_steps(
    size: int, cadence: int | None, wishes: list[tuple[int, int, Kind]]
) -> None:
    """Whatever any rank wants at any step, in any cadence."""

    def run(comm: ThreadComm) -> list[tuple[int, str, int]]:
        agreement = Agreement(comm)
        done = []
        for step in range(60):
            if step == 4 and cadence is not None and comm.rank == 0:
                agreement.want(Kind.CADENCE, cadence)
            for rank, at, kind in wishes:
                if at == step and rank % size == comm.rank:
                    agreement.want(kind, step)
            agreed = agreement.safe_point()
            if agreed.kind is not Kind.NOTHING:
                # Exchanges of its own in between: the fabric finds ranks that are not together.
                comm.barrier()
                done.append((step, agreed.kind.name, agreed.payload))
        assert agreement.drain() == Agreed(Kind.NOTHING)
        assert not any(agreement.wants(kind) for kind in Kind)
        return done

    first, *others = on_all(size, run)
    assert all(other == first for other in others)
    granted = {name for _, name, _ in first}
    assert granted >= {kind.name for _, _, kind in wishes}
    if cadence is not None:
        assert (Kind.CADENCE.name, cadence) in [(name, value) for _, name, value in first]


def test_one_rank_is_enough_and_two_steps_later_all_act() -> None:
    def run(comm: ThreadComm) -> int | None:
        agreement = Agreement(comm)
        for step in range(1, 20):
            if step == 7 and comm.rank == 2:
                agreement.want(Kind.LEAVE)
            if agreement.safe_point().kind is Kind.LEAVE:
                return step
        return None

    assert on_all(3, run) == [8, 8, 8]


def test_a_long_step_is_answered_at_once() -> None:
    def run(comm: ThreadComm) -> int | None:
        agreement = Agreement(comm)
        if comm.rank == 0:
            agreement.want(Kind.CADENCE, 0)
        for step in range(1, 20):
            if step == 7 and comm.rank == 1:
                agreement.want(Kind.LEAVE)
            if agreement.safe_point().kind is Kind.LEAVE:
                return step
        return None

    assert on_all(2, run) == [7, 7]


def test_short_steps_exchange_seldom() -> None:
    def run(comm: ThreadComm) -> int:
        agreement = Agreement(comm)
        if comm.rank == 0:
            agreement.want(Kind.CADENCE, 10)
        for _ in range(100):
            agreement.safe_point()
        agreement.drain()
        return comm.exchanges

    # One to agree on it, then one at every tenth of the 98 steps that are left.
    assert on_all(2, run) == [10, 10]


def test_a_later_epoch_than_agreed_on_stays_wanted() -> None:
    agreement = Agreement(SoloComm())
    agreement.want(Kind.PAUSE, 1)
    assert agreement.safe_point().kind is Kind.NOTHING  # under way with epoch 1
    agreement.want(Kind.PAUSE, 2)
    assert agreement.safe_point() == Agreed(Kind.PAUSE, 1)
    assert agreement.wants(Kind.PAUSE)
    agreement.safe_point()
    assert agreement.safe_point() == Agreed(Kind.PAUSE, 2)
    assert not agreement.wants(Kind.PAUSE)


def test_done_means_done_on_every_rank() -> None:
    """The slowest of three is done at its 20th step; nobody is told before, all together after."""

    def run(comm: ThreadComm) -> int | None:
        agreement = Agreement(comm)
        rng = random.Random(comm.rank)
        ready_at = [3, 20, rng.randrange(10)][comm.rank]
        for step in range(40):
            agreement.safe_point()
            if agreement.all_done(step >= ready_at):
                return step
        return None

    steps = on_all(3, run)
    assert steps == [21, 21, 21]


@pytest.mark.parametrize(
    ("step_s", "every"), [(60.0, 0), (0.5, 0), (0.1, 1), (0.03, 1), (0.005, 5), (0.0, 10)]
)
def test_cadence_follows_the_length_of_a_step(step_s: float, every: int) -> None:
    assert best_cadence(step_s) == every


@pytest.mark.parametrize(
    ("present", "wanted", "worth"),
    [(1, 1, False), (1, 0, True), (0, 1, True), (4, 5, False), (4, 8, True), (8, 4, True)],
)
def test_small_changes_of_the_cadence_are_not_worth_it(
    present: int, wanted: int, worth: bool
) -> None:
    assert worth_changing(present, wanted) is worth


def test_a_lost_peer_is_told() -> None:
    def run(comm: ThreadComm) -> Any:
        agreement = Agreement(comm)
        if comm.rank == 1:
            return None
        agreement.safe_point()
        with pytest.raises(ExchangeLostError):
            agreement.safe_point(limit_s=0.05)
        return "told"

    assert on_all(2, run) == ["told", None]

"""Maxima through memory, seen by one rank whose peers are played by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.comms.board import AHEAD, ROW_BYTES, Board
from slurm_ft.session.comms.shared_max import SharedMax

FIRST = 2  # the first round; the one before it was the proof


class Peers:
    """The other ranks: what they show, and what a look at their locks tells."""

    def __init__(self, size: int) -> None:
        memory = memoryview(bytearray(size * ROW_BYTES))
        self.boards = [Board(memory, rank, size) for rank in range(size)]
        self.looks: list[int] = []
        self.at_look: Callable[[int], bool] = lambda rank: True
        segment: Any = self
        self.maxima = SharedMax(segment, self.boards[0], 0, limit_s=5.0)

    def alive(self, rank: int) -> bool:
        self.looks.append(rank)
        return self.at_look(rank)

    def show(self, number: int, value: int = 0) -> None:
        for board in self.boards[1:]:
            board.put(number, value)


def test_what_all_have_shown_is_read_without_a_look() -> None:
    peers = Peers(3)
    pending = peers.maxima.start_max(4)
    assert not pending.done()
    peers.show(FIRST, 9)
    assert pending.done()
    assert pending.result(limit_s=0.0) == 9
    assert peers.looks == []


def test_a_rank_that_came_and_ended_between_two_looks_has_come() -> None:
    """Seen missing, then seen dead; what it showed in between counts."""
    peers = Peers(2)
    pending = peers.maxima.start_max(4)

    def comes_and_ends(rank: int) -> bool:
        peers.show(FIRST, 6)
        return False

    peers.at_look = comes_and_ends
    assert pending.result() == 6
    assert peers.looks == [1]


def test_of_two_that_are_missing_the_dead_one_is_named() -> None:
    peers = Peers(4)
    peers.boards[3].put(FIRST, 0)
    peers.at_look = lambda rank: rank != 2
    with pytest.raises(ExchangeLostError, match=r"^rank 0: maximum failed: rank 2 ended"):
        peers.maxima.start_max(1).result()
    assert sorted(peers.looks) == [1, 2], "neither itself nor one that has come is looked at"


def test_many_that_are_missing_are_counted() -> None:
    peers = Peers(20)
    with pytest.raises(ExchangeLostError, match="ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more did not"):
        peers.maxima.start_max(1).result(limit_s=0.01)


def test_a_round_that_nobody_asks_for_holds_up_the_one_that_needs_its_place() -> None:
    """And no other: as many as are allowed are begun without a wait."""
    peers = Peers(2)
    rounds = [peers.maxima.start_max(number) for number in range(AHEAD)]
    peers.show(FIRST, 70)

    def dead(rank: int) -> bool:
        raise AssertionError("it waited, though the oldest round has ended")

    peers.at_look = dead
    rounds.append(peers.maxima.start_max(0))
    assert rounds[0].result() == 70
    peers.at_look = lambda rank: False
    with pytest.raises(ExchangeLostError, match="rank 1 ended"):
        peers.maxima.start_max(0)


def test_a_value_that_fits_no_word_is_refused_and_costs_no_round() -> None:
    peers = Peers(2)
    with pytest.raises(ValueError, match="it fits no word"):
        peers.maxima.start_max(1 << 60)
    pending = peers.maxima.start_max(3)
    peers.show(FIRST, 1)
    assert pending.result() == 3

"""The board of ranks that share memory: whole numbers in, the maximum out, no round mixed up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft.session.agreement import MAX_PAYLOAD, Kind, pack
from slurm_ft.session.comms.board import AHEAD, LARGEST, ROW_BYTES, SLOTS, SMALLEST, Board

VALUES = st.integers(SMALLEST, LARGEST)


def boards(size: int) -> list[Board]:
    """The same memory as each of its ranks sees it."""
    memory = memoryview(bytearray(size * ROW_BYTES))
    return [Board(memory, rank, size) for rank in range(size)]


@settings(deadline=None)  # of the first example, on a machine with other work
@given(st.lists(VALUES, min_size=1, max_size=6), st.integers(1, 1 << 40))
def test_the_largest_of_all_values_comes_out(values: list[int], number: int) -> None:
    ranks = boards(len(values))
    for board in ranks:
        if number > SLOTS:
            board.put(number - SLOTS, LARGEST)  # what a row holds before a round
    for board, value in zip(ranks, values, strict=True):
        assert board.maximum(number) is None
        board.put(number, value)
    assert {board.maximum(number) for board in ranks} == {max(values)}
    assert ranks[0].missing(number) == []


def test_every_kind_with_every_payload_fits() -> None:
    for kind in Kind:
        for payload in (0, 1, MAX_PAYLOAD):
            (board,) = boards(1)
            board.put(1, pack(kind, payload))
            assert board.maximum(1) == pack(kind, payload)


@pytest.mark.parametrize("value", [SMALLEST - 1, LARGEST + 1, 1 << 63, -(1 << 63)])
def test_a_value_that_fits_no_word_is_refused_and_changes_nothing(value: int) -> None:
    (board,) = boards(1)
    board.put(1, 7)
    with pytest.raises(ValueError, match=f"value={value} is outside"):
        board.put(2, value)
    assert board.maximum(1) == 7
    assert board.maximum(2) is None


def test_who_has_not_come_is_named() -> None:
    ranks = boards(4)
    for rank in (0, 2):
        ranks[rank].put(1, rank)
    assert ranks[0].missing(1) == [1, 3]
    assert ranks[3].missing(1) == [1, 3]


@pytest.mark.parametrize("lag", range(1, SLOTS + 1))
def test_an_older_round_is_never_taken_for_this_one(lag: int) -> None:
    """Over more rounds than the number in a word can count, at each distance that can occur."""
    ahead, behind = boards(2)
    for number in range(1, 3 * 256):
        ahead.put(number, LARGEST)
        if number - lag >= 1:
            behind.put(number - lag, SMALLEST)
        assert ahead.maximum(number) is None
        assert ahead.missing(number) == [1]


def test_ranks_that_keep_their_distance_read_every_round_right() -> None:
    """Any order of steps that the rule allows: the result of n - AHEAD before n is begun."""
    rng = random.Random(1)
    size, rounds = 3, 1500
    said = [[rng.randint(-9, 9) for _ in range(rounds + 1)] for _ in range(size)]
    ranks = boards(size)
    begun, read = [0] * size, [0] * size
    while min(read) < rounds:
        rank = rng.randrange(size)
        board = ranks[rank]
        if rng.random() < 0.5 and begun[rank] < min(rounds, read[rank] + AHEAD):
            begun[rank] += 1
            board.put(begun[rank], said[rank][begun[rank]])
        elif read[rank] < begun[rank]:
            found = board.maximum(read[rank] + 1)
            if found is not None:
                read[rank] += 1
                assert found == max(values[read[rank]] for values in said)
    assert begun == read == [rounds] * size


def test_rows_are_cache_lines_and_memory_of_another_size_is_refused() -> None:
    assert ROW_BYTES == 64
    with pytest.raises(ValueError, match="no board of 2 rows"):
        Board(memoryview(bytearray(ROW_BYTES)), 0, 2)


def test_released_memory_can_be_given_back() -> None:
    memory = bytearray(2 * ROW_BYTES)
    view = memoryview(memory)
    board = Board(view, 0, 2)
    board.release()
    view.release()
    memory.extend(b"x")  # a BufferError while anybody looks at it

"""Numbers that ranks of one node show each other in memory: one row of words for each rank.

A rank writes into its own row only. One word holds both the value and the number of the round that
it is for, so whoever reads a word knows what it is of, whatever else of the memory it sees early or
late: nothing is assumed about the order of two writes. Words are whole: CPython moves each of them
by one eight-byte copy to an aligned address, which on 64-bit machines is one move.

**Why nobody overwrites what another has still to read.** A rank begins round n only after it has
the result of round n - AHEAD (`SharedMax` sees to it). So all ranks have begun n - AHEAD, for which
each of them had the result of n - 2 * AHEAD: no rank will read that round again. With
SLOTS = 2 * AHEAD words to a row, the word of round n takes the place of just that round. (That a
write which depends on what was read comes after the reading holds on every machine.)

No I/O, no waiting, and no idea of where the memory comes from.
"""

from __future__ import annotations

# Rounds that may be begun before the oldest of them is read: the wish, whether a save is done, and
# as many again.
AHEAD = 4
SLOTS = 2 * AHEAD
ROW_BYTES = 8 * SLOTS  # one cache line, so that ranks do not write into each other's
# Of a word, the upper bits are the round's number, counted anew from 0 after 255. Eight of them
# tell a round from the only other one that the word may hold, the one SLOTS before.
_VALUE_BITS = 56
_SPAN = 1 << _VALUE_BITS
_ROUNDS = 1 << (64 - _VALUE_BITS)
# Values are kept as seen from the smallest one, which may be negative.
_HALF = _SPAN // 2
SMALLEST, LARGEST = -_HALF, _HALF - 1


class Board:
    """The rows of all ranks, seen by one of them. Rounds are numbered from 1.

    ``memory`` has ``size * ROW_BYTES`` bytes, aligned to eight and zero before the first round.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        if len(memory) != size * ROW_BYTES:
            raise ValueError(f"{len(memory)} bytes are no board of {size} rows of {ROW_BYTES}")
        self._words = memory.cast("B").cast("Q")
        self._row = rank * SLOTS
        # For each slot the words of all ranks: read by one call, without a loop in Python.
        self._slots = [self._words[slot::SLOTS] for slot in range(SLOTS)]

    def put(self, number: int, value: int) -> None:
        """Show this rank's value of a round. Raises ValueError for one that fits no word."""
        if not SMALLEST <= value <= LARGEST:
            raise ValueError(f"value={value} is outside {SMALLEST}..{LARGEST}: it fits no word")
        base = number % _ROUNDS << _VALUE_BITS
        self._words[self._row + number % SLOTS] = base | (value + _HALF)

    def maximum(self, number: int) -> int | None:
        """The largest value of a round, ``None`` while a rank has not shown its own."""
        base = number % _ROUNDS << _VALUE_BITS
        words = self._slots[number % SLOTS].tolist()
        highest = max(words)
        if min(words) < base or highest >= base + _SPAN:
            return None
        return highest - base - _HALF

    def missing(self, number: int) -> list[int]:
        """The ranks that have not shown theirs."""
        base = number % _ROUNDS << _VALUE_BITS
        words = self._slots[number % SLOTS].tolist()
        return [rank for rank, word in enumerate(words) if not base <= word < base + _SPAN]

    def release(self) -> None:
        """Let go of the memory, which could not be unmapped otherwise."""
        for words in (*self._slots, self._words):
            words.release()

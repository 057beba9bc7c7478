"""Maxima of ranks that share a node: through memory, for a microsecond instead of a message.

Gloo's all-reduce of one number costs each rank some hundred microseconds of processor time, for a
thread that must wake up and for every hop; that is all of what agreement costs. Here a maximum is
begun by one store and read by one load, nothing runs meanwhile, and no rank is woken up.

Whether it is used is agreed on with the ranks' communicator, once: either every rank has the memory
and has seen in it what every other one wrote, or none of them uses it. Anything but a maximum
stays with that communicator.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict

from slurm_ft.comm import Comm, ExchangeLostError
from slurm_ft.session.comms.board import AHEAD, ROW_BYTES, Board
from slurm_ft.session.comms.segment import Offer, Segment, SegmentError, create, join

# The first sleep of a wait, and the longest. In between a sleep is this share of what was waited
# for already, so that a short wait ends soon and a long one costs no processor time.
_FIRST_SLEEP_S = 0.00005
_LONGEST_SLEEP_S = 0.005
_SLEEP_SHARE = 1 / 16
# How often a wait looks whether those it waits for are alive.
_LOOK_S = 0.2
# The round by which ranks find out that they have memory in common.
_PROOF = 1

_log = logging.getLogger(__name__)


class _PendingMax:
    """One round, from the moment at which this rank has shown its value."""

    __slots__ = ("_maxima", "number", "value")

    def __init__(self, maxima: SharedMax, number: int) -> None:
        self._maxima = maxima
        self.number = number
        self.value: int | None = None

    def done(self) -> bool:
        return self.value is not None or self._maxima.ended(self.number)

    def result(self, limit_s: float | None = None) -> int:
        if self.value is None:
            self.value = self._maxima.wait(self.number, limit_s)
        return self.value


class SharedMax:
    """`slurm_ft.comm.Maxima` in a segment that all ranks have; made by `share`."""

    def __init__(self, segment: Segment, board: Board, rank: int, limit_s: float) -> None:
        self._segment = segment
        self._board = board
        self._rank = rank
        self._limit_s = limit_s
        self._number = _PROOF
        self._open: deque[_PendingMax] = deque()
        self._lost = ""
        self._closed = False

    def start_max(self, value: int) -> _PendingMax:
        if self._lost:
            raise self._refused()
        number = self._number + 1
        # What the board asks for: the result of the round AHEAD before this one must be known.
        rounds = self._open
        while rounds and (rounds[0].value is not None or rounds[0].number <= number - AHEAD):
            rounds[0].result()
            rounds.popleft()
        self._board.put(number, value)
        self._number = number
        pending = _PendingMax(self, number)
        rounds.append(pending)
        return pending

    def ended(self, number: int) -> bool:
        """Whether all ranks have shown their values of a round."""
        if self._lost:
            raise self._refused()
        return self._board.maximum(number) is not None

    def wait(self, number: int, limit_s: float | None) -> int:
        """The result of a round, or an error that names the ranks that it lacks."""
        if self._lost:
            raise self._refused()
        found = self._board.maximum(number)
        if found is None:
            found = self._wait(number, self._limit_s if limit_s is None else limit_s)
        return found

    def close(self) -> None:
        self._lost = self._lost or "it was closed"
        if not self._closed:
            self._closed = True
            self._board.release()
            self._segment.close()

    def _wait(self, number: int, limit_s: float) -> int:
        began_s = time.monotonic()
        waited_s, look_s = 0.0, _LOOK_S
        while True:
            sleep_s = min(max(_SLEEP_SHARE * waited_s, _FIRST_SLEEP_S), _LONGEST_SLEEP_S)
            time.sleep(min(sleep_s, max(limit_s - waited_s, _FIRST_SLEEP_S)))
            found = self._board.maximum(number)
            if found is not None:
                return found
            waited_s = time.monotonic() - began_s
            if waited_s >= look_s:
                look_s = waited_s + _LOOK_S
                if gone := self._gone(number):
                    raise self._lose(f"maximum failed: {_ranks(gone)} ended: a peer is gone")
            if waited_s > limit_s:
                late = _ranks(self._board.missing(number))
                raise self._lose(
                    f"maximum did not end within {limit_s:g} s, {late} did not come: a peer is"
                    " stuck or slow"
                )

    def _gone(self, number: int) -> list[int]:
        """The ranks that will never come."""
        missing = self._board.missing(number)
        ended = [rank for rank in missing if rank != self._rank and not self._segment.alive(rank)]
        if not ended:
            return []
        # One may have come between the two looks, and ended after that.
        still = set(self._board.missing(number))
        return [rank for rank in ended if rank in still]

    def _lose(self, words: str) -> ExchangeLostError:
        self._lost = words
        return ExchangeLostError(f"rank {self._rank}: {words}")

    def _refused(self) -> ExchangeLostError:
        return ExchangeLostError(
            f"rank {self._rank}: the shared memory is not used again, because {self._lost}"
        )


def share(comm: Comm, limit_s: float) -> SharedMax | None:
    """Memory in common with all ranks of ``comm``, ``None`` on all where one of them has none.

    A collective call. ``limit_s`` is the limit of a maximum that names none of its own.
    """
    mine = _prepare(comm)
    fault = _fault(comm, mine if isinstance(mine, str) else "")
    if isinstance(mine, str):
        return None
    segment, board = mine
    if not fault:
        # All ranks have written. Each must see that, or their memories are not the same.
        fault = _fault(comm, _unproved(board, segment, comm))
    if not fault:
        return SharedMax(segment, board, comm.rank, limit_s)
    board.release()
    segment.close()
    return None


def _prepare(comm: Comm) -> tuple[Segment, Board] | str:
    """This rank's view of the memory, with its proof in it, or why it has none. Collective."""
    segment: Segment | None = None
    fault, offer = "", None
    if comm.rank == 0:
        try:
            segment, offer = create(comm.size * ROW_BYTES)
        except SegmentError as exc:
            fault = str(exc)
    told = comm.broadcast(None if offer is None else asdict(offer))
    if told is None:
        return fault or "rank 0 has no memory to share"
    if segment is None:
        try:
            segment = join(Offer(**told), comm.rank)
        except SegmentError as exc:
            return str(exc)
    board = Board(segment.memory, comm.rank, comm.size)
    board.put(_PROOF, comm.rank)
    return segment, board


def _unproved(board: Board, segment: Segment, comm: Comm) -> str:
    """What of the others this rank does not see, empty where it sees all of it."""
    if missing := board.missing(_PROOF):
        return f"nothing of {_ranks(missing)} is seen in the shared memory"
    peers = (rank for rank in range(comm.size) if rank != comm.rank)
    if dead := [rank for rank in peers if not segment.alive(rank)]:
        return f"the lock of {_ranks(dead)} is not seen"
    return ""


def _fault(comm: Comm, words: str) -> str:
    """The first rank's fault, on all ranks; empty where none has one. A collective call."""
    said = comm.gather(words)
    told = ""
    if said is not None:
        told = next((f"rank {rank}: {word}" for rank, word in enumerate(said) if word), "")
        if told:
            _log.info("the ranks agree by messages, not through memory: %s", told)
    return str(comm.broadcast(told))


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = len(numbers) - 8
    words = f"{shown} and {more} more" if more > 0 else shown
    return f"rank {words}" if len(numbers) == 1 else f"ranks {words}"

"""The boards of a job, and the contract of the stores that hold them.

A store keeps one board per epoch. Entries are written once: the first writer wins, and a later
write is not an error, it just changes nothing. Whoever cannot be reached raises StoreLostError;
an answer is never invented.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from slurm_ext.domain.errors import ProtocolError, SlurmExtError
from slurm_ft.pause.protocol import Board, Key, Request

# Boards of epochs further back are dropped: ranks ask about the newest, late ones about the last.
KEPT_EPOCHS = 16
_EMPTY = Board()
_BITS = {Key.ACK: "acks", Key.PAUSED: "paused", Key.UP: "ups", Key.GONE: "gone"}
_TEXTS = {Key.DECISION: "decision", Key.RESUME: "resume", Key.GO: "go"}


class StoreLostError(SlurmExtError):
    """The store of the pause did not answer; the write may or may not have arrived."""


class Store(Protocol):
    """Access of one party to the boards of this attempt."""

    def newest(self) -> int:
        """The highest epoch that was asked for, 0 where none was."""
        ...

    def read(self, epoch: int) -> Board:
        """The board as it is now. Raises StoreLostError."""
        ...

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        """The board, as soon as it differs from ``seen``, at the latest after ``limit_s``."""
        ...

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        """Write an entry unless it is written. Raises StoreLostError."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


def write_entry(board: Board, key: Key, value: str | int | Request) -> Board:
    """The board after one write."""
    if key in _BITS:
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ProtocolError(f"pause: {key}={value!r} is not a set of ranks")
        name = _BITS[key]
        return replace(board, **{name: getattr(board, name) | value})
    if key is Key.REQUEST:
        if not isinstance(value, Request):
            raise ProtocolError(f"pause: {key}={value!r} is not a request")
        return board if board.request is not None else replace(board, request=value)
    if not isinstance(value, str) or not value:
        raise ProtocolError(f"pause: {key}={value!r} is not a text")
    if getattr(board, _TEXTS[key]):
        return board
    change: dict[str, Any] = {_TEXTS[key]: value}
    return replace(board, **change)


class Table:
    """Boards in memory: what a server holds. Not safe to share between threads by itself."""

    def __init__(self) -> None:
        self._boards: dict[int, Board] = {}
        self._gone = 0

    def newest(self) -> int:
        """The highest epoch that was asked for."""
        return max(self._boards, default=0)

    def read(self, epoch: int) -> Board:
        """The board of an epoch; an empty one where nothing was written."""
        board = self._boards.get(epoch, _EMPTY)
        return replace(board, gone=self._gone) if self._gone else board

    def write(self, epoch: int, key: Key, value: str | int | Request) -> bool:
        """Write an entry; whether that changed the board.

        Only a request opens an epoch, and only the one after the newest: a late write about an old
        epoch must not make it look new. That a rank ended holds for every epoch.
        """
        if key is Key.GONE:
            before = self._gone
            self._gone = write_entry(Board(gone=before), key, value).gone
            return self._gone != before
        board = self._boards.get(epoch)
        if board is None:
            if key is not Key.REQUEST or epoch != self.newest() + 1:
                return False
            board = Board()
        after = write_entry(board, key, value)
        self._boards[epoch] = after
        self._boards.pop(epoch - KEPT_EPOCHS, None)
        return after != board

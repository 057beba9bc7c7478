"""A rank's connection to the store of its attempt: blocking, with a limit on everything.

Limits are for a whole answer: when the store has died, anybody on its node may listen at its port,
and send one byte a second. One instance belongs to one thread. A connection that failed is closed
and made anew by the next call; nothing is retried here, because only the caller knows for how long
it may wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any, TypeVar

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.pause import wire
from slurm_ft.pause.address import Address
from slurm_ft.pause.protocol import Board, Key, Request
from slurm_ft.pause.table import StoreLostError

T = TypeVar("T")

# For connecting, and for each answer that need not be waited for.
_ANSWER_S = 2.0
_LEAST_S = 0.01


class NetStore:
    """`slurm_ft.pause.table.Store` over TCP."""

    def __init__(self, address: Address, answer_s: float = _ANSWER_S) -> None:
        self._address = address
        self._answer_s = answer_s
        self._socket: socket.socket | None = None
        self._rest = b""
        self._ours: wire.Seal | None = None
        self._theirs: wire.Seal | None = None

    def newest(self) -> int:
        """The highest epoch that was asked for."""
        return self.newest_after(0, 0.0)

    def newest_after(self, epoch: int, limit_s: float) -> int:
        """The highest epoch, as soon as it is above ``epoch``, at the latest after ``limit_s``."""
        found = self._call({"op": "newest", "after": epoch, "limit_s": limit_s}, limit_s)
        return self._checked(found, int)

    def read(self, epoch: int) -> Board:
        """The board as it is now."""
        return self._board(self._call({"op": "read", "epoch": epoch}))

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        """The board, as soon as there is news, at the latest after ``limit_s``."""
        message = {
            "op": "wait",
            "epoch": epoch,
            "seen": wire.from_board(seen),
            "limit_s": limit_s,
        }
        return self._board(self._call(message, limit_s))

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        """Write an entry unless it is written."""
        message = {
            "op": "write",
            "epoch": epoch,
            "key": str(key),
            "value": wire.from_value(value),
        }
        self._call(message)

    def join(self, rank: int, size: int) -> None:
        """Tell that this rank listens for pauses, and how many ranks there are."""
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._call({"op": "join", "rank": rank, "size": size, "who": who})

    def pause(
        self, rung: str, *, wait_s: float, hold_s: float, by: str, request_id: str = ""
    ) -> dict[str, Any]:
        """Ask the controller for a pause; what is known about it."""
        message = {
            "op": "pause",
            "rung": str(rung),
            "wait_s": wait_s,
            "hold_s": hold_s,
            "by": by,
            "id": request_id,
        }
        return self._checked(self._call(message), dict)

    def resume(self, reason: str) -> dict[str, Any] | None:
        """Ask the controller to end the pause under way; ``None`` where there is none."""
        found = self._call({"op": "resume", "reason": reason})
        return None if found is None else self._checked(found, dict)

    def status(self) -> list[dict[str, Any]]:
        """The last pauses, the oldest first."""
        return self._checked(self._call({"op": "status"}), list)

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None
        self._rest = b""

    def _call(self, message: dict[str, Any], limit_s: float = 0.0) -> Any:
        try:
            if self._socket is None:
                self._connect()
            assert self._socket is not None
            assert self._ours is not None
            assert self._theirs is not None
            line = self._ours.close(message)
            answer = self._theirs.open(self._said(self._socket, line, limit_s + self._answer_s))
        except (OSError, ProtocolError) as exc:
            self.close()
            raise StoreLostError(f"the store of the pause at {self._address}: {exc}") from exc
        if "error" in answer:
            raise ProtocolError(str(answer["error"])[:500])
        return answer.get("ok")

    def _connect(self) -> None:
        address = self._address
        end_s = time.monotonic() + self._answer_s
        made = socket.create_connection((address.host, address.port), self._answer_s)
        self._socket = made
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = str(wire.open_plain(self._line(made, end_s)).get("nonce", ""))
        mine = wire.new_nonce()
        greeting = {"nonce": mine, "proof": wire.proof(address.key, "client", theirs, mine)}
        answer = self._said(made, json.dumps(greeting).encode() + b"\n", self._answer_s)
        said = wire.open_plain(answer).get("proof")
        if not wire.proves(address.key, "server", theirs, mine, said):
            raise ProtocolError("whoever listens there does not know the key of this attempt")
        self._ours = wire.Seal(address.key, "client", theirs, mine)
        self._theirs = wire.Seal(address.key, "server", theirs, mine)

    def _said(self, connection: socket.socket, line: bytes, limit_s: float) -> bytes:
        """Send a line; the line that answers it."""
        end_s = time.monotonic() + limit_s
        connection.settimeout(limit_s)
        connection.sendall(line)
        return self._line(connection, end_s)

    def _line(self, connection: socket.socket, end_s: float) -> bytes:
        while b"\n" not in self._rest:
            # A process that was stopped meanwhile still takes what has arrived.
            connection.settimeout(max(_LEAST_S, end_s - time.monotonic()))
            some = connection.recv(wire.MOST_LINE_BYTES)
            self._rest += some
            if not some:
                raise ProtocolError("the connection was closed")
            if b"\n" in some:
                break
            if len(self._rest) > wire.MOST_LINE_BYTES:
                raise ProtocolError(f"a line is longer than {wire.MOST_LINE_BYTES} bytes")
            if time.monotonic() >= end_s:
                raise TimeoutError("the answer did not end in time")
        line, _, self._rest = self._rest.partition(b"\n")
        return line + b"\n"

    def _board(self, raw: Any) -> Board:
        try:
            return wire.to_board(raw)
        except ProtocolError as exc:
            raise StoreLostError(f"the store of the pause at {self._address}: {exc}") from exc

    def _checked(self, value: Any, kind: type[T]) -> T:
        if not isinstance(value, kind):
            raise StoreLostError(f"the store of the pause at {self._address}: answered {value!r}")
        return value

"""The store of one attempt, served on one node to all ranks, with the controller beside it.

It runs in a helper process of rank 0's ft-run and needs the standard library alone. Whoever does
not know the key of the attempt learns nothing and changes nothing: a connection that does not
prove itself in time is closed. Waiting is the server's: a rank that has nothing to do asks once
and is answered when there is news, so a thousand paused ranks cost no more than their connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
from typing import Any

from slurm_ext.domain.codec import plain
from slurm_ext.domain.errors import ProtocolError
from slurm_ft.pause import wire
from slurm_ft.pause.conduct import Conductor, Outcome
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.protocol import COMMIT, Board, Key, Request, Rung
from slurm_ft.pause.table import Table

_log = logging.getLogger(__name__)

# From the connection to the proof.
_GREETING_S = 5.0
# Connections that have not proved themselves: strangers cannot use up the file descriptors. The
# oldest one makes room, since whoever knows the key needs no more than a round trip. All ranks of a
# large job come at the same moment.
_STRANGERS_SHARE = 4
_MOST_STRANGERS = 4096
# Lines about strangers go into the job's output: not as many as they like.
_STRANGERS_TOLD_S = 60.0
_LONGEST_WAIT_S = 300.0
# All ranks of a large job come at the same moment.
_BACKLOG = 1024
_LOOK_S = 0.05
_LONGEST_HOLD_S = 30 * 86400.0


# Entries that a rank writes for itself: whose connection it is.
_BY_ONE_RANK = (Key.ACK, Key.PAUSED, Key.UP)


class BoardServer:
    """Serves one table. Everything happens in one event loop."""

    def __init__(self, key: bytes, limits: Limits, most_strangers: int | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        share = max(1, files // _STRANGERS_SHARE) if files > 0 else _MOST_STRANGERS
        self._most_strangers = most_strangers or min(_MOST_STRANGERS, share)
        self._key = key
        self._table = Table()
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._refused = 0
        self._refusals_told_s = -math.inf
        # Who calls itself which rank, per connection that is open, and what ranks have written.
        self._joined: dict[asyncio.StreamWriter, tuple[int, str]] = {}
        self._wrote: dict[asyncio.StreamWriter, int] = {}
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._news = asyncio.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None
        self.conductor = Conductor(self._table, limits, self._clock, self._changed)

    async def start(self, host: str = "", port: int = 0) -> int:
        """Listen; the port."""
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(
            self._talk, sock=_listening(host, port), limit=wire.MOST_LINE_BYTES
        )
        self._ticker = asyncio.create_task(self._tick())
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def stop(self) -> None:
        """Close everything."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            self._server.close()

    def pause(
        self, rung: Rung, *, wait_s: float, hold_s: float, by: str, request_id: str = ""
    ) -> Outcome:
        """Begin a pause, or say why not."""
        outcome = self.conductor.ask(
            rung,
            wait_s=wait_s,
            hold_s=hold_s,
            by=by,
            request_id=request_id,
            objection=self._rivals(),
        )
        self._begun.set()
        return outcome

    def _rivals(self) -> str:
        """Why ranks cannot be counted: those of two sessions would acknowledge for each other."""
        known: dict[int, str] = {}
        for rank, who in self._joined.values():
            if known.setdefault(rank, who) != who:
                return (
                    f"{known[rank]} and {who} both call themselves rank {rank}: a pause needs one"
                    " session over all ranks"
                )
        return ""

    def _clock(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    async def _tick(self) -> None:
        """The controller's timers; between pauses there is nothing to look at."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            while self.conductor.active:
                self.conductor.look()
                await asyncio.sleep(_LOOK_S)

    def _changed(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()

    # --- one connection -------------------------------------------------------------------------

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seals = await self._greet(reader, writer)
            if seals is None:
                return
            await self._converse(reader, writer, *seals)
        except (ProtocolError, OSError, ValueError, asyncio.IncompleteReadError) as exc:
            _log.debug("pause store: a connection is closed: %s", exc)
        except asyncio.CancelledError:
            # The loop ends; asyncio would report the cancelled handler as an error.
            pass
        finally:
            self._missed(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _converse(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        theirs: wire.Seal,
        ours: wire.Seal,
    ) -> None:
        """Question and answer; one who closes the connection while it waits is noticed at once."""
        following = asyncio.create_task(reader.readline())
        answer: asyncio.Task[dict[str, Any]] | None = None
        try:
            while line := await following:
                following = asyncio.create_task(reader.readline())
                answer = asyncio.create_task(self._answer(theirs.open(line), writer))
                await asyncio.wait((answer, following), return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    return  # nobody asks again before the answer
                writer.write(ours.close(answer.result()))
                await writer.drain()
        finally:
            for task in filter(None, (following, answer)):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, ValueError):
                    await task

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[wire.Seal, wire.Seal] | None:
        if len(self._strangers) >= self._most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            mine = wire.new_nonce()
            writer.write(b'{"nonce":"' + mine.encode() + b'"}\n')
            async with asyncio.timeout(_GREETING_S):
                await writer.drain()
                greeting = wire.open_plain(await reader.readline())
        except TimeoutError:
            return None
        finally:
            self._strangers.pop(writer, None)
        theirs = str(greeting.get("nonce", ""))[:64]
        if not wire.proves(self._key, "client", mine, theirs, greeting.get("proof")):
            self._tell_refused(writer)
            return None
        answer = wire.proof(self._key, "server", mine, theirs)
        writer.write(b'{"proof":"' + answer.encode() + b'"}\n')
        await writer.drain()
        return (
            wire.Seal(self._key, "client", mine, theirs),
            wire.Seal(self._key, "server", mine, theirs),
        )

    # --- ranks that vanish ----------------------------------------------------------------------

    def _missed(self, writer: asyncio.StreamWriter) -> None:
        """A connection was closed: if it was a paused rank's last one, nobody may be left of it.

        A process that is stopped, or whose node is cut off, keeps its connections. One that lives
        makes a new one, or leaves by itself, within `Limits.lost_s`.
        """
        bits = self._wrote.pop(writer, 0)
        rank, _ = self._joined.pop(writer, (None, ""))
        bits |= 0 if rank is None else 1 << rank
        if bits and self.conductor.active and self._loop is not None and not self._loop.is_closed():
            self._loop.call_later(self._limits.lost_s, self._bury, self._table.newest(), bits)

    def _bury(self, epoch: int, bits: int) -> None:
        """Tell the others, where none of these ranks has come back to a pause that has begun."""
        board = self._table.read(epoch)
        here = 0
        for rank, _ in self._joined.values():
            here |= 1 << rank
        for wrote in self._wrote.values():
            here |= wrote
        lost = bits & board.acks & ~here
        if lost and board.decision == COMMIT and not board.go:
            self._write(epoch, Key.GONE, lost)

    def _write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        if self._table.write(epoch, key, value):
            self._changed()
            if self.conductor.active:
                self.conductor.look()

    def _tell_refused(self, writer: asyncio.StreamWriter) -> None:
        self._refused += 1
        if self._clock() - self._refusals_told_s < _STRANGERS_TOLD_S:
            return
        self._refusals_told_s = self._clock()
        _log.warning(
            "pause store: a connection from %s does not know the key of this attempt; closed"
            " (%d so far)",
            writer.get_extra_info("peername"),
            self._refused,
        )

    async def _answer(
        self, message: dict[str, Any], writer: asyncio.StreamWriter
    ) -> dict[str, Any]:
        try:
            return {"ok": await self._operate(message, writer)}
        except ProtocolError as exc:
            return {"error": str(exc)}

    async def _operate(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> Any:
        match message.get("op"):
            case "newest":
                return await self._newest(_whole(message, "after"), _seconds(message, "limit_s"))
            case "read":
                return wire.from_board(self._table.read(_whole(message, "epoch")))
            case "wait":
                return await self._wait(
                    _whole(message, "epoch"),
                    wire.to_board(message.get("seen")),
                    _seconds(message, "limit_s"),
                )
            case "write":
                key, value = wire.to_entry(message.get("key"), message.get("value"))
                self._write(_whole(message, "epoch"), key, value)
                if key in _BY_ONE_RANK and isinstance(value, int):
                    self._wrote[writer] = value
                return True
            case "join":
                rank = _whole(message, "rank")
                self.conductor.join(rank, _whole(message, "size"))
                self._joined[writer] = rank, str(message.get("who", ""))[:200]
                return True
            case "pause":
                return self._pause(message)
            case "resume":
                outcome = self.conductor.resume(str(message.get("reason", ""))[:200] or "asked")
                return None if outcome is None else plain(outcome)
            case "status":
                return plain(self.conductor.outcomes())
            case other:
                raise ProtocolError(f"pause store: {other!r:.40} is no operation")

    def _pause(self, message: dict[str, Any]) -> Any:
        try:
            rung = Rung(str(message.get("rung")))
        except ValueError as exc:
            raise ProtocolError(f"pause store: rung={message.get('rung')!r:.40}") from exc
        return plain(
            self.pause(
                rung,
                wait_s=_seconds(message, "wait_s"),
                hold_s=_seconds(message, "hold_s"),
                by=str(message.get("by", ""))[:100],
                request_id=str(message.get("id", ""))[:64],
            )
        )

    async def _newest(self, after: int, limit_s: float) -> int:
        async def newer() -> None:
            async with self._news:
                await self._news.wait_for(lambda: self._table.newest() > after)

        await _within(newer(), limit_s)
        return self._table.newest()

    async def _wait(self, epoch: int, seen: Board, limit_s: float) -> Any:
        async def news() -> None:
            async with self._news:
                await self._news.wait_for(lambda: _is_news(seen, self._table.read(epoch)))

        if not _is_news(seen, self._table.read(epoch)):
            await _within(news(), limit_s)
        return wire.from_board(self._table.read(epoch))


def _listening(host: str, port: int) -> socket.socket:
    """One socket for both families: two would have two ports, and only one could be told."""
    both = not host and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if both or ":" in host else socket.AF_INET,
        dualstack_ipv6=both,
        backlog=_BACKLOG,
    )


def _is_news(seen: Board, board: Board) -> bool:
    """What a waiting rank acts on. That one more rank is up or paused is the controller's news."""
    return (
        board.decision != seen.decision
        or board.resume != seen.resume
        or board.go != seen.go
        or board.gone != seen.gone
        or (board.request is None) != (seen.request is None)
    )


async def _within(coroutine: Any, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(limit_s, _LONGEST_WAIT_S)):
            await coroutine


def _whole(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**48:
        raise ProtocolError(f"pause store: {name}={value!r:.40} is no epoch")
    return value


def _seconds(message: dict[str, Any], name: str) -> float:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"pause store: {name}={value!r:.40} is no number of seconds")
    if not math.isfinite(value) or not 0 <= value <= _LONGEST_HOLD_S:
        raise ProtocolError(f"pause store: {name}={value!r:.40} is outside 0..{_LONGEST_HOLD_S:g}")
    return float(value)

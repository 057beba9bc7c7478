"""Ranks over MPI: a duplicate of the world communicator, polled.

Every exchange is a non-blocking one that is tested in a loop, because MPI has no limits: a
blocking call into a dead or stuck peer would never return, nor let Python see a signal. The loop
spins for a moment, then sleeps in growing steps, so that ranks sharing a core do not starve the
peer they wait for. MPI makes progress inside its own calls only: a maximum that was begun at one
step ends, at the latest, when it is asked for at the next.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable
from typing import Any

from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.comms.form import encode, frame, unframe

_SPIN_S = 0.0002
_FIRST_SLEEP_S = 0.00005
_LONGEST_SLEEP_S = 0.002


class _PendingMax:
    """An all-reduce under way; holds the buffers that MPI reads and writes."""

    __slots__ = ("_comm", "_received", "_request", "_sent", "_value")

    def __init__(self, comm: MpiComm, request: Any, sent: Any, received: Any) -> None:
        self._comm = comm
        self._request = request
        self._sent = sent
        self._received = received
        self._value: int | None = None

    def done(self) -> bool:
        if self._value is None and self._comm.test(self._request, "maximum"):
            self._value = int(self._received[0])
        return self._value is not None

    def result(self, limit_s: float | None = None) -> int:
        if self._value is None:
            self._comm.wait(self._request, "maximum", limit_s)
            self._value = int(self._received[0])
        return self._value


class MpiComm:
    """`slurm_ft.comm.Comm` over MPI. Making one is collective."""

    def __init__(self, limit_s: float, world: Any = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._limit_s = limit_s
        self._lost = ""
        self._comm = (MPI.COMM_WORLD if world is None else world).Dup()
        # An error becomes an exception here instead of ending the whole job.
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._rank: int = self._comm.Get_rank()
        self._size: int = self._comm.Get_size()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def start_max(self, value: int) -> _PendingMax:
        sent = array.array("q", [value])
        received = array.array("q", [0])
        mpi = self._mpi
        request = self._begin(
            "maximum",
            lambda: self._comm.Iallreduce(
                [sent, 1, mpi.INT64_T], [received, 1, mpi.INT64_T], op=mpi.MAX
            ),
        )
        return _PendingMax(self, request, sent, received)

    def barrier(self, limit_s: float | None = None) -> None:
        self.wait(self._begin("barrier", self._comm.Ibarrier), "barrier", limit_s)

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any] | None:
        data = encode(value)
        longest = self.start_max(len(data)).result(limit_s)
        mine = frame(data, longest)
        width = len(mine)
        room = bytearray(width * self._size) if self._rank == 0 else None
        byte = self._mpi.BYTE
        target = None if room is None else [room, width, byte]
        request = self._begin(
            "gather", lambda: self._comm.Igather([mine, width, byte], target, root=0)
        )
        self.wait(request, "gather", limit_s)
        if room is None:
            return None
        return [unframe(room[at : at + width]) for at in range(0, len(room), width)]

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        data = encode(value) if self._rank == 0 else b""
        longest = self.start_max(len(data)).result(limit_s)
        framed = frame(data, longest)
        byte = self._mpi.BYTE
        request = self._begin(
            "broadcast", lambda: self._comm.Ibcast([framed, len(framed), byte], root=0)
        )
        self.wait(request, "broadcast", limit_s)
        return unframe(framed)

    def close(self) -> None:
        # Freeing a communicator is collective in MPI, so it may wait for a peer: it is left to
        # MPI_Finalize. Only the use of it ends here.
        self._lost = self._lost or "it was closed"

    def test(self, request: Any, what: str) -> bool:
        """Whether an exchange has ended."""
        self._check()
        try:
            return bool(request.Test())
        except self._mpi.Exception as exc:
            raise self._failed(what, exc) from exc

    def wait(self, request: Any, what: str, limit_s: float | None) -> None:
        """Wait for a request, or declare the communicator lost."""
        limit_s = self._limit_s if limit_s is None else limit_s
        began = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        while not self.test(request, what):
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                self._lost = f"{what} between {self._size} ranks did not end within {limit_s:g} s"
                raise ExchangeLostError(
                    f"rank {self._rank}: {self._lost}: a peer is stuck, slow or gone"
                )
            if waited_s > _SPIN_S:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 2, _LONGEST_SLEEP_S)

    def _begin(self, what: str, start: Callable[[], Any]) -> Any:
        self._check()
        try:
            return start()
        except self._mpi.Exception as exc:
            raise self._failed(what, exc) from exc

    def _failed(self, what: str, exc: Exception) -> ExchangeLostError:
        self._lost = f"{what} between {self._size} ranks failed: {exc}"
        return ExchangeLostError(f"rank {self._rank}: {self._lost}")

    def _check(self) -> None:
        if self._lost:
            raise ExchangeLostError(
                f"rank {self._rank}: the communicator is not used again, because {self._lost}"
            )

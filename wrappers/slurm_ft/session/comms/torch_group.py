"""Ranks over torch.distributed: a gloo group of our own, on the CPU.

Our own group, because collectives on one group must be made in one order by all ranks, and only
the program knows its order on its groups. Limits are kept on the waiting side: the group's own
time-out is a day, since gloo's time-out kills a group for good, and a program may well spend
an hour between two safe points. A peer that dies is noticed at once, by its closed connection.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.comms.form import encode, frame, unframe

_GROUP_TIMEOUT = datetime.timedelta(days=1)


class _PendingMax:
    """An all-reduce under way; holds the tensor that gloo writes into."""

    __slots__ = ("_comm", "_tensor", "_value", "_work")

    def __init__(self, comm: TorchComm, tensor: Any, work: Any) -> None:
        self._comm = comm
        self._tensor = tensor
        self._work = work
        self._value: int | None = None

    def done(self) -> bool:
        return self._value is not None or bool(self._work.is_completed())

    def result(self, limit_s: float | None = None) -> int:
        if self._value is None:
            self._comm.wait(self._work, "maximum", limit_s)
            self._value = int(self._tensor.item())
            self._comm.give_back(self._tensor)
            self._work = self._tensor = None
        return self._value


class TorchComm:
    """`slurm_ft.comm.Comm` over a gloo group. Making one is collective."""

    def __init__(self, limit_s: float, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._torch = torch
        self._dist = dist
        self._limit_s = limit_s
        self._lost = ""
        self._group = new_gloo_group(group)
        self._rank: int = dist.get_rank(self._group)
        self._size: int = dist.get_world_size(self._group)
        self._root: int = dist.get_global_rank(self._group, 0)
        self._maximum = dist.AllreduceOptions()
        self._maximum.reduceOp = dist.ReduceOp.MAX
        self._spare: list[Any] = []

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def start_max(self, value: int) -> _PendingMax:
        # Called at every step: the group's own method, which leaves out what dist.all_reduce
        # looks up and logs, and tensors used again halve what this costs the training thread.
        self._check()
        if self._spare:
            tensor = self._spare.pop()
            tensor.fill_(value)
        else:
            tensor = self._torch.tensor([value], dtype=self._torch.int64, device="cpu")
        work = self._begin("maximum", self._group.allreduce, [tensor], self._maximum)
        return _PendingMax(self, tensor, work)

    def barrier(self, limit_s: float | None = None) -> None:
        self._check()
        tensor = self._torch.zeros(1, dtype=self._torch.int64, device="cpu")
        self.wait(self._collective("all_reduce", tensor), "barrier", limit_s)

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any] | None:
        self._check()
        data = encode(value)
        longest = self.start_max(len(data)).result(limit_s)
        mine = self._tensor(data, longest)
        parts = None
        if self._rank == 0:
            parts = [self._torch.empty_like(mine) for _ in range(self._size)]
        self.wait(self._collective("gather", mine, parts, dst=self._root), "gather", limit_s)
        return None if parts is None else [unframe(bytes(part.tolist())) for part in parts]

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        self._check()
        data = encode(value) if self._rank == 0 else b""
        longest = self.start_max(len(data)).result(limit_s)
        tensor = self._tensor(data, longest)
        self.wait(self._collective("broadcast", tensor, src=self._root), "broadcast", limit_s)
        return unframe(bytes(tensor.tolist()))

    def close(self) -> None:
        # The group itself stays, see new_gloo_group; only the use of it ends here.
        self._lost = self._lost or "it was closed"

    def wait(self, work: Any, what: str, limit_s: float | None) -> None:
        """Wait for a torch Work, or declare the communicator lost."""
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            # A work that has failed raises here as well, so there is one place to look.
            work.wait(datetime.timedelta(seconds=max(limit_s, 0.001)))
        except RuntimeError as exc:
            late = not work.is_completed()
            self._lost = (
                f"{what} between {self._size} ranks did not end within {limit_s:g} s"
                if late
                else f"{what} between {self._size} ranks failed: {_first_line(exc)}"
            )
            raise ExchangeLostError(
                f"rank {self._rank}: {self._lost}: a peer is stuck, slow or gone"
            ) from exc

    def give_back(self, tensor: Any) -> None:
        """A tensor that a maximum needs no longer."""
        self._spare.append(tensor)

    def _collective(self, call: str, *args: Any, **options: Any) -> Any:
        function = getattr(self._dist, call)
        return self._begin(call, function, *args, group=self._group, async_op=True, **options)

    def _begin(self, what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except RuntimeError as exc:
            self._lost = f"{what} between {self._size} ranks could not begin: {_first_line(exc)}"
            raise ExchangeLostError(f"rank {self._rank}: {self._lost}: a peer is gone") from exc

    def _check(self) -> None:
        if self._lost:
            raise ExchangeLostError(
                f"rank {self._rank}: the communicator is not used again, because {self._lost}"
            )

    def _tensor(self, data: bytes, longest: int) -> Any:
        return self._torch.frombuffer(frame(data, longest), dtype=self._torch.uint8)


def new_gloo_group(group: Any = None) -> Any:
    """A gloo group over the ranks of ``group`` (``None`` = all). Collective over those ranks.

    Never freed, hence the reference that is not dropped. The destructor of a gloo group waits for
    what is under way on it: a rank whose program ends with an error would linger until its peers
    gave up, while they wait for it. And it joins the group's threads while it holds the
    interpreter's lock, which such a thread may need to let go of its last tensor (torch 2.6: hangs
    in 10 of 25 runs). A process makes one or two of them in its life.
    """
    import ctypes

    import torch.distributed as dist

    if group is None:
        made = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
    else:
        made = dist.new_group(
            ranks=dist.get_process_group_ranks(group),
            backend="gloo",
            timeout=_GROUP_TIMEOUT,
            # Ranks outside do not take part, so that several sessions can live in one world.
            use_local_synchronization=True,
        )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def _first_line(exc: Exception) -> str:
    lines = str(exc).splitlines()
    return lines[0] if lines else type(exc).__name__

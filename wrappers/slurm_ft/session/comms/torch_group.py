"""Ranks over torch.distributed: a gloo group of our own, on the CPU.

Our own group, because collectives on one group must be made in one order by all ranks, and only
the program knows its order on its groups. Limits are kept on the waiting side: the group's own
time-out is a day, since gloo's time-out kills a group for good, and a program may well spend
an hour between two safe points. A peer that dies is noticed at once, by its closed connection.
"""

from __future__ import annotations

import datetime
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
            self._work = None
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
        self._under_way = 0
        self._group = new_gloo_group(group)
        self._rank: int = dist.get_rank(self._group)
        self._size: int = dist.get_world_size(self._group)
        self._root: int = dist.get_global_rank(self._group, 0)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def start_max(self, value: int) -> _PendingMax:
        self._check()
        tensor = self._torch.tensor([value], dtype=self._torch.int64, device="cpu")
        maximum = self._dist.ReduceOp.MAX
        return _PendingMax(self, tensor, self._begin("all_reduce", tensor, op=maximum))

    def barrier(self, limit_s: float | None = None) -> None:
        self._check()
        tensor = self._torch.zeros(1, dtype=self._torch.int64, device="cpu")
        self.wait(self._begin("all_reduce", tensor), "barrier", limit_s)

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any] | None:
        self._check()
        data = encode(value)
        longest = self.start_max(len(data)).result(limit_s)
        mine = self._tensor(data, longest)
        parts = None
        if self._rank == 0:
            parts = [self._torch.empty_like(mine) for _ in range(self._size)]
        self.wait(self._begin("gather", mine, parts, dst=self._root), "gather", limit_s)
        return None if parts is None else [unframe(bytes(part.tolist())) for part in parts]

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        self._check()
        data = encode(value) if self._rank == 0 else b""
        longest = self.start_max(len(data)).result(limit_s)
        tensor = self._tensor(data, longest)
        self.wait(self._begin("broadcast", tensor, src=self._root), "broadcast", limit_s)
        return unframe(bytes(tensor.tolist()))

    def close(self) -> None:
        # Freeing a gloo group waits for what is under way on it: only where nothing can be.
        if not self._lost and self._under_way == 0:
            free_gloo_group(self._group)
        self._lost = self._lost or "it was closed"

    def wait(self, work: Any, what: str, limit_s: float | None) -> None:
        """Wait for a torch Work, or declare the communicator lost."""
        limit_s = self._limit_s if limit_s is None else limit_s
        self._under_way -= 1
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

    def _begin(self, call: str, *args: Any, **options: Any) -> Any:
        self._under_way += 1
        try:
            return getattr(self._dist, call)(*args, group=self._group, async_op=True, **options)
        except RuntimeError as exc:
            self._lost = f"{call} between {self._size} ranks could not begin: {_first_line(exc)}"
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

    Freed by `free_gloo_group` only. The destructor of a gloo group waits for what is under way on
    it: a rank whose program ends with an error would linger until its peers gave up, while they
    wait for it. So the interpreter's end must not run it, hence a reference that is never dropped.
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


def free_gloo_group(group: Any) -> None:
    """Destroy a group of `new_gloo_group` on which nothing is under way."""
    import ctypes

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group(group)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def _first_line(exc: Exception) -> str:
    lines = str(exc).splitlines()
    return lines[0] if lines else type(exc).__name__

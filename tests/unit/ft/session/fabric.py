"""Ranks as threads of one process: `slurm_ft.comm.Comm` without any transport."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from slurm_ft.comm import ExchangeLostError

LIMIT_S = 10.0


class Fabric:
    """What the ranks have in common: the values of each exchange, by its number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.said: dict[int, dict[int, tuple[str, Any]]] = {}

    def ranks(self) -> list[ThreadComm]:
        return [ThreadComm(self, rank) for rank in range(self.size)]


class _Pending:
    def __init__(self, comm: ThreadComm, number: int) -> None:
        self._comm = comm
        self._number = number

    def done(self) -> bool:
        return len(self._comm.fabric.said.get(self._number, {})) == self._comm.size

    def result(self, limit_s: float | None = None) -> int:
        return max(self._comm.all_said(self._number, limit_s))


class ThreadComm:
    """One rank. Two ranks whose n-th exchange is not of the same kind are an assertion error."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric = fabric
        self._rank = rank
        self._number = 0
        self.exchanges = 0
        self.closed = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.fabric.size

    def start_max(self, value: int) -> _Pending:
        return _Pending(self, self._say("max", value))

    def barrier(self, limit_s: float | None = None) -> None:
        self.all_said(self._say("barrier", None), limit_s)

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any] | None:
        said = self.all_said(self._say("gather", json.dumps(value)), limit_s)
        return [json.loads(text) for text in said] if self._rank == 0 else None

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        text = json.dumps(value) if self._rank == 0 else ""
        return json.loads(self.all_said(self._say("broadcast", text), limit_s)[0])

    def close(self) -> None:
        self.closed = True

    def _say(self, kind: str, value: Any) -> int:
        self._number += 1
        self.exchanges += 1
        with self.fabric.changed:
            said = self.fabric.said.setdefault(self._number, {})
            said[self._rank] = (kind, value)
            self.fabric.changed.notify_all()
        return self._number

    def all_said(self, number: int, limit_s: float | None) -> list[Any]:
        limit_s = LIMIT_S if limit_s is None else limit_s
        with self.fabric.changed:
            if not self.fabric.changed.wait_for(
                lambda: len(self.fabric.said[number]) == self.size, limit_s
            ):
                raise ExchangeLostError(f"exchange {number} did not end within {limit_s:g} s")
            said = [self.fabric.said[number][rank] for rank in range(self.size)]
        assert len({kind for kind, _ in said}) == 1, f"exchange {number}: {said}"
        return [value for _, value in said]


def on_all(size: int, function: Callable[[ThreadComm], Any]) -> list[Any]:
    """Call it on every rank at once; what it raised is raised here."""
    results: list[Any] = [None] * size
    problems: list[BaseException] = []

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = function(comm)
        except BaseException as exc:
            problems.append(exc)

    threads = [threading.Thread(target=run, args=(comm,)) for comm in Fabric(size).ranks()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a rank is stuck"
    if problems:
        raise problems[0]
    return results

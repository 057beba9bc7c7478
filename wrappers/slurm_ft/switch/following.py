"""Which task of a chain comes next: decided on rank 0, told to all ranks. No torch.

The task itself is told, not its name: an appended file may not be seen yet on another node. A task
that cannot be trained here (unreadable, or no number of these ranks can run it) does not stop the
others; it is named when it is found, and again at the chain's end, which is an error then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from slurm_ext.domain.errors import ConfigError, SlurmExtError
from slurm_ft.comm import Comm
from slurm_ft.switch.chain import ChainState, remaining
from slurm_ft.train.task import Task, make_task, values_of

_log = logging.getLogger(__name__)


class Following:
    """Every method is collective. ``unfit`` tells why a task cannot run on these ranks, or ""."""

    def __init__(
        self, chain: ChainState, given: Sequence[Task], comm: Comm, unfit: Callable[[Task], str]
    ) -> None:
        self._chain, self._given, self._comm, self._unfit = chain, given, comm, unfit
        self._refused: dict[str, str] = {}
        # Not done yet, as far as records tell, and begun all the same.
        self._begun: set[str] = set()
        self._before: dict[str, int] = {}
        self.total_steps: int | None = None

    def after(self, task: Task | None) -> Task | None:
        """The first task that is not done, behind ``task`` where one is given."""
        return self._told(lambda: self._next(task))

    def last(self, task: Task | None) -> Task | None:
        """The same at the chain's end, which takes no more tasks if there is none."""

        def closing() -> Task | None:
            self._chain.close()
            found = self._next(task)
            if found is not None:
                self._chain.reopen()
            return found

        return self._told(closing)

    def before(self, task: Task) -> int:
        """Steps of all tasks that the chain lists before this one; no exchange."""
        return self._before.get(task.name, 0)

    def check_all_trained(self) -> None:
        """Raise ConfigError where tasks were left out."""
        words = self._comm.broadcast("; ".join(self._refused.values()))
        if words:
            raise ConfigError("chain", f"not everything was trained: {words}", "mend it")

    def _next(self, task: Task | None) -> Task | None:
        if task is not None:
            self._begun.add(task.name)
        tasks, wrong = self._chain.look(self._given)
        for problem in wrong:
            self._refuse(problem.place, str(problem))
        left = remaining(tasks, self._chain.done())
        index = next((i for i, t in enumerate(left) if task and t.name == task.name), -1)
        for found in left[index + 1 :]:
            if found.name in self._begun:
                continue
            why = self._unfit(found)
            if not why:
                return found
            self._refuse(found.name, f"{found.name}: {why}")
        return None

    def _refuse(self, key: str, words: str) -> None:
        if self._refused.get(key) != words:
            _log.warning("a task of the chain is left out: %s", words)
        self._refused[key] = words

    def _told(self, decide: Callable[[], Task | None]) -> Task | None:
        answer: Any = None
        if self._comm.rank == 0:
            try:
                found = decide()
                answer = {"task": None if found is None else values_of(found), "error": ""}
                answer |= self._sums()
            except (SlurmExtError, OSError) as exc:
                answer = {"task": None, "error": str(exc)}
        answer = self._comm.broadcast(answer)
        if answer["error"]:
            raise ConfigError("chain", answer["error"], "mend it; the job goes on from here")
        self._before, self.total_steps = answer["before"], answer["total"]
        return None if answer["task"] is None else make_task(answer["task"], "chain")

    def _sums(self) -> dict[str, Any]:
        """Where each task begins in the chain's row of steps, and its length."""
        before, total = dict[str, int](), 0
        for task in self._chain.look(self._given)[0]:
            if task.name not in self._refused:
                before[task.name] = total
                total += task.steps
        return {"before": before, "total": total}

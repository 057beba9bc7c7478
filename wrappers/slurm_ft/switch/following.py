"""Which task of a chain comes next: decided on rank 0, told to all ranks. No torch.

The task itself is told, not its name: an appended file may not be seen yet on another node. A task
that cannot be trained here (unreadable, or no number of these ranks can run it, or its result could
not be written) does not stop the others, and neither does one whose result is not written in the
end; it is named when it is found, and again at the chain's end, which is an error then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from slurm_ext.domain.errors import ConfigError, SlurmExtError
from slurm_ft.comm import Comm
from slurm_ft.switch.chain import ChainState, remaining
from slurm_ft.train.shared import on_all_ranks
from slurm_ft.train.task import Task, make_task, values_of

_log = logging.getLogger(__name__)


class UnwrittenError(SlurmExtError):
    """Tasks of a chain were trained whose results could not be written."""


class Following:
    """Every method is collective, unless it says otherwise.

    ``unfit`` tells, on rank 0, why a task cannot run on these ranks, or ""; ``trial`` tells, on
    each rank, why this one could not write its part of a result into a directory, or "".
    """

    def __init__(
        self,
        chain: ChainState,
        given: Sequence[Task],
        comm: Comm,
        unfit: Callable[[Task], str],
        trial: Callable[[str], str] = lambda output: "",
    ) -> None:
        self._chain, self._given, self._comm, self._unfit = chain, given, comm, unfit
        self._trial = trial
        # Why nothing could be written into a directory, or "".
        self._tried: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        # Not done yet, as far as records tell, and begun all the same.
        self._begun: set[str] = set()
        self._before: dict[str, int] = {}
        self.total_steps: int | None = None

    def after(self, task: Task | None) -> Task | None:
        """The first task that is not done, behind ``task`` where one is given."""
        return self._told(lambda: self._next(task))

    def first(self) -> Task | None:
        """The first task that is not done; it begins now."""
        return self._told(lambda: self._next(None, begins=True))

    def begins(self, task: Task) -> bool:
        """Whether a task that was found before is wanted still; it begins now."""
        return bool(self._comm.broadcast(self._comm.rank == 0 and self._begin(task)))

    def last(self, task: Task | None) -> Task | None:
        """The same at the chain's end, which takes no more tasks if there is none. It begins."""

        def closing() -> Task | None:
            self._chain.close()
            found = self._next(task, begins=True)
            if found is not None:
                self._chain.reopen()
            return found

        return self._told(closing)

    def before(self, task: Task) -> int:
        """Steps of all tasks that the chain lists before this one; no exchange."""
        return self._before.get(task.name, 0)

    def unwritten(self, task: Task, words: str) -> None:
        """A task was trained and saved, and its result could not be written. Called on each rank,
        in any thread; no exchange."""
        self._failed[task.name] = f"{words}; its last checkpoint is complete"
        if self._comm.rank == 0:
            _log.warning("%s", self._failed[task.name])

    @property
    def left_out(self) -> dict[str, str]:
        """On rank 0: why, by task or place."""
        return dict(self._refused)

    @property
    def failed(self) -> dict[str, str]:
        """Why results were not written, by task."""
        return dict(self._failed)

    def check_all_trained(self) -> None:
        """Raise where tasks were left out, or results not written."""
        words = self._comm.broadcast("; ".join((*self._refused.values(), *self._failed.values())))
        if words and self._failed:
            why = f"chain: not everything was written: {words}; mend it"
            raise on_all_ranks(UnwrittenError(why))
        if words:
            why = f"not everything was trained: {words}"
            raise on_all_ranks(ConfigError("chain", why, "mend it"))

    def _next(self, task: Task | None, *, begins: bool = False) -> Task | None:
        if task is not None:
            self._begun.add(task.name)
        left = self._left()
        for each in left:
            # Said as soon as it is known, not when the task's turn comes.
            if (why := self._tried.get(each.output)) and each.name not in self._begun:
                self._refuse(each.name, f"{each.name}: {why}")
        index = next((i for i, t in enumerate(left) if task and t.name == task.name), -1)
        for found in left[index + 1 :]:
            if found.name in self._begun:
                continue
            if self._tried.get(found.output):
                continue
            if why := self._unfit(found):
                self._refuse(found.name, f"{found.name}: {why}")
            elif not begins or self._begin(found):
                return found
        return None

    def _begin(self, task: Task) -> bool:
        try:
            return self._chain.claims.begin(task.name)
        except OSError as exc:  # somebody may take it out in vain; it is trained
            _log.warning("that %s has begun is not noted: %s", task.name, exc)
            return True

    def _left(self) -> list[Task]:
        """Tasks that are not done, of those that can be read."""
        tasks, wrong = self._chain.look(self._given)
        for problem in wrong:
            self._refuse(problem.place, str(problem))
        return remaining(tasks, self._chain.done())

    def _untried(self) -> list[str]:
        """Directories of results into which no rank has tried to write yet."""
        wanted = dict.fromkeys(task.output for task in self._left() if task.output)
        return [output for output in wanted if output not in self._tried]

    def _try(self, outputs: Sequence[str]) -> None:
        """Each rank tries each directory once, long before there is a result."""
        told = self._comm.gather({out: why for out in outputs if (why := self._trial(out))})
        if told is None:
            return
        for output in outputs:
            faults = [
                f"rank {rank}: {whys[output]}" for rank, whys in enumerate(told) if output in whys
            ]
            self._tried[output] = faults[0] if faults else ""

    def _refuse(self, key: str, words: str) -> None:
        if self._refused.get(key) != words:
            _log.warning("a task of the chain is left out: %s", words)
        self._refused[key] = words

    def _told(self, decide: Callable[[], Task | None]) -> Task | None:
        answer = self._answer(decide)
        while answer["try"]:
            self._try(answer["try"])
            answer = self._answer(decide)
        self._before, self.total_steps = answer["before"], answer["total"]
        return None if answer["task"] is None else make_task(answer["task"], "chain")

    def _answer(self, decide: Callable[[], Task | None]) -> Any:
        answer: Any = None
        if self._comm.rank == 0:
            try:
                # First of all, so that the decision knows.
                untried = self._untried()
                found = None if untried else decide()
                answer = {"task": None if found is None else values_of(found), "error": ""}
                answer |= {"try": untried, **self._sums()}
            except Exception as exc:  # whatever it is: the others wait for an answer
                told = isinstance(exc, SlurmExtError | OSError)
                answer = {"task": None, "error": str(exc) if told else repr(exc)}
        answer = self._comm.broadcast(answer)
        if answer["error"]:
            fix = "mend it; the job goes on from here"
            raise on_all_ranks(ConfigError("chain", answer["error"], fix))
        return answer

    def _sums(self) -> dict[str, Any]:
        """Where each task begins in the chain's row of steps, and its length."""
        before, total = dict[str, int](), 0
        for task in self._chain.look(self._given)[0]:
            if task.name not in self._refused:
                before[task.name] = total
                total += task.steps
        return {"before": before, "total": total}

"""Array expressions: what squeue prints for the pending rest of an array, and what scontrol takes.

Slurm has one record for the pending tasks that nobody has touched, and one more for each task that
was held, requeued or changed by itself. By default squeue shows all of them in one row, with the
fields of one record; so it is asked for a row per task (``-r``), and ``Records`` joins those that
share a record. But of a record that Slurm writes with a step (``0-18:3``), ``-r`` leaves out the
last task (24.11.5 and 26.05.5), which only the row for all of them shows.

JSON says ``1-9:2%3``: a step and a limit of tasks at a time. ``scontrol update`` knows neither
(seen on 24.11: "Invalid job id specified"); it takes ``7_[1,3,5,7,9]``, and given exactly the tasks
of a record it changes that one, without splitting it (seen on 24.11 and 26.05).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from slurm_ext.slurm.rows import SEPARATOR

_ROW = re.compile(r"(?P<base>\d+)_\[(?P<tasks>[^\]]*)\]", re.ASCII)
_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)
_TASK = re.compile(r"\d+_(\d+)", re.ASCII)
# Slurm writes tasks at equal distances with a step where they reach farther than this.
_LEAST_SPAN = 10
MAX_TASKS = 4_000_000  # Slurm's own bound of MaxArraySize


def exact_id(squeue_id: str) -> tuple[str, int]:
    """The id that ``scontrol update`` takes for exactly this row, and its number of tasks.

    Anything that is not the rest of an array is its own id, of one task, and so is a rest of one
    task. Raises ValueError for an expression that cannot be read, or that Slurm has cut off.
    """
    match = _ROW.fullmatch(squeue_id)
    if match is None:
        if "[" in squeue_id or "..." in squeue_id:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        return squeue_id, 1
    ranges = _ranges(squeue_id)
    count = sum(len(tasks) for tasks in ranges)
    if count == 1:
        return f"{match['base']}_{ranges[0].start}", 1
    return f"{match['base']}_[{','.join(_words(tasks) for tasks in ranges)}]", count


def _ranges(squeue_id: str) -> list[range]:
    """The tasks of a row ``7_[...]``. Raises ValueError for what cannot be read."""
    match = _ROW.fullmatch(squeue_id)
    found: list[range] = []
    for item in match["tasks"].partition("%")[0].split(",") if match else [""]:
        part = _ITEM.fullmatch(item)
        if part is None:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        low, high, step = int(part[1]), int(part[2] or part[1]), int(part[3] or 1)
        if high < low or step < 1 or high - low >= MAX_TASKS:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        found.append(range(low, high + 1, step))
    return found


def _words(tasks: range) -> str:
    if tasks.step > 1 or len(tasks) == 1:
        return ",".join(str(task) for task in tasks)
    return f"{tasks[0]}-{tasks[-1]}"


class Records:
    """The records behind rows of ``squeue -r``.

    The raw id is the first column, column ``at`` names job or task. The rows of one record differ
    in that column alone. Rows that share a raw id and are no tasks of an array are handed on as
    they are. Of an array only the record with the array's own number has more than one task.
    """

    def __init__(self, rows: Iterable[str], at: int) -> None:
        self._at = at
        self._first: dict[str, str] = {}
        self._tasks: dict[str, list[int]] = {}
        self._others: list[str] = []
        for row in rows:
            raw = row.partition(SEPARATOR)[0]
            if self._first.setdefault(raw, row) is not row:
                self._one_more(raw, row)

    def _one_more(self, raw: str, row: str) -> None:
        tasks = self._tasks.get(raw)
        if tasks is None:
            task = _TASK.fullmatch(self._name(self._first[raw]))
            tasks = self._tasks[raw] = [int(task[1])] if task else []
        task = _TASK.fullmatch(self._name(row)) if tasks else None
        if task:
            tasks.append(int(task[1]))
        else:
            self._others.append(row)

    def _name(self, row: str) -> str:
        return row.split(SEPARATOR, self._at + 1)[self._at]

    def doubtful(self) -> dict[str, int]:
        """Arrays that may have one more task, and which."""
        found: dict[str, int] = {}
        for array, tasks in self._tasks.items():
            # In the order of their numbers, as squeue makes them: a cheap test comes first.
            if len(tasks) > 1 and abs(tasks[1] - tasks[0]) > 1:
                tasks.sort()
                step = tasks[1] - tasks[0]
                even = all(b - a == step for a, b in itertools.pairwise(tasks))
                if even and step > 1 and tasks[-1] + step - tasks[0] > _LEAST_SPAN:
                    found[array] = tasks[-1] + step
        if found:
            names = {self._name(row) for row in self._first.values()}
            found = {array: n for array, n in found.items() if f"{array}_{n}" not in names}
        return found

    def complete(self, doubtful: Mapping[str, int], together: Iterable[str]) -> None:
        """Take in the tasks that are among ``together``: rows of arrays, as squeue prints them."""
        for squeue_id in together:
            match = _ROW.fullmatch(squeue_id)
            if match is not None and match["base"] in doubtful:
                wanted = doubtful[match["base"]]
                if any(wanted in tasks for tasks in _ranges(squeue_id)):
                    self._tasks[match["base"]].append(wanted)

    def rows(self) -> list[str]:
        """One row for each record."""
        for raw, tasks in self._tasks.items():
            if len(tasks) > 1:
                cells = self._first[raw].split(SEPARATOR, self._at + 1)
                cells[self._at] = f"{cells[self._at].partition('_')[0]}_[{_joined(tasks)}]"
                self._first[raw] = SEPARATOR.join(cells)
        return [*self._first.values(), *self._others]


def _joined(tasks: Iterable[int]) -> str:
    """1, 2, 4 as ``1-2,4``, the form in which Slurm writes it without a step."""
    numbers = sorted(tasks)
    parts: list[str] = []
    start = last = numbers[0]
    for number in [*numbers[1:], -1]:
        if number != last + 1:
            parts.append(str(start) if start == last else f"{start}-{last}")
            start = number
        last = number
    return ",".join(parts)

"""Array expressions: what squeue prints for the pending rest of an array, and what scontrol takes.

``squeue`` prints ``7_[1-9:2%3]``: a step and a limit of tasks at a time. ``scontrol update`` knows
neither (seen on 24.11: "Invalid job id specified"); it takes ``7_[1,3,5,7,9]``, and given exactly
the pending tasks it changes the one record that they share, without splitting it.
"""

from __future__ import annotations

import re

_ROW = re.compile(r"(?P<base>\d+)_\[(?P<tasks>[^\]]*)\]", re.ASCII)
_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)
MAX_TASKS = 4_000_000  # Slurm's own bound of MaxArraySize


def exact_id(squeue_id: str) -> tuple[str, int]:
    """The id that ``scontrol update`` takes for exactly this row, and its number of tasks.

    Anything that is not the rest of an array is its own id, of one task. Raises ValueError for an
    expression that cannot be read, or that Slurm has cut off.
    """
    match = _ROW.fullmatch(squeue_id)
    if match is None:
        if "[" in squeue_id or "..." in squeue_id:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        return squeue_id, 1
    expression = match["tasks"].partition("%")[0]
    parts: list[str] = []
    count = 0
    for item in expression.split(","):
        found = _ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        low, high, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if high < low or step < 1 or high - low >= MAX_TASKS:
            raise ValueError(f"{squeue_id!r} is not an array expression")
        tasks = range(low, high + 1, step)
        count += len(tasks)
        whole = item.partition(":")[0]
        parts.append(whole if step == 1 else ",".join(str(task) for task in tasks))
    return f"{match['base']}_[{','.join(parts)}]", count

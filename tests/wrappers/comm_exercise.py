"""Every call of `slurm_ft.comm.Comm` once, and what each must give on any transport. No torch."""

from __future__ import annotations

from typing import Any


def exercise(comm: Any) -> dict[str, Any]:
    """Every call once; the same on any transport and size."""
    first = comm.start_max(comm.rank * 10)
    second = comm.start_max(5 - comm.rank)
    # Values of different lengths, empty ones and text beyond ASCII.
    gathered = comm.gather({"rank": comm.rank, "text": "ü" * comm.rank, "none": None})
    told = comm.broadcast([1.5, "from 0", {"a": []}] if comm.rank == 0 else "ignored")
    comm.barrier()
    results = [first.result(), second.result(), first.result()]
    done = first.done() and second.done()
    empty = comm.gather("")
    comm.close()
    return {
        "rank": comm.rank,
        "size": comm.size,
        "gathered": gathered,
        "told": told,
        "max": results,
        "done": done,
        "empty": empty,
    }


def expected(rank: int, size: int) -> dict[str, Any]:
    everyone = [{"rank": r, "text": "ü" * r, "none": None} for r in range(size)]
    return {
        "rank": rank,
        "size": size,
        "gathered": everyone if rank == 0 else None,
        "told": [1.5, "from 0", {"a": []}],
        "max": [(size - 1) * 10, 5, (size - 1) * 10],
        "done": True,
        "empty": [""] * size if rank == 0 else None,
    }

"""How a task of a chain is spread over the ranks that the chain has. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slurm_ext.domain.errors import ConfigError
from slurm_ft import variables
from slurm_ft.train.layout import Layout, Wish, resolve_layout
from slurm_ft.train.task import Task


def layout_for(task: Task, wish: Wish, environ: Mapping[str, str], world: int) -> Layout:
    """How a task of the chain is spread. Raises ConfigError where it cannot be.

    The plan was made for one global batch. A task with another keeps the plan's local batch as its
    largest one, for the sake of memory, and finds its own accumulation.
    """
    own = dict(environ)
    planned = own.get(variables.GLOBAL_BATCH, "")
    if planned.isdecimal() and int(planned) != task.global_batch:
        own.pop(variables.ACCUMULATION, None)
        local = own.pop(variables.LOCAL_BATCH, "")
        if wish.max_local_batch is None and local.isdecimal():
            wish = replace(wish, max_local_batch=max(1, int(local)))
    layout = resolve_layout(own, wish, world=world, global_batch=task.global_batch)
    if layout.stages > task.depth:
        raise ConfigError(
            f"stages={layout.stages}",
            f"{task.depth} blocks cannot be cut into so many",
            "write fewer stages",
        )
    return layout


def ranks_on_node(environ: Mapping[str, str]) -> int:
    """As torchrun or Slurm says; memory is shared out by it."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
        number = environ.get(name, "").split("(")[0].split(",")[0]
        if number.isdecimal():
            return max(1, int(number))
    return 1

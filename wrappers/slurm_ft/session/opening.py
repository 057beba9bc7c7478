"""What is checked and made before the first step: ranks, plan, store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_ft import variables
from slurm_ft.comm import Comm
from slurm_ft.session import claim, shape, trial
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.session.errors import SessionError
from slurm_ft.session.saving import FunctionStore, StateStore, Store
from slurm_ft.session.settings import Settings

# What ranks must have in common, and what it is called in a message.
_COMMON = {
    "plan": f"the plan ({variables.PLAN_DIGEST})",
    "attempt": f"the attempt ({variables.ATTEMPT})",
    "directory": f"the checkpoint directory ({variables.CHECKPOINT_DIR})",
}
# Variables by which launchers tell a process how many there are. Slurm's own is that of the step:
# the one of the job is set in a batch script as well, where a program is alone.
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


class PlanDiffersError(SessionError):
    """Ranks of one job were told different things."""


def check_alone(comm: Comm, environ: Mapping[str, str]) -> None:
    """A process that is one of many must not take itself for the only one.

    All of them would write into one checkpoint directory, and none would hear of a signal that
    another one got.
    """
    if not isinstance(comm, SoloComm):
        return
    for name in _SIZES:
        size = environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise SessionError(
                f"{name}={size}, but this process reaches no other rank: open the session after"
                " torch.distributed.init_process_group (or, with MPI, after importing mpi4py.MPI);"
                f" where the ranks are independent of each other, unset {name}"
            )


def compare(comm: Comm, settings: Settings) -> None:
    """Raise PlanDiffersError on every rank where any rank was told something else."""
    said = comm.gather(
        {
            "plan": settings.plan_digest,
            "attempt": settings.attempt,
            "directory": os.path.abspath(settings.checkpoint_dir),
        }
    )
    words = comm.broadcast(differences(said) if said is not None else "")
    if words:
        raise PlanDiffersError(words)


def differences(said: Sequence[Mapping[str, Any]]) -> str:
    """What differs between the ranks, empty where nothing does."""
    told = []
    for key, name in _COMMON.items():
        ranks: dict[Any, list[int]] = {}
        for rank, words in enumerate(said):
            ranks.setdefault(words[key], []).append(rank)
        if len(ranks) > 1:
            each = "; ".join(
                f"{value!r} on rank {who[0]}" + (f" and {len(who) - 1} more" if who[1:] else "")
                for value, who in list(ranks.items())[:4]
            )
            told.append(f"{name} differs between the ranks: {each}")
    return ". ".join(told)


def check_program(comm: Comm, settings: Settings, state: object, *, writes: bool) -> None:
    """Raise SessionError on every rank where any rank's state, or the directory, is no use.

    ``writes`` says that checkpoints are to be made, and not only read.
    """
    words = "" if state is None else shape.fault(state)
    if not words and comm.rank == 0:
        words = trial.fault(settings.checkpoint_dir, writes=writes)
    said = comm.gather(words)
    told = ""
    if said is not None and any(said):
        rank = next(rank for rank, word in enumerate(said) if word)
        alike = len(set(said)) == 1 or said[rank].startswith(str(settings.checkpoint_dir))
        told = said[rank] if alike else f"rank {rank}: {said[rank]}"
    told = comm.broadcast(told)
    if told:
        raise SessionError(told)


def claim_directory(comm: Comm, settings: Settings) -> None:
    """Raise SessionError on every rank where another step of the job keeps its checkpoints here."""
    words = comm.broadcast(claim.take(settings, os.environ) if comm.rank == 0 else "")
    if words:
        raise SessionError(words)


def open_store(
    comm: Comm,
    settings: Settings,
    *,
    state: Mapping[str, Any] | None,
    save: Callable[[Path, int], object] | None,
    restore: Callable[[Path, int], object] | None,
    group: Any,
    keep: int,
) -> Store | None:
    """The store that fits what the program gave, ``None`` where it gave nothing to save."""
    if state is not None and (save is not None or restore is not None):
        raise SessionError("give the session state= or save= and restore=, not both")
    if state is not None:
        return _state_store(comm, settings, state, group, keep)
    if save is None:
        if restore is not None:
            raise SessionError("the session was given restore= without save=: give it both")
        return None
    from slurm_ft.checkpoint.files import FileStore

    store = FileStore(settings.checkpoint_dir, comm, keep=keep, quota_bytes=settings.quota_bytes)
    return FunctionStore(store, save, restore)


def _state_store(
    comm: Comm, settings: Settings, state: Mapping[str, Any], group: Any, keep: int
) -> Store:
    own = None
    if comm.size > 1:
        from slurm_ft.session.comms.torch_group import TorchComm, new_gloo_group

        if not isinstance(comm, TorchComm):
            raise SessionError(
                "state= is written by torch.distributed, which is not initialised in this program:"
                " initialise it, or give the session save= and restore="
            )
        own = new_gloo_group(group)
    from slurm_ft.checkpoint.store import CheckpointStore

    store = CheckpointStore(
        settings.checkpoint_dir,
        comm,
        group=own,
        keep=keep,
        quota_bytes=settings.quota_bytes,
        blocks=settings.block_store,
    )
    return StateStore(store, state)

"""How ranks reach each other: alone, over torch's gloo, over MPI. Torch-free until one is chosen.

`solo`, `torch_group` and `mpi` implement `slurm_ft.comm.Comm`; this module chooses. An initialised
torch.distributed wins over MPI, because an MPI program that also initialised torch trains through
the latter. `board`, `segment` and `shared_max` carry the maxima of ranks that share a node.
"""

from __future__ import annotations

import sys
from typing import Any

from slurm_ft.comm import Comm, Maxima
from slurm_ft.session.comms.shared_max import share
from slurm_ft.session.comms.solo import SoloComm


def choose(limit_s: float, group: Any = None) -> Comm:
    """The communicator for this process; collective where there is more than one rank.

    ``group`` is the torch process group whose ranks take part, ``None`` all of them. ``limit_s``
    is the limit of an exchange that names none of its own.
    """
    torch = sys.modules.get("torch")
    if torch is not None and _initialised(torch):
        from slurm_ft.session.comms.torch_group import TorchComm

        return TorchComm(limit_s, group)
    if group is not None:
        raise ValueError(
            f"group={group!r} was given, but torch.distributed is not initialised in this process:"
            " call init_process_group before slurm_ft.session"
        )
    if _mpi_running():
        from slurm_ft.session.comms.mpi import MpiComm

        return MpiComm(limit_s)
    return SoloComm()


def for_agreement(comm: Comm, limit_s: float) -> Maxima:
    """The cheapest maxima over the ranks of ``comm``: its own where nothing better is in common.

    A collective call, to be closed beside ``comm``.
    """
    if comm.size == 1:
        return comm
    return share(comm, limit_s) or comm


def _initialised(torch: Any) -> bool:
    distributed = getattr(torch, "distributed", None)
    return bool(
        distributed is not None and distributed.is_available() and distributed.is_initialized()
    )


def _mpi_running() -> bool:
    """Whether this program uses MPI with more than one rank.

    Only where the program itself has loaded mpi4py: importing ``mpi4py.MPI`` initialises MPI,
    which is for the program to decide and fails under a launcher without MPI.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return False
    return int(module.COMM_WORLD.Get_size()) > 1

"""Inside a job: launch, safe points, checkpoints, pause. Importing this imports no torch.

Public names are looked up on first use, so that ``ft-run``, which needs none of them before the
program starts, does not pay for the session.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_ft.session.session import Session, session

__all__ = ["Session", "session"]


def __getattr__(name: str) -> Any:
    if name == "session":
        # The package, which can be called: see there.
        return importlib.import_module("slurm_ft.session")
    if name == "Session":
        return importlib.import_module("slurm_ft.session.session").Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Inside a job: launch, safe points, checkpoints, pause. Importing this imports no torch.

Public names are looked up on first use, so that ``ft-run``, which needs none of them before the
program starts, does not pay for the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_ft.session.session import Session, session

__all__ = ["Session", "session"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slurm_ft.session import session as module

    return getattr(module, name)

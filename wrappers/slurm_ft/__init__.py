"""Inside a job: launch, safe points, checkpoints, pause. Importing this imports no torch.

Public names are looked up on first use, so that ``ft-run``, which needs none of them before the
program starts, does not pay for the session.
"""

from __future__ import annotations

# Not typing's: importing it takes as long as all of ft-run's own modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slurm_ft.session.session import Session, session

__all__ = ["Session", "session"]


def __getattr__(name: str) -> Any:
    if name == "session":
        # The package, which can be called: see there.
        import slurm_ft.session as package

        return package
    if name == "Session":
        from slurm_ft.session.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

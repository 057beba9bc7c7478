"""An action is one idempotent Slurm write: repeating it changes nothing more.

``fields`` holds the keywords of ``scontrol update`` in the order in which they are written, so
that what is journalled, what is sent and what is read back are the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """Why a write is made. The order of members is the order of waves in one cycle."""

    FACTOR = "factor"  # SiteFactor: place in the queue
    LEASE = "lease"  # StartTime = now + lease
    SHAPE = "shape"  # resize transaction, only under a lease
    RESTORE = "restore"  # give back what we changed
    LIFT = "lift"  # StartTime = now: the job may start


@dataclass(frozen=True, slots=True)
class Action:
    """One write to one job (or node), with the reason that the journal and explain show."""

    kind: ActionKind
    job_id: str
    fields: tuple[tuple[str, str], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What Slurm answered to one action. ``ok`` is not success: success is read back."""

    action: Action
    ok: bool
    message: str = ""

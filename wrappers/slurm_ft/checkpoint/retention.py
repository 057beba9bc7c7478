"""Which checkpoints stay, and how the others go. Standard library only.

Deciding is pure; deleting first renames, so that a checkpoint is never seen half deleted. The
newest complete checkpoint is never deleted, whatever the numbers say.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from slurm_ft.checkpoint.layout import GONE, Complete, Listing

log = logging.getLogger(__name__)


def superfluous(listing: Listing, keep: int, damaged: Collection[str] = ()) -> tuple[Complete, ...]:
    """Those beyond the newest ``keep`` good ones, newest first.

    ``damaged`` are names that verify by size and not by content; they do not count as kept, and
    stay only while they are newer than the oldest one that is.
    """
    good = 0
    for number, item in enumerate(listing.complete):
        if good >= max(1, keep):
            return listing.complete[number:]
        good += item.path.name not in damaged
    return ()


def make_room(
    complete: Sequence[Complete], expected_bytes: int, quota_bytes: int
) -> tuple[tuple[Complete, ...], int]:
    """The oldest ones that must go so that a new one fits, and the bytes still lacking then."""
    used = sum(item.manifest.own_bytes for item in complete)
    gone: list[Complete] = []
    for item in reversed(complete[1:]):
        if used + expected_bytes <= quota_bytes:
            break
        used -= item.manifest.own_bytes
        gone.append(item)
    return tuple(gone), max(0, used + expected_bytes - quota_bytes)


def delete(item: Complete, forget: Callable[[Complete], None] | None = None) -> None:
    """Delete a checkpoint; ``forget`` is told when nothing of it can be read any more."""
    gone = item.path.with_name(f"{GONE}{item.path.name}-{secrets.token_hex(4)}")
    os.rename(item.path, gone)
    delete_tree(gone)
    if forget is not None:
        forget(item)


def delete_tree(path: Path) -> None:
    """Delete what nobody reads; what cannot be deleted is logged and left to the next time."""

    def tell(_function: object, name: str, info: object) -> None:
        error = info[1] if isinstance(info, tuple) else info
        if not isinstance(error, FileNotFoundError):
            log.warning("%s: cannot be deleted (%s); it is tried again later", name, error)

    shutil.rmtree(path, onerror=tell)

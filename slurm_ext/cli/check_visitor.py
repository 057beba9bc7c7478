"""``slurm-ext check`` by somebody who is neither root nor the daemon's user.

What such a user cannot see is told as such: it neither passes nor fails, and whoever reads it knows
whom to ask. What the daemon tells everybody, in its spool, is told as what it is.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slurm_ext.cli.checkline import Line, advice, mend, ok, unseen
from slurm_ext.control.config import Config
from slurm_ext.control.spool import read_cluster
from slurm_ext.domain.document import Mode
from slurm_ext.domain.errors import ProtocolError, SourceMissingError
from slurm_ext.domain.request import PLANS
from slurm_ext.domain.spans import about


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks, and the daemon's user, as far as anything that belongs to it can be seen."""

    user: str
    daemon: str

    def cannot_see(self, name: str, what: str) -> Line:
        """A line about something out of this user's sight."""
        return unseen(name, f"{what}: not visible to {self.user}", f"run as root or {self.daemon}")


def visitor(config: Config) -> Visitor | None:
    """Who asks, where that is an ordinary user; ``None`` for root and the daemon's user.

    Also ``None`` where nothing of the daemon's is there yet: then nobody knows whose it will be.
    """
    uid = os.geteuid()
    if uid == 0:
        return None
    barred = False
    for path in (config.journal, config.spool / PLANS):
        try:
            owner = path.stat().st_uid
        except PermissionError:
            barred = True
        except OSError:
            continue
        else:
            return None if owner == uid else Visitor(_name(uid), _name(owner))
    return Visitor(_name(uid), "the daemon's user") if barred else None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def as_seen(who: Visitor, name: str, path: Path, line: Line) -> Line:
    """The line, unless the file that it is about cannot be read by this user."""
    if os.access(path, os.R_OK) or (not os.path.exists(path) and _searchable(path.parent)):
        return line
    return who.cannot_see(name, str(path))


def _searchable(folder: Path) -> bool:
    return os.access(folder, os.X_OK)


def journal(config: Config, who: Visitor) -> Line:
    """Journals belong to the daemon's user alone."""
    return who.cannot_see("journal", str(config.journal))


def spool(config: Config, who: Visitor, line: Line) -> Line:
    """Everything about the spool but that its plans belong to the daemon's user."""
    try:
        owner = (config.spool / PLANS).stat().st_uid
    except OSError:
        return line
    if line.name != "spool" or not line.found.startswith(f"{config.spool}/{PLANS} belongs"):
        return line
    found = (
        f"{config.spool}, mode 1777; whether {_name(owner)}, who writes it, is the daemon's user"
    )
    return who.cannot_see("spool", found)


def daemon(config: Config, who: Visitor) -> Iterator[Line]:
    """What the daemon says of itself in the spool."""
    try:
        whole = read_cluster(config.spool)
    except (SourceMissingError, ProtocolError):
        yield who.cannot_see("daemon", "its process")
        return
    ago_s = max(0.0, time.time() - whole.made_s)
    if ago_s > whole.lease_s:
        yield mend(
            "daemon",
            f"its last cycle was {about(ago_s)} ago, by its spool",
            f"ask {who.daemon}'s administrator to look at its log",
        )
    else:
        yield ok("daemon", f"cycle {whole.cycle} was {about(ago_s)} ago, by its spool")
    if whole.mode is Mode.RELEASED:
        yield advice(
            "released",
            "an administrator took everything back",
            "slurm-ext release --resume as root gives it to the daemon again",
        )

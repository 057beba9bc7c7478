"""One line of ``slurm-ext check``: what was asked, how it came out, how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a line came out."""

    OK = "ok"
    ADVICE = "advice"
    MEND = "mend"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: what was asked, how it came out, what was found and how to mend it."""

    name: str
    level: Level
    found: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.level.value:<7}{self.name:<22} {self.found}"
        return f"{text}: {self.fix}" if self.fix else text


def ok(name: str, found: str) -> Line:
    """Nothing to do."""
    return Line(name, Level.OK, found)


def mend(name: str, found: str, fix: str) -> Line:
    """Something does not work until this is mended."""
    return Line(name, Level.MEND, found, fix)


def unseen(name: str, found: str, fix: str) -> Line:
    """Out of sight of whoever asks: neither right nor wrong."""
    return Line(name, Level.UNSEEN, found, fix)


def advice(name: str, found: str, fix: str) -> Line:
    """It works, and could work better."""
    return Line(name, Level.ADVICE, found, fix)

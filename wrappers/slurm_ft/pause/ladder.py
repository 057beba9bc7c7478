"""What a rank gives back in a pause, part by part, and how it takes it back.

A *part* is one thing that can be released and restored: device memory, a communicator's buffers,
the whole device state of the process. Before a pause each part is probed; one that cannot be done
here is left out, and a part that is required and missing makes the release fail, before anything
was touched. Parts are released in order and restored in the opposite order. When one fails, in
whatever way, or the deadline passes, those already released are restored at once: a release
happened whole or not at all. A restore that fails leaves a state that nobody may train on, and says
so. Errors that no part has foreseen count as failures too: a program that could have gone on must
not end because of a pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_ext.domain.errors import SlurmExtError

_log = logging.getLogger(__name__)

# A roll-back has no deadline of its own.
_BACK_S = 30.0


class PartError(SlurmExtError):
    """A part could not be released (and is as it was), or could not be restored."""


class Part(Protocol):
    """One thing that can be given back."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def missing(self) -> str:
        """Why this cannot be done here; empty where it can. Cheap, and changes nothing."""
        ...

    def release(self, deadline_s: float) -> int:
        """Give back; the bytes that became free. Raises PartError having put back everything."""
        ...

    def restore(self, deadline_s: float) -> None:
        """Take back what was given, which may be nothing. Raises PartError where it is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What one pause moved on this rank."""

    released_bytes: int = 0
    release_s: float = 0.0
    restore_s: float = 0.0


class Ladder:
    """The parts of one rank. Deadlines are seconds of the given clock."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        required: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = tuple(parts)
        self._required = required
        self._clock = clock
        self._released: list[Part] = []
        self.figures = Figures()

    def release(self, limit_s: float) -> None:
        """Give back every part that can be; raises PartError with nothing given back."""
        began_s = self._clock()
        deadline_s = began_s + limit_s
        usable: list[Part] = []
        for part in self._parts:
            try:
                why = part.missing()
            except Exception as exc:
                _log.exception("pause: %s cannot be probed", part.name)
                why = f"{type(exc).__name__}: {exc}"
            if not why:
                usable.append(part)
            elif part.name in self._required:
                raise PartError(f"{part.name}: {why}")
            else:
                _log.info("pause: without %s: %s", part.name, why)
        total = 0
        for part in usable:
            try:
                if self._clock() >= deadline_s:
                    raise PartError(f"{part.name}: no time left of {limit_s:g} s")
                total += part.release(deadline_s)
            except (PartError, LostStateError):
                self._roll_back()
                raise
            except Exception as exc:
                # Not foreseen by the part, so it may stand half way.
                _log.exception("pause: %s", part.name)
                self._released.append(part)
                self._roll_back()
                raise PartError(f"{part.name}: {type(exc).__name__}: {exc}") from exc
            self._released.append(part)
        self.figures = Figures(total, self._clock() - began_s)

    def restore(self, limit_s: float) -> None:
        """Take back what was given; raises PartError where that is not possible any more."""
        began_s = self._clock()
        while self._released:
            part = self._released[-1]
            try:
                part.restore(began_s + limit_s)
            except PartError:
                raise
            except Exception as exc:
                raise PartError(f"{part.name}: {type(exc).__name__}: {exc}") from exc
            self._released.pop()
        self.figures = Figures(
            self.figures.released_bytes, self.figures.release_s, self._clock() - began_s
        )

    def _roll_back(self) -> None:
        """Undo a half release. A failure here is worse than the one that caused it."""
        while self._released:
            part = self._released[-1]
            try:
                part.restore(self._clock() + _BACK_S)
            except Exception as exc:
                raise LostStateError(f"{part.name}: lost while rolling back: {exc}") from exc
            self._released.pop()


class LostStateError(SlurmExtError):
    """A roll-back failed: this rank's state is lost, and it must not train on."""

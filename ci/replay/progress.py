"""What is shown while a replay runs: one line per variant, redrawn on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from ci.replay.options import Variant
from ci.replay.stage import Progress

# Without a terminal (a log file, CI) a line now and then is enough.
_QUIET_EVERY_S = 15.0
_BAR = 24


class Display:
    """Draws to stderr; `show` may be called as often as one likes."""

    def __init__(
        self, total: int, last_arrival_s: float, expected_s: float, out: TextIO = sys.stderr
    ) -> None:
        self._total = total
        self._last_arrival_s = last_arrival_s
        self._expected_s = expected_s
        self._out = out
        self._terminal = out.isatty()
        self._drawn = 0
        self._told: float | None = None

    def show(self, progress: Mapping[Variant, Progress], now: float) -> None:
        """Redraw, or on a file print when it is time again."""
        if not self._terminal:
            if self._told is not None and now - self._told < _QUIET_EVERY_S:
                return
            self._told = now
        lines = [self.line(variant, state, now) for variant, state in progress.items()]
        if self._terminal and self._drawn:
            self._out.write(f"\x1b[{self._drawn}F")
        end = "\x1b[K\n" if self._terminal else "\n"
        self._out.write("".join(line + end for line in lines))
        self._out.flush()
        self._drawn = len(lines)

    def close(self) -> None:
        """Leave the last lines where they are."""
        self._drawn = 0

    def line(self, variant: Variant, state: Progress, now: float) -> str:
        """One variant: bar, counts, time left."""
        if state.begun_s is None:
            return f"{variant:10} {state.phase}"
        filled = _BAR * state.done // max(1, self._total)
        pending = state.submitted - state.running - state.done
        return (
            f"{variant:10} [{'#' * filled:{_BAR}}] {state.done:3}/{self._total} done, "
            f"{state.running:2} running, {pending:3} pending, "
            f"{self._total - state.submitted:3} to come, {self._left(state, now)}"
        )

    def _left(self, state: Progress, now: float) -> str:
        """Time left: until the last arrival as planned, then by the pace so far."""
        begun = state.begun_s if state.begun_s is not None else now
        elapsed = now - begun
        left = self._expected_s - elapsed
        if elapsed > self._last_arrival_s and state.done:
            left = max(left, elapsed * (self._total - state.done) / self._total)
        if state.done >= self._total:
            return "finished"
        return f"about {left / 60:.1f} min left" if left > 6 else "nearly there"

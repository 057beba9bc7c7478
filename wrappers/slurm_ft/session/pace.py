"""How fast this rank goes: lengths of its steps, samples a second, seconds of its own computing.

No I/O and no clock: the times are arguments. What training stood still for (saves, a pause) is
left out, so that the rate is the configuration's and can be compared with a measured table; the
time lost is reported by itself.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from statistics import median

# Of steps that the median is over, and of samples that the rate is over.
_STEPS = 63
_WINDOW_S = 60.0
# Steps that count as recent.
_RECENT = 32
# A median is sorted anew this seldom: a step's cost must stay in the microseconds.
_REFRESH = 16


class Pace:
    """Fed once a step."""

    def __init__(self, start_s: float) -> None:
        self._last_s = start_s
        self._still_s = 0.0  # of the present step
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._median_s: float | None = None
        self._fed = 0
        # Active seconds and samples at each step of the window, oldest first.
        self._active_s = 0.0
        self._samples = 0
        self._window: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._compute_s = 0.0
        self._computed = 0

    def step(self, now_s: float, samples: int, compute_s: float | None) -> None:
        """A step ended."""
        took_s = now_s - self._last_s - self._still_s
        if took_s < 0:
            took_s = 0.0
        self._last_s, self._still_s = now_s, 0.0
        self._steps.append(took_s)
        self._fed += 1
        self._active_s += took_s
        self._samples += samples
        self._window.append((self._active_s, self._samples))
        while len(self._window) > 2 and self._window[1][0] < self._active_s - _WINDOW_S:
            self._window.popleft()
        if compute_s is not None:
            self._compute_s += compute_s
            self._computed += 1

    def stood_still(self, seconds: float) -> None:
        """Training stood still for something else since the last step ended."""
        self._still_s += seconds

    @property
    def steps(self) -> int:
        """Steps that ended in this attempt."""
        return self._fed

    @property
    def longest_recent_s(self) -> float:
        """Of the last few steps, 0 before the first."""
        return max(islice(reversed(self._steps), _RECENT), default=0.0)

    @property
    def median_step_s(self) -> float | None:
        """Of the last steps, up to date within a few; ``None`` before the first."""
        if self._steps and (self._median_s is None or self._fed % _REFRESH == 0 or self._fed < 8):
            self._median_s = median(self._steps)
        return self._median_s

    @property
    def samples_per_s(self) -> float:
        """Over the last minute or so; 0 before there is anything to tell."""
        active_s = self._window[-1][0] - self._window[0][0]
        return (self._window[-1][1] - self._window[0][1]) / active_s if active_s > 0 else 0.0

    def take_compute_s(self) -> float | None:
        """Mean seconds per step before the collective, since the last call."""
        if not self._computed:
            return None
        mean_s = self._compute_s / self._computed
        self._compute_s, self._computed = 0.0, 0
        return mean_s

"""What rank 0 asks for by the clock: checkpoints, reports, another cadence.

One rank's clock decides, and the agreement carries it to the others: two ranks whose clocks differ
by a moment would otherwise save at different steps.
"""

from __future__ import annotations

from slurm_ft.session.agreement import (
    SHORTEST_ROUND_S,
    Agreement,
    Kind,
    best_cadence,
    worth_changing,
)
from slurm_ft.session.interval import Bounds, interval_s
from slurm_ft.session.pace import Pace
from slurm_ft.session.saving import Saving

# The ranks' own seconds are gathered this seldom: it is an exchange that all of them wait for.
GATHER_EVERY_S = 30.0
GATHER_FIRST_S = 5.0
# Steps after which the cadence is looked at: early, and then now and then.
_CADENCE_FIRST = 4
_CADENCE_EVERY = 16


class Wishes:
    """Asked once a step on rank 0. Times are monotonic seconds."""

    def __init__(self, agreement: Agreement, bounds: Bounds, mtbf_s: float, now_s: float) -> None:
        self._agreement = agreement
        self._bounds = bounds
        self._mtbf_s = mtbf_s
        self._gather_due_s = now_s + GATHER_FIRST_S
        self.interval_s = interval_s(bounds, mtbf_s)

    def saved(self, saving: Saving) -> None:
        """A save ended: what it cost decides when the next one is due."""
        self.interval_s = interval_s(self._bounds, self._mtbf_s, saving.cost_s, saving.save_s)

    def ask(self, now_s: float, step: int, saving: Saving, pace: Pace) -> None:
        """Ask for what is due."""
        if (
            now_s - saving.ended_s >= self.interval_s
            and saving.possible
            and not saving.under_way
            and saving.saved_step != step
        ):
            self._agreement.want(Kind.SAVE)
        if now_s >= self._gather_due_s:
            self._gather_due_s = now_s + GATHER_EVERY_S
            self._agreement.want(Kind.REPORT)
        every, steps = self._agreement.every, pace.steps
        if every > 1 or steps == _CADENCE_FIRST or steps % _CADENCE_EVERY == 0:
            wanted = best_cadence(pace.median_step_s or 0.0)
            # Steps that have become long are answered at once: their rounds are too far apart.
            if wanted > 1 and pace.longest_recent_s >= SHORTEST_ROUND_S:
                wanted = 1
            # What was asked for before and is not agreed on yet is out of date.
            self._agreement.forget(Kind.CADENCE)
            if worth_changing(every, wanted):
                self._agreement.want(Kind.CADENCE, wanted)

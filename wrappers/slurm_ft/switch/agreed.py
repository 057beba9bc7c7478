"""What a chain does where its ranks have agreed on something in the middle of a task.

Two things can be agreed on that concern the moves between tasks: a pause, for which the memory of
the present task is given back, and that something failed beside training. Both come at a safe
point, after the same step on all ranks. Nothing is agreed on here, and no task is begun or ended.

A pause that comes while a task is still being moved waits for that, although whoever asked for it
waits too: memory that is given back while a mover writes into it is lost for both tasks.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from slurm_ext.domain.errors import SlurmExtError
from slurm_ft.session.agreement import Kind
from slurm_ft.session.session import Session
from slurm_ft.switch.beside import Beside
from slurm_ft.switch.handover import Handover
from slurm_ft.switch.overlap import SwitchError
from slurm_ft.train.trainer import Trainer

_log = logging.getLogger(__name__)

# A failure was agreed on: until the thread beside of every rank has met it.
FAIL_S = 30.0


class Present:
    """The state of whatever task trains now, for a pause that gives its memory back."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def state_dict(self) -> dict[str, Any]:
        """Empty between two tasks."""
        return {} if self.trainer is None else self.trainer.state.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Of the same task."""
        if self.trainer is not None:
            self.trainer.state.load_state_dict(saved)


class Agreed:
    """Takes its place among what the session does when something was agreed on."""

    def __init__(self, ft: Session, beside: Beside, handover: Handover) -> None:
        self._ft, self._beside, self._handover = ft, beside, handover
        ft.on_agreed[Kind.FAIL] = self.fail
        # The session's own answer to a pause, where it has one.
        self._pause = ft.on_agreed.get(Kind.PAUSE)
        if self._pause is not None:
            ft.on_agreed[Kind.PAUSE] = self.pause

    def fail(self, _: int) -> None:
        """Beside training something failed on some of the ranks: end the chain on all of them."""
        self._beside.idle(FAIL_S)
        # The present task loses nothing that can still be saved.
        with contextlib.suppress(SlurmExtError):
            self._ft.save()
        failed = self._beside.failed
        raise failed or SwitchError("what another rank did beside training has failed: see there")

    def pause(self, epoch: int) -> None:
        """A pause moves the task's memory: nothing else may be moving it then.

        The wait is bounded by what the others wait for this rank. Past it the pause is not
        answered, and whoever asked takes it back.
        """
        assert self._pause is not None
        limit_s = self._ft.settings.collective_timeout_s / 4
        until = time.monotonic() + limit_s
        still = self._handover.early_over(limit_s)
        if self._beside.failed is None and still and self._beside.idle(until - time.monotonic()):
            self._handover.all_here()
            self._pause(epoch)
        else:
            _log.warning("rank %d: no pause: a task is still being moved", self._ft.rank)

"""The old task while it leaves the device: its state as the store is given it.

Tensors are over host memory: the twins to which the storages move, or clean copies that the host
had anyway. What has neither stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slurm_ft.switch.incoming import Incoming
from slurm_ft.switch.storages import Held, address, mirror
from slurm_ft.train.state import TaskState


class Leaving:
    """Has a state once `note` was called, for which there is time until anything is overwritten."""

    def __init__(
        self,
        name: str,
        state: TaskState,
        held: Sequence[Held],
        came_as: Incoming | None,
        marks: Mapping[str, int],
    ) -> None:
        """``name`` is the task's, ``came_as`` what it came as, ``marks`` what its frozen storages
        hold now."""
        self.name = name
        self._live, self._held, self._marks = state, held, marks
        self._came_as = came_as
        self._frozen = state.frozen_names()
        self._state: dict[str, Any] = {}

    def note(self, twins: Mapping[int, Tensor]) -> None:
        """``twins`` are by the address of the storages that leave: see `StageSwitch.drained`."""
        known = dict(twins)
        if self._came_as is not None:
            for entry in self._held:
                copy = self._came_as.clean_copy(entry.key, self._marks.get(entry.key))
                if copy is not None:
                    known.setdefault(address(entry.bytes), copy)
        self._state = mirror(self._live.state_dict(), known)

    def state_dict(self) -> dict[str, Any]:
        """What the store saves."""
        return self._state

    def load_state_dict(self, _: Mapping[str, Any]) -> None:
        """Nothing comes back this way."""
        raise NotImplementedError

    def frozen_names(self) -> list[str]:
        """What the store may share between checkpoints."""
        return self._frozen

"""Who may still decide about a task: the chain that begins it, or the user who takes it out.

Each task has one name in the chain's directory that can be made once; whoever makes it decides.
It is a symbolic link, whose target is the decision: making one is atomic on shared file systems
too, and cannot be seen half made. The decision to begin a task holds for the life of the chain.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PREFIX = "claim-"
_BEGUN = "begun"
_REMOVED = "removed"


class Claims:
    """The decisions so far about the tasks of one chain, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Read once each: looking happens between two tasks and must cost nothing.
        self._begun: set[str] = set()

    def begin(self, name: str) -> bool:
        """The chain begins the task, unless it was taken out."""
        return name in self._begun or self._claim(name, _BEGUN)

    def remove(self, name: str) -> bool:
        """Take the task out, unless it has begun."""
        return self._claim(name, _REMOVED)

    def forget(self, name: str) -> None:
        """A task of the name of one that was taken out has come in its place."""
        if self._read(name) == _REMOVED:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / f"{_PREFIX}{name}").unlink()

    def begun(self) -> set[str]:
        """Names of tasks that have begun."""
        self._look()
        return set(self._begun)

    def removed(self) -> set[str]:
        """Names of tasks that were taken out."""
        return self._look()

    def _look(self) -> set[str]:
        removed: set[str] = set()
        try:
            found = os.listdir(self._folder)
        except FileNotFoundError:
            return removed
        for name in (entry.removeprefix(_PREFIX) for entry in found if entry.startswith(_PREFIX)):
            if name in self._begun:
                continue
            decision = self._read(name)
            if decision == _REMOVED:
                removed.add(name)
            elif decision == _BEGUN:
                self._begun.add(name)
        return removed

    def _claim(self, name: str, decision: str) -> bool:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.symlink(decision, self._folder / f"{_PREFIX}{name}")
        except FileExistsError:
            return self._read(name) == decision
        return True

    def _read(self, name: str) -> str:
        try:
            return os.readlink(self._folder / f"{_PREFIX}{name}")
        except OSError:
            return ""

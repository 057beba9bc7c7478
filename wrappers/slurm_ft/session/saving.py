"""A session's checkpoints: which store holds them, and what they cost.

Two kinds of state, one face: objects that torch.distributed.checkpoint writes, and functions of
the user that write their own files. An asynchronous save of the latter does not exist: nobody
knows when their data may change again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from slurm_ft.checkpoint.commit import Saved
from slurm_ft.checkpoint.loading import Loaded
from slurm_ft.checkpoint.manifest import Meta
from slurm_ft.session.errors import SessionError

ASYNC, SYNC, NONE = "async", "sync", "none"
MODES = (ASYNC, SYNC, NONE)

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What both stores are reduced to. Every call but `done` is collective."""

    asynchronous: bool

    def save(self, step: int, meta: Meta) -> Saved:
        """Durable when it returns."""
        ...

    def start(self, step: int, meta: Meta) -> None:
        """Staged when it returns."""
        ...

    def done(self) -> bool:
        """Whether `finish` would not wait for this rank's own part."""
        ...

    def finish(self, limit_s: float | None) -> Saved | None:
        """Wait for the save under way and commit it."""
        ...

    def load(self) -> Loaded | None:
        """The newest complete one, put into the state."""
        ...

    def close(self) -> None:
        """Free what it holds; waits for nobody."""
        ...

    def move(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Save another state in another directory from now on."""
        ...


class StateStore:
    """Objects with a state, through a CheckpointStore."""

    asynchronous = True

    def __init__(self, store: Any, state: Mapping[str, Any]) -> None:
        self._store = store
        self._state = state

    def save(self, step: int, meta: Meta) -> Saved:
        return self._store.save(step, self._state, meta)  # type: ignore[no-any-return]

    def start(self, step: int, meta: Meta) -> None:
        self._store.start(step, self._state, meta)

    def done(self) -> bool:
        return bool(self._store.done())

    def finish(self, limit_s: float | None) -> Saved | None:
        return self._store.finish(limit_s)  # type: ignore[no-any-return]

    def load(self) -> Loaded | None:
        return self._store.load(self._state)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._store.close()

    def move(self, directory: Path, state: Mapping[str, Any]) -> None:
        self._store.move(directory)
        self._state = state


class FunctionStore:
    """The user's own functions, through a FileStore."""

    asynchronous = False

    def __init__(
        self,
        store: Any,
        save: Callable[[Path, int], object],
        restore: Callable[[Path, int], object] | None,
    ) -> None:
        self._store = store
        self._save = save
        self._restore = restore

    def save(self, step: int, meta: Meta) -> Saved:
        def write(directory: Path) -> None:
            self._save(directory, step)

        return self._store.save(step, write, meta)  # type: ignore[no-any-return]

    def start(self, step: int, meta: Meta) -> None:
        raise SessionError("a save function cannot be called asynchronously: call save")

    def done(self) -> bool:
        return True

    def finish(self, limit_s: float | None) -> Saved | None:
        return None

    def load(self) -> Loaded | None:
        complete = self._store.latest()
        if complete is None:
            return None
        if self._restore is None:
            raise SessionError(
                f"{complete.path} holds a checkpoint of this job, and the session was given save="
                " without restore=: give it the function that reads what save wrote"
            )
        restore = self._restore

        # The store may pass over a damaged one for an older one: the step is that of the path.
        def read(directory: Path) -> None:
            restore(directory, int(directory.name.removeprefix("step-").partition(".")[0]))

        return self._store.load(read)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._store.close()

    def move(self, directory: Path, state: Mapping[str, Any]) -> None:
        raise SessionError("tasks follow one another only in a session that was given state=")


class Saving:
    """Saves through a store, and remembers when and at what cost.

    ``save_s`` is what the last save took in all, ``cost_s`` how long training stood still for it,
    ``stall_s`` how long it has stood still for all of them. Times are monotonic seconds.
    """

    def __init__(self, store: Store | None, mode: str) -> None:
        self._store = store if mode != NONE else None
        self._loads = store
        self._asynchronous = mode == ASYNC and store is not None and store.asynchronous
        self._began_s: float | None = None
        self._stall_of_this_s = 0.0
        self.made = 0  # saves that succeeded
        self.saved_step: int | None = None
        self.saved_at_s: float | None = None  # seconds since the epoch
        self.ended_s = time.monotonic()
        self.save_s: float | None = None
        self.cost_s: float | None = None
        self.stall_s = 0.0

    @property
    def possible(self) -> bool:
        """Whether there is anything to save and it is wanted."""
        return self._store is not None

    @property
    def under_way(self) -> bool:
        """Whether an asynchronous save has begun and was not finished; the same on all ranks."""
        return self._began_s is not None

    def done(self) -> bool:
        """Whether this rank's part of it is written."""
        return self._store is not None and self._store.done()

    def load(self) -> Loaded | None:
        """Restore from the newest complete checkpoint."""
        loaded = None if self._loads is None else self._loads.load()
        if loaded is not None:
            self.saved_step = loaded.step
        self.ended_s = time.monotonic()
        return loaded

    def begin(self, step: int, meta: Meta) -> None:
        """A save at this step: begun where it can be asynchronous, else made."""
        assert self._store is not None
        if not self._asynchronous:
            self.save(step, meta)
            return
        began_s = time.monotonic()
        try:
            self._store.start(step, meta)
            self._began_s = began_s
        finally:
            self._stood_still(began_s)
            self.ended_s = time.monotonic()

    def finish(self, limit_s: float | None = None) -> Saved | None:
        """Commit the save under way, if there is one."""
        if self._store is None or self._began_s is None:
            return None
        again_s = time.monotonic()
        began_s, self._began_s = self._began_s, None
        try:
            saved = self._store.finish(limit_s)
        finally:
            self._stood_still(again_s)
            cost_s, self._stall_of_this_s = self._stall_of_this_s, 0.0
            self.ended_s = time.monotonic()
        if saved is not None:
            self._note(saved, began_s, cost_s)
        return saved

    def save(self, step: int, meta: Meta) -> Saved:
        """A durable save, whatever the mode."""
        assert self._store is not None
        began_s = time.monotonic()
        try:
            saved = self._store.save(step, meta)
        finally:
            self._stood_still(began_s)
            cost_s, self._stall_of_this_s = self._stall_of_this_s, 0.0
            self.ended_s = time.monotonic()
        self._note(saved, began_s, cost_s)
        return saved

    def move(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Another task's state and directory; no save is under way."""
        if self.under_way:
            raise SessionError("a save is under way: settle it before the next task")
        if self._loads is not None:
            self._loads.move(directory, state)
        self.saved_step = self.saved_at_s = None
        self.ended_s = time.monotonic()

    def close(self) -> None:
        """Free the store."""
        if self._loads is not None:
            self._loads.close()

    def _stood_still(self, since_s: float) -> None:
        still_s = time.monotonic() - since_s
        self._stall_of_this_s += still_s
        self.stall_s += still_s

    def _note(self, saved: Saved, began_s: float, cost_s: float) -> None:
        self.made += 1
        self.saved_step = saved.step
        self.saved_at_s = time.time()
        # The store's own figure leaves out how long the program took to come back and finish.
        self.save_s = saved.save_s or time.monotonic() - began_s
        self.cost_s = cost_s
        _log.info(
            "step %d is saved in %s: %.2f s, training stood still for %.2f s",
            saved.step,
            saved.path,
            self.save_s,
            cost_s,
        )

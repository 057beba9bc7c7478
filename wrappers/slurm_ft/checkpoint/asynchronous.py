"""One save at a time in a thread of its own. Standard library only.

The thread does what takes long: torch's plan and write, digests, fsync, the commit. It has
exchanges of its own for that. What it raises is kept as a value, and told when the ranks look at
the save together. A save that does not end is reported, never joined without a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slurm_ft.checkpoint.commit import Committed
from slurm_ft.checkpoint.errors import CheckpointError


class Writer:
    """A save that runs in a thread, and what became of it."""

    def __init__(self, save: Callable[[], Committed]) -> None:
        self._save = save
        self._ended = threading.Event()
        self.committed: Committed | None = None
        self.problem = ""
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="ft-checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended, one way or the other."""
        return self._ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within the limit."""
        return self._ended.wait(limit_s)

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self.committed = self._save()
        except CheckpointError as exc:
            self.problem = str(exc)
        except BaseException as exc:  # the thread's end must be known, whatever ended it
            self.problem = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            self.seconds = time.monotonic() - started
            self._ended.set()

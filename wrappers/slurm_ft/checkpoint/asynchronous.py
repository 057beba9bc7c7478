"""One save at a time in a thread of its own. Standard library only.

The thread does what takes long and needs no agreement: torch's plan and write, digests, fsync. What
it raises is kept as a value and told when the ranks commit together. Nothing here waits for another
rank, and a save that does not end is reported, never joined without a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slurm_ft.checkpoint.commit import Written


class Writer:
    """A function that runs in a thread, and the answer that it gave."""

    def __init__(self, write: Callable[[], Written]) -> None:
        self._write = write
        self._answer: Written | None = None
        self._ended = threading.Event()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="ft-checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether `answer` would return at once."""
        return self._ended.is_set()

    def answer(self, limit_s: float | None) -> Written | None:
        """What was written; ``None`` when it has not ended within the limit."""
        return self._answer if self._ended.wait(limit_s) else None

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._answer = self._write()
        except BaseException as exc:  # the thread's end must be known, whatever ended it
            self._answer = Written(error=f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self.seconds = time.monotonic() - started
            self._ended.set()

"""Rank 0's thread that writes progress and status while the ranks train.

A thread of its own, because the files lie on a shared file system that may be slow, full, read-only
or gone: none of it may cost a step. It asks for the latest figures when it is time, so nothing
queues up. A file that cannot be written is said once, and tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slurm_ext.domain.progress import MAX_BYTES, Progress
from slurm_ft.status import replace_text

# The daemon reads as another user.
_MODE = 0o644
# Ranks' seconds to four significant digits: more is noise, and the file has a bound.
_DIGITS = 4

_log = logging.getLogger(__name__)


def progress_text(progress: Progress) -> str:
    """The file's content; without the ranks' seconds where they would make it too long."""
    text = progress.to_json()
    if len(text) >= MAX_BYTES:
        text = replace(progress, rank_compute_s=()).to_json()
    return text + "\n"


def rounded(seconds: float) -> float:
    """To the digits that a report holds."""
    return float(f"{seconds:.{_DIGITS}g}")


class Reporter:
    """Writes at most once in ``interval_s``; the first time as soon as there is something."""

    def __init__(
        self,
        path: Path | None,
        interval_s: float,
        progress: Callable[[], Progress | None],
        also: Callable[[], object],
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._progress = progress
        self._also = also
        self._warned = False
        self._ended = threading.Event()
        self._first = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slurm-ft-report", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def ready(self) -> None:
        """The first figures are there."""
        self._first.set()

    def soon(self) -> None:
        """Something has happened that others want to know before it is time again."""
        self._soon.set()

    def stop(self, limit_s: float) -> None:
        """Write once more and end, or leave it at the limit."""
        self._ended.set()
        self._first.set()
        self._soon.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _log.warning("%s: the last report takes too long and is left", self._path)

    def _run(self) -> None:
        self._first.wait()
        while True:
            last = self._ended.is_set()
            self._write()
            if last:
                return
            self._soon.wait(self._interval_s)
            self._soon.clear()

    def _write(self) -> None:
        self._also()
        if self._path is None:
            return
        progress = self._progress()
        if progress is None:
            return
        try:
            replace_text(self._path, progress_text(progress), _MODE)
        except OSError as exc:
            if not self._warned:
                _log.warning(
                    "%s: progress cannot be written (%s); the job goes on, slurm-ext queue will"
                    " not see how far it is",
                    self._path,
                    exc.strerror or exc,
                )
            self._warned = True
        else:
            self._warned = False

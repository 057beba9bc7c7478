"""What a session tells others about itself: its status for ``ft-run``, progress for the daemon.

The facts are plain attributes that the thread that trains assigns; the guard's and the reporter's
threads read them. Each is replaced as a whole, so a reader sees an old fact or a new one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_ext.domain.progress import MAX_WORDS, Hold, Progress
from slurm_ft import status
from slurm_ft.comm import Comm
from slurm_ft.session.pace import Pace
from slurm_ft.session.saving import Saving
from slurm_ft.session.settings import Settings

_log = logging.getLogger(__name__)


class Record:
    """The facts of one rank in one attempt."""

    def __init__(
        self,
        settings: Settings,
        comm: Comm,
        *,
        total_steps: int | None = None,
        total_samples: int | None = None,
    ) -> None:
        self._settings = settings
        self._comm = comm
        self._totals = (total_steps, total_samples)
        self._before = 0
        self._moved_on = False
        self.of_many = False
        self._path = own_path(settings.status, os.environ)
        self._warned = False
        self.saving: Saving | None = None
        self.pace: Pace | None = None
        self.step: int | None = None
        self.samples = 0
        self.restored: int | None = None
        self.first_step_s: float | None = None
        self.rank_compute_s: tuple[float, ...] = ()
        self.word: str | None = None
        self.note = ""
        self.hold: Hold | None = None
        self._paused_s = 0.0
        self._save_error = ("", -1)
        self.failed: str | None = None
        self.heard: str | None = None
        self.done = False

    def began_at(self, step: int) -> None:
        """The program goes on after this step. What the attempt began with is its first task's."""
        self.step = step
        if self.restored is None or not self._moved_on:
            self.restored = self._before + step

    def begin(self, step: int, total_steps: int | None, before: int = 0) -> None:
        """Another task begins in the same attempt.

        Steps are its own for the session; others are told ``before`` more, the steps of the tasks
        before it, and the sum of all as the total: for them the job is one row of steps, and a
        task that was finished is progress that was saved.
        """
        self.of_many = True
        self._moved_on = self.restored is not None
        self.step, self._before = step, before
        self._totals = (total_steps, self._totals[1])

    def held(self, hold: Hold | None) -> None:
        """A pause has begun, or is over."""
        if self.hold is not None:
            self._paused_s += max(0.0, time.time() - self.hold.since_s)
        self.hold = hold

    @property
    def _all_paused_s(self) -> float:
        """Of all pauses of this attempt, with the one under way."""
        hold = self.hold
        return self._paused_s + (0.0 if hold is None else max(0.0, time.time() - hold.since_s))

    @property
    def _saved_step(self) -> int | None:
        saved = self.saving.saved_step if self.saving is not None else None
        if saved is None:
            return self._before if self._moved_on else None
        return self._before + saved

    @property
    def _told_step(self) -> int | None:
        return None if self.step is None else self._before + self.step

    @property
    def save_error(self) -> str:
        """Why the last save failed, empty where it did not."""
        words, count = self._save_error
        return words if self.saving is None or self.saving.made == count else ""

    @save_error.setter
    def save_error(self, words: str) -> None:
        self._save_error = (words, 0 if self.saving is None else self.saving.made)

    def status(self) -> status.Status:
        """For ``ft-run``."""
        saving = self.saving
        return status.Status(
            attempt=self._settings.attempt,
            rank=self._comm.rank,
            pid=os.getpid(),
            at_s=time.time(),
            step=self._told_step,
            saved_step=self._saved_step,
            restored_step=self.restored,
            first_step_s=self.first_step_s,
            save_s=saving.save_s if saving is not None else None,
            stall_s=saving.stall_s if saving is not None else 0.0,
            paused_s=self._all_paused_s,
            leaving=self.word,
            failed=self.failed,
            heard=self.heard,
            done=self.done,
            note=self.note,
            save_error=self.save_error,
        )

    def progress(self) -> Progress | None:
        """For the daemon; ``None`` before the first step."""
        step, saving, pace = self._told_step, self.saving, self.pace
        if step is None or self.first_step_s is None or saving is None or pace is None:
            return None
        total_steps, total_samples = self._totals
        gpus = self._settings.gpus
        return Progress(
            job_id=self._settings.job_id,
            attempt=self._settings.attempt,
            at_s=time.time(),
            step=step,
            samples=self.samples,
            samples_per_s=pace.samples_per_s,
            gpus=self._comm.size if gpus is None else gpus,
            last_checkpoint_step=self._saved_step,
            last_checkpoint_s=saving.saved_at_s,
            rank_compute_s=self.rank_compute_s,
            total_steps=total_steps,
            total_samples=total_samples,
            first_step_s=self.first_step_s,
            restored_step=self.restored,
            save_s=saving.save_s,
            stall_s=saving.stall_s,
            save_error=self.save_error[:MAX_WORDS],
            hold=self.hold,
            paused_s=self._paused_s,
        )

    def write_status(self) -> None:
        """Replace the status file, where there is one to keep. From any thread."""
        if self._path is None:
            return
        try:
            status.write(self._path, self.status())
        except OSError as exc:
            if not self._warned:
                self._warned = True
                _log.warning("%s: cannot be written (%s); ft-run sees less", self._path, exc)


def own_path(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Below one ft-run, torchrun starts several ranks: each but the first has a file of its own."""
    local = environ.get("LOCAL_RANK", "0")
    if path is None or local == "0" or "TORCHELASTIC_RUN_ID" not in environ:
        return path
    return path.with_name(f"{path.name}.{local}")

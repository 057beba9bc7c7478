"""The whole device state of a process, by the driver's own ``cuda-checkpoint``, where it is there.

A rung for programs whose device memory the session cannot reach. It is off unless asked for
(``FT_PAUSE_CUDA=1``): with several GPUs per process, and with communicators that use NVLS, a dump
has worked and its restore failed. Steps: lock (no CUDA call goes on), checkpoint (memory moves to
the host), later restore and unlock. A locked process makes every further step of a peer wait, so
the lock has a time-out of its own, and any failure unlocks at once.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping

from slurm_ft import variables
from slurm_ft.pause.ladder import LostStateError, PartError
from slurm_ft.pause.nccl import NVLS, Verdict, Wish, judge

COMMAND = "cuda-checkpoint"
_PROBE_S = 5.0
# Part of the time that the lock may take: afterwards the memory has to be moved.
_LOCK_SHARE = 0.5
_UNLOCK_S = 30.0
_LONGEST_S = 3600.0


class CudaCheckpoint:
    """`slurm_ft.pause.ladder.Part` for one process, this one unless told otherwise."""

    name = "CUDA state"

    def __init__(self, environment: Mapping[str, str], pid: int | None = None) -> None:
        self._environment = environment
        self._pid = os.getpid() if pid is None else pid
        self._checkpointed = False

    def missing(self) -> str:
        """Why this cannot be done here; empty where it can."""
        if self._environment.get(variables.PAUSE_CUDA, "") != "1":
            return f"not asked for ({variables.PAUSE_CUDA}=1)"
        wish = Wish(collective_timeout_s=0.0, checkpointed=True)
        for finding in judge(self._environment, wish):
            if finding.name == NVLS and finding.verdict is Verdict.REFUSE:
                return f"{finding.name}: {finding.text}"
        try:
            done = subprocess.run(
                [COMMAND, "--help"], capture_output=True, text=True, timeout=_PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            return f"{COMMAND} cannot be run: {exc}"
        if "--action" not in done.stdout + done.stderr:
            return f"{COMMAND} is of a release that knows no --action"
        return ""

    def release(self, deadline_s: float) -> int:
        """Lock and move; a failure leaves the process running as before."""
        left_s = self._left(deadline_s)
        lock_s = left_s * _LOCK_SHARE
        try:
            # The command's own limit first: ours kills only the command, not what it has begun.
            self._act("lock", lock_s + 1.0, f"--timeout={int(lock_s * 1000)}")
            self._act("checkpoint", self._left(deadline_s))
        except PartError as exc:
            self._recover(exc)
            raise
        self._checkpointed = True
        return 0

    def restore(self, deadline_s: float) -> None:
        """Move back and unlock; a failure means that the device state is lost."""
        if not self._checkpointed:
            return
        self._act("restore", self._left(deadline_s))
        self._act("unlock", _UNLOCK_S)
        self._checkpointed = False

    def _recover(self, cause: PartError) -> None:
        """Back to running, whatever state the failure has left."""
        try:
            if self._state() == "checkpointed":
                self._act("restore", _UNLOCK_S)
            if self._state() == "locked":
                self._act("unlock", _UNLOCK_S)
            state = self._state()
        except PartError as exc:
            raise LostStateError(f"{cause}; and it cannot be undone: {exc}") from exc
        if state != "running":
            raise LostStateError(f"{cause}; the process stays {state}") from cause

    def _state(self) -> str:
        return self._run(["--get-state", f"--pid={self._pid}"], _PROBE_S).strip().lower()

    def _act(self, action: str, limit_s: float, *more: str) -> None:
        self._run([f"--action={action}", f"--pid={self._pid}", *more], limit_s)

    def _run(self, argv: list[str], limit_s: float) -> str:
        try:
            done = subprocess.run(
                [COMMAND, *argv], capture_output=True, text=True, timeout=limit_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise PartError(f"{COMMAND} {argv[0]}: {exc}") from exc
        if done.returncode:
            words = done.stderr.strip()[:200] or f"exit code {done.returncode}"
            raise PartError(f"{COMMAND} {argv[0]}: {words}")
        return done.stdout

    @staticmethod
    def _left(deadline_s: float) -> float:
        return min(_LONGEST_S, max(0.1, deadline_s - time.monotonic()))

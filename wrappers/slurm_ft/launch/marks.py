"""Marks that the ft-runs of one step leave for each other in the job's state directory.

Small files instead of messages: the ranks' ft-runs share nothing else, and what they tell each
other matters only at the end. Names carry job, attempt and step, so that nothing old is believed,
and nothing of another job where a user keeps all of them in one directory. Where there is no state
directory nothing is told, and nobody waits.
"""

from __future__ import annotations

import os

_END = "end"
_DECISION = "decision"
_HOOK = "hook"
_STATUS = "status"
_DONE = "done"
_KINDS = (_END, _DECISION, _HOOK, _STATUS, _DONE)


class Marks:
    """The marks of one attempt of one step of a job."""

    __slots__ = ("_attempt", "_directory", "_job", "_step", "_tag")

    def __init__(self, directory: str, job: str, attempt: int, step: int) -> None:
        self._directory = directory
        self._job = job
        self._attempt = attempt
        self._step = step
        self._tag = f"{job}-{attempt}-{step}"

    @property
    def hook(self) -> str:
        """File that rank 0 writes when its command of --on-preempt has ended."""
        return self._path(_HOOK)

    def status(self, rank: int) -> str:
        """File that the session of a rank keeps."""
        return self._path(_STATUS, f"-{rank}.json")

    def end(self, rank: int, code: int) -> None:
        """Say that the program of a rank has ended by itself."""
        self._write(self._path(_END, f"-{rank}"), str(code))

    def ends(self) -> dict[int, int]:
        """What other ranks said so far."""
        found: dict[int, int] = {}
        prefix = f"{_END}-{self._tag}-"
        for name in self._names():
            rank = name.removeprefix(prefix)
            if name.startswith(prefix) and rank.isdigit():
                code = self._read(os.path.join(self._directory, name))
                if code.isdigit():
                    found[int(rank)] = int(code)
        return found

    def decide(self, requeued: bool) -> None:
        """Say that rank 0 has decided."""
        self._write(self._path(_DECISION), "1" if requeued else "0")

    def decided(self) -> bool:
        """Whether rank 0 has decided."""
        return bool(self._directory) and os.path.exists(self._path(_DECISION))

    def done(self) -> None:
        """Say that the program has ended well, and that Slurm may bring the job back all the same.

        Slurm requeues a job that ends by itself within the grace of a preemption, whatever its exit
        code, and the next attempt of one that it killed at the end of the grace (seen on 24.11).
        """
        self._write(self._path(_DONE), "")

    def done_before(self) -> bool:
        """Whether the attempt before said so of this step: then there is nothing left to do."""
        name = f"{_DONE}-{self._job}-{self._attempt - 1}-{self._step}"
        return bool(self._directory) and os.path.exists(os.path.join(self._directory, name))

    def forget_old(self) -> None:
        """Remove what earlier attempts left, but for the last one: somebody may look at it."""
        for name in self._names():
            kind, _, rest = name.partition("-")
            job, _, rest = rest.partition("-")
            attempt = rest.partition("-")[0]
            if (
                kind in _KINDS
                and job == self._job
                and attempt.isdigit()
                and int(attempt) < self._attempt - 1
            ):
                _remove(os.path.join(self._directory, name))

    def _path(self, kind: str, rest: str = "") -> str:
        return os.path.join(self._directory, f"{kind}-{self._tag}{rest}") if self._directory else ""

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._directory) if self._directory else []
        except OSError:
            return []

    def _write(self, path: str, text: str) -> None:
        if not path:
            return
        try:
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
        except OSError:
            # Without this mark somebody waits to a limit, which is no reason to fail.
            return

    def _read(self, path: str) -> str:
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                return file.read(16).strip()
        except OSError:
            return ""


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

"""Marks that the ft-runs of one step leave for each other in the job's state directory.

Small files instead of messages: the ranks' ft-runs share nothing else, and what they tell each
other matters only at the end. Names carry job, attempt and step, so that nothing old is believed,
and nothing of another job where a user keeps all of them in one directory. Where there is no state
directory nothing is told, and nobody waits.
"""

from __future__ import annotations

import os

_END = "end"
_LEAD = "lead"
_STOP = "stop"
_DECISION = "decision"
_HOOK = "hook"
_STATUS = "status"
_DONE = "done"
# Kept by `slurm_ft.requeue.steps`.
_STEP = "step"
_KINDS = (_END, _DECISION, _HOOK, _STATUS, _DONE, _LEAD, _STOP, _STEP)
# Rank 0 leads in term 0; whoever takes over, in the next. More deaths than that are no accident.
MOST_TERMS = 3
_MOST_WORDS = 400


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
    def step(self) -> int:
        """Slurm's number of the step."""
        return self._step

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

    def beat(self, term: int) -> None:
        """Say that whoever leads is alive.

        Only the time of the file changes, which takes no room on a disk that is full.
        """
        if not self._directory:
            return
        path = self._path(_LEAD, f"-{term}")
        try:
            os.utime(path)
        except FileNotFoundError:
            self._write(path, "")
        except OSError:
            return

    def last_beat(self) -> tuple[int, int | None]:
        """The newest term, and a number that changes with each beat of whoever leads in it.

        ``None`` where nobody has ever said to lead. Opened and not only looked at: on NFS that asks
        the server.
        """
        for term in reversed(range(MOST_TERMS)):
            try:
                opened = os.open(self._path(_LEAD, f"-{term}"), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                return term, os.fstat(opened).st_mtime_ns
            except OSError:
                continue
            finally:
                os.close(opened)
        return 0, None

    def claim(self, term: int) -> bool:
        """Begin to lead in a term; false where another rank was faster, or nothing can be written.

        A file system makes a file for one of several who ask at once.
        """
        return bool(self._directory) and self._create(self._path(_LEAD, f"-{term}"), "")

    def stop(self, rank: int, code: int, why: str) -> bool:
        """Say that a rank could not start, so that no other waits for it.

        False where another rank was faster, or nobody can be told.
        """
        text = f"{rank} {code} {' '.join(why.split())[:_MOST_WORDS]}"
        return bool(self._directory) and self._create(self._path(_STOP), text)

    def stopped(self) -> tuple[int, int, str] | None:
        """Rank, exit code and words of the one that could not start; ``None`` where all could."""
        if not self._directory:
            return None
        text = self._read(self._path(_STOP), 2 * _MOST_WORDS)
        rank, _, rest = text.partition(" ")
        code, _, why = rest.partition(" ")
        if rank.isdigit() and code.isdigit() and why:
            return int(rank), int(code), why
        return None

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

    def _create(self, path: str, text: str) -> bool:
        """Make a file that is not there yet; false where it is, or cannot be."""
        try:
            with open(path, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            return False
        return True

    def _read(self, path: str, most: int = 16) -> str:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(most).strip()
        except OSError:
            return ""


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

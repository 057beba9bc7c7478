"""What a daemon holds as long as it lives: its journal and its spool, each for itself alone.

Two daemons with journals of their own would still overwrite each other's plan documents, and the
second would take over the first one's jobs from them. So the spool has a lock of its own. It lies
on a shared file system: a spool that is not there yet is locked when it is made, in the thread that
may hang, and where the file system cannot lock, only the journal protects (that is logged).
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from slurm_ext.control.config import Config
from slurm_ext.control.locks import FileLock, life_lock, spool_lock
from slurm_ext.control.spool import Spool, SpoolThread
from slurm_ext.domain.errors import DataError, SlurmExtError, SourceMissingError

_log = logging.getLogger(__name__)


class TakenError(SlurmExtError):
    """Another daemon holds what this one needs."""


class Tenure:
    """The locks of one daemon."""

    def __init__(self) -> None:
        self._held: dict[Path, FileLock] = {}
        self._told: set[Path] = set()

    def claim(self, config: Config) -> None:
        """Hold what ``config`` names, beside what is held already.

        Raises TakenError where another daemon has it, DataError where the journal cannot be
        locked; then nothing more is held than before. A spool that cannot be reached is left for
        `prepare`.
        """
        before = set(self._held)
        try:
            self._claim_journal(config)
            thread = SpoolThread(Spool(config.spool), config.command_timeout_s)
            # Why a spool cannot be used is told by those who use it, and they try again.
            with contextlib.suppress(DataError, SourceMissingError):
                thread.call(self.prepare)
        except TakenError:
            self._give_back(set(self._held) - before)
            raise

    def _claim_journal(self, config: Config) -> None:
        lock = FileLock(life_lock(config.journal))
        if not self._take(lock):
            raise TakenError(f"{lock.path}: another daemon runs with this journal; stop it first")

    def prepare(self, spool: Spool) -> None:
        """Make the spool's directories, and hold it. Raises TakenError as `claim` does."""
        spool.prepare()
        lock = FileLock(spool_lock(spool.root), 0o600)
        try:
            free = self._take(lock)
        except DataError as exc:
            if lock.path not in self._told:
                self._told.add(lock.path)
                _log.warning("no other daemon is kept from this spool: %s", exc)
            return
        if not free:
            raise TakenError(
                f"{lock.path}: another daemon plans in this spool; stop it first, or name a"
                " spool of its own (--set spool=DIR)"
            )

    def keep_only(self, config: Config) -> None:
        """Give back what an earlier configuration named."""
        self._give_back(set(self._held) - {life_lock(config.journal), spool_lock(config.spool)})

    def release(self) -> None:
        """Give everything back."""
        self._give_back(set(self._held))

    def _give_back(self, paths: set[Path]) -> None:
        for path in paths:
            self._held.pop(path).release()

    def _take(self, lock: FileLock) -> bool:
        if lock.path in self._held:
            return True
        if not lock.acquire():
            return False
        self._held[lock.path] = lock
        return True

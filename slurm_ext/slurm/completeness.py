"""Is an answer whole? What can be known about a queue that ended early with exit code 0.

A cut in the middle of a row shows by itself; a cut between two rows does not. These tell:
a job that sprio ranks must have a row; a job that waited or ran a moment ago still has one, because
slurmctld keeps finished jobs for MinJobAge and all states are asked for; and a job that has been
eligible for a while must be ranked. Pure: no I/O, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

from slurm_ext.domain.errors import SourceMissingError

# How long the memory of an earlier answer binds. Below Slurm's default MinJobAge of 300 s, and
# short enough that a controller restarted with an empty state is believed after a minute.
MEMORY_S = 60.0
# A job that became eligible later than this may not have been ranked yet.
RANKED_AFTER_S = 15.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Completeness:
    """Remembers the jobs of the last whole answer."""

    min_job_age_s: float = 300.0
    _active: frozenset[int] = field(default=frozenset(), repr=False)
    _at_s: float = float("-inf")
    _unranked_since_s: float | None = None

    def check_rows(self, seen: Set[int], ranked: Collection[int], now_s: float) -> None:
        """Raise SourceMissingError where rows of squeue must be missing.

        ``seen`` holds the raw ids of all rows, finished jobs too; ``ranked`` those of sprio, which
        may have been asked a little later: ids above all that were seen are new submissions.
        """
        newest = max(seen, default=0)
        absent = [job for job in ranked if job not in seen and (job <= newest or not seen)]
        if absent:
            raise SourceMissingError(
                "squeue",
                f"{len(absent)} jobs that sprio ranks have no row, e.g. {min(absent)}: cut off?",
            )
        if now_s - self._at_s < min(MEMORY_S, self.min_job_age_s):
            vanished = self._active - seen
            if vanished:
                raise SourceMissingError(
                    "squeue",
                    f"{len(vanished)} jobs that waited or ran {now_s - self._at_s:.0f} s ago have "
                    f"no row, e.g. {min(vanished)}: cut off?",
                )

    def check_ranks(
        self, eligible: Iterable[tuple[int, float]], ranked: Collection[int], now_s: float
    ) -> None:
        """Raise SourceMissingError where rows of sprio must be missing.

        ``eligible`` gives raw id and eligible time of jobs that wait for nothing but their turn.
        sprio prints them by id, so only jobs beyond its last row can have been cut off. Where this
        lasts for a minute, Slurm has a reason that is not known here, and the answer is taken.
        """
        last = max(ranked, default=0)
        absent = [
            job for job, since_s in eligible if job > last and since_s <= now_s - RANKED_AFTER_S
        ]
        if not absent:
            self._unranked_since_s = None
            return
        words = f"{len(absent)} eligible jobs beyond its last row, e.g. {min(absent)}"
        if self._unranked_since_s is None:
            self._unranked_since_s = now_s
        if now_s - self._unranked_since_s < MEMORY_S:
            raise SourceMissingError("sprio", f"{words}: cut off?")
        _log.warning("sprio does not rank %s; taken as it is", words)

    def remember(self, active: Collection[int], now_s: float) -> None:
        """Keep the raw ids of the jobs that wait or hold resources now."""
        self._active = frozenset(active)
        self._at_s = now_s

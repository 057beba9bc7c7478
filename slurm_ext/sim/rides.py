"""The books of merged runs in a replay: what is offered, who rides on whom, and who gets off.

Which jobs can be merged and what that costs is `merging`'s business; starting and ending runs is
the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurm_ext.domain.policy import JobFacts
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.merging import offer as offer_both
from slurm_ext.sim.model import Run, SimJob, SimulationError


class Rides:
    """See the module."""

    def __init__(self, merging: Merging) -> None:
        self._merging = merging
        self._offered: dict[tuple[str, str], SimJob] = {}
        self._riders: dict[str, tuple[SimJob, float]] = {}
        # Jobs that a merged run has failed train by themselves.
        self._alone: set[str] = set()
        self._known: dict[tuple[str, str], SimJob | None] = {}

    def offer(self, facts: Mapping[str, JobFacts], fresh: Iterable[SimJob]) -> dict[str, JobFacts]:
        """The facts, with a pair's candidates at both of its jobs; ``fresh`` are the waiting jobs
        that have not started yet."""
        shown = dict(facts)
        self._offered = {}
        free = (
            job for job in fresh if job.job_id not in self._riders and job.job_id not in self._alone
        )
        for carrier, rider in self._merging.pairs(free):
            ids = carrier.job_id, rider.job_id
            if ids not in self._known:
                self._known[ids] = self._merging.merged(carrier, rider)
            pair = self._known[ids]
            if pair is not None:
                self._offered[ids] = pair
                for key in ids:
                    shown[key] = offer_both(shown[key], pair, ids)
        return shown

    def pair(self, carrier: str, rider: str) -> SimJob:
        """The two as one job. Raises SimulationError where that was not offered."""
        found = self._offered.get((carrier, rider))
        if found is None:
            raise SimulationError(f"plan merges {rider} into {carrier}, which was not offered")
        return found

    def begin(self, carrier: str, rider: SimJob, now: float) -> None:
        """A merged run starts; from here on the two are one job until its end."""
        self._riders[carrier] = rider, now

    def end(self, carrier: str, now: float) -> tuple[SimJob, Run] | None:
        """A run is over; the job that rode on it, if any, and the record of its ride."""
        found = self._riders.pop(carrier, None)
        if found is None:
            return None
        rider, start_s = found
        done = self._merging.reaches_target(carrier, rider.job_id)
        if not done:
            self._alone.add(rider.job_id)
        return rider, Run(
            job_id=rider.job_id,
            submit_s=rider.submit_s,
            start_s=start_s,
            end_s=now,
            gpus=0,
            seats={},
            error_free_s=rider.error_free_s,
            share=1.0 if done else 0.0,
            cause="done" if done else "unmerged",
        )

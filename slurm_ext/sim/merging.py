"""Merging in a replay: two waiting jobs of one model trained as one run, and what that costs.

The carrier trains on both data sets, with one head for each task, on one allocation; the rider
holds no GPUs of its own. Modelled, with both tasks' work taken on the count of the merged run:

    work(a + b) = work(a) + work(b) - saved * min(work(a), work(b))

and one start-up instead of two. ``saved`` is the share of the smaller task's work that training
both together makes unnecessary: 1 is what the published program charges (one of the two tasks
only), 0 would leave the second start-up as the only gain. Both end when the merged run ends. In a
share ``failed`` of the pairs the rider has not reached its target then, and waits again with all of
its work before it; which pairs is drawn from their ids, and no policy knows it beforehand.

Offered are disjoint pairs: of the waiting jobs of one model and GPU type that have not started yet,
in the order of their estimated work, the first with the second, the third with the fourth, and so
on, on the counts that both may have. Once it has started, a pair is one job until its end, also if
it is stopped, resized or hit by an outage.

Not modelled: sets of more than two, how similar the data sets are (any two jobs of a model are
taken for mergeable), memory of the second head, and a merged run that goes on for one task alone.
The choice a reader would question: neighbours in size are paired, and no better matching is looked
for. Unequal pairs make the shorter job wait for the longer one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.estimate import Estimate
from slurm_ext.domain.policy import JobFacts
from slurm_ext.sim.model import SimJob

_Key = TypeVar("_Key", int, tuple[int, ...])


@dataclass(frozen=True, slots=True)
class Merging:
    """See the module."""

    saved: float = 0.5
    failed: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("saved", "failed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise DataError(f"merging {name}", f"{value!r} is not from 0 to 1", "give a share")

    def reaches_target(self, carrier: str, rider: str) -> bool:
        """Whether the rider is done when the merged run is."""
        return random.Random(f"{self.seed}:{carrier}+{rider}").random() >= self.failed

    def pairs(self, waiting: Iterable[SimJob]) -> list[tuple[SimJob, SimJob]]:
        """Disjoint pairs that could be merged, the carrier first."""
        families: dict[tuple[str, str], list[SimJob]] = {}
        for job in waiting:
            if job.model and job.candidates:
                families.setdefault((job.model, job.gpu_type), []).append(job)
        found = []
        for family in families.values():
            family.sort(key=lambda job: (_work_s(job), job.submit_s, job.job_id))
            for first, second in zip(family[::2], family[1::2], strict=False):
                # The older one carries: its place in the queue is the earlier one.
                older, younger = sorted((first, second), key=lambda j: (j.submit_s, j.job_id))
                found.append((older, younger))
        return found

    def merged(self, carrier: SimJob, rider: SimJob) -> SimJob | None:
        """The pair as one job under the carrier's name; None where no count suits both."""
        start_s = carrier.start_up_s
        others = {_shape(c.configuration): c for c in rider.candidates}
        candidates = []
        for own in carrier.candidates:
            other = others.get(_shape(own.configuration))
            if other is not None:
                both = self._estimate(own, other, start_s, rider.start_up_s)
                candidates.append(replace(own, remaining_s=both))
        if not candidates:
            return None

        def times(a: Mapping[_Key, float], b: Mapping[_Key, float]) -> dict[_Key, float]:
            return {
                key: start_s + self._work(a[key] - start_s, b[key] - rider.start_up_s)
                for key in a.keys() & b.keys()
            }

        return replace(
            carrier,
            candidates=tuple(candidates),
            true_run_s=times(carrier.true_run_s, rider.true_run_s),
            true_by_placement=times(carrier.true_by_placement, rider.true_by_placement),
            limit_s=carrier.limit_s + rider.limit_s,
        )

    def _estimate(self, a: Candidate, b: Candidate, start_a: float, start_b: float) -> Estimate:
        def both(x: float, y: float) -> float:
            return start_a + self._work(x - start_a, y - start_b)

        one, two = a.remaining_s, b.remaining_s
        return replace(
            one,
            value=both(one.value, two.value),
            low=both(one.low, two.low),
            high=both(one.high, two.high),
        )

    def _work(self, a: float, b: float) -> float:
        a, b = max(0.0, a), max(0.0, b)
        return a + b - self.saved * min(a, b)


def offer(facts: JobFacts, pair: SimJob, ids: tuple[str, str]) -> JobFacts:
    """The facts of one job of a pair, with the pair's candidates behind its own."""
    extra = tuple(replace(candidate, job_ids=ids) for candidate in pair.candidates)
    return replace(facts, candidates=(*facts.candidates, *extra))


def _work_s(job: SimJob) -> float:
    """A job's estimated work, on its smallest count."""
    least = min(job.candidates, key=lambda c: (c.gpus, c.remaining_s.value))
    return least.gpus * max(0.0, least.remaining_s.value - job.start_up_s)


def _shape(configuration: Configuration) -> tuple[int, ...]:
    return configuration.placement

"""Collects what running jobs report about their speed, and keeps the table's corrections current.

The arithmetic is `slurm_ext.estimate.calibration`'s; here is what has to be remembered: one sample
per job, smoothed, in memory and (by the caller) in the journal. A sample that hardly moved is not
written again, else every report of every job would be a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from slurm_ext.control.observe import Observation
from slurm_ext.estimate.calibration import NO_CALIBRATION, Calibration, Sample, fit, kept
from slurm_ext.estimate.index import ThroughputIndex
from slurm_ext.estimate.reported import sample_of

# Share of a new report in a job's own mean: one window of a job is noisy.
NEWEST = 0.3
# Logarithm of a change that is worth a new fit and a row in the journal.
_MOVED = 0.01


class Calibrator:
    """Samples by job, and the corrections that follow from them."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._stored = {sample.job_id: sample for sample in samples}
        self._now = dict(self._stored)
        self._fitted = dict[str, Sample]()
        self._index: ThroughputIndex | None = None
        self.current: Calibration = NO_CALIBRATION

    def notice(self, seen: Observation) -> None:
        """Take in what running jobs report, and fit again where that or the table has changed."""
        self._take_in(seen)
        self._now = {sample.job_id: sample for sample in kept(self._now.values(), seen.now)}
        index = seen.sources.index
        if index is self._index and not any(_differences(self._fitted, self._now)):
            return
        self._fitted, self._index = dict(self._now), index
        self.current = fit(tuple(self._now.values()), index)

    def unsaved(self) -> tuple[list[Sample], list[str]]:
        """Samples to write down, and jobs whose sample counts no more, since the last call."""
        changed, gone = _differences(self._stored, self._now)
        self._stored |= {sample.job_id: sample for sample in changed}
        for job_id in gone:
            del self._stored[job_id]
        return changed, gone

    def forget_stored(self) -> None:
        """The journal was begun anew: everything is to be written once more."""
        self._stored.clear()

    def _take_in(self, seen: Observation) -> None:
        nodes = {node.name: node for node in seen.snapshot.nodes}
        for job in seen.snapshot.running():
            directive = seen.directives.get(job.job_id)
            if directive is None or job.job_id not in seen.sources.progress:
                continue
            where = [nodes[name] for name in job.node_names if name in nodes]
            if not where:
                continue
            per_node = max(1, max(node.gpus for node in where))
            sample = sample_of(job, directive, per_node, where[0].gpu_type, seen.sources)
            if sample is None:
                continue
            old = self._now.get(sample.job_id)
            if old is not None and sample.at_s <= old.at_s:
                continue  # the same report as in the last cycle, or another task of the array
            if old is not None and _same_question(old, sample):
                speed = old.samples_per_s ** (1 - NEWEST) * sample.samples_per_s**NEWEST
                sample = replace(sample, samples_per_s=speed)
            self._now[sample.job_id] = sample


def _differences(
    before: Mapping[str, Sample], after: Mapping[str, Sample]
) -> tuple[list[Sample], list[str]]:
    """Samples that are new or have moved, and jobs that have none any more."""
    changed = [s for i, s in after.items() if (old := before.get(i)) is None or _apart(old, s)]
    return changed, [job_id for job_id in before if job_id not in after]


def _same_question(old: Sample, new: Sample) -> bool:
    return (old.request, old.placement) == (new.request, new.placement)


def _apart(old: Sample, new: Sample) -> bool:
    if not _same_question(old, new):
        return True
    return abs(math.log(new.samples_per_s / old.samples_per_s)) > _MOVED

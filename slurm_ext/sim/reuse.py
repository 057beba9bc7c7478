"""How often a site's jobs share a base model, and how often they could have shared its loading.

Two opportunities are told apart, because two mechanisms live on them. Jobs that *wait together*
with another of the same model could be trained as one. A job in whose waiting another of the same
model and GPU count *ended* could have gone on in its warm processes. Where the model of a job is
not known, nothing is assumed about it; its name is counted apart, as a hint at repeated work.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_ext.sim.readers.sacctjob import SacctJob

_NUMBERS = re.compile(r"\d+")
TOP = 5


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares are of the jobs whose model is known; ``known_share`` of all.

    ``repeated_share``: jobs whose model an earlier job had; ``together_share``: jobs that waited
    together with another of their model; ``successor_share``: jobs in whose waiting another of
    their model and GPU count ended. ``repeated_names_share`` is of all jobs: same user, and same
    name but for numbers, as an earlier job.
    """

    known_share: float
    models: int
    repeated_share: float
    together_share: float
    successor_share: float
    repeated_names_share: float
    top: tuple[tuple[str, int], ...] = ()


def reuse(jobs: Sequence[SacctJob]) -> Reuse:
    """Model reuse among jobs that ran."""
    known = [job for job in jobs if job.model]
    counts = Counter(job.model for job in known)
    names = {(job.user, _NUMBERS.sub("#", job.name)) for job in jobs}
    return Reuse(
        known_share=_share(len(known), len(jobs)),
        models=len(counts),
        repeated_share=_share(len(known) - len(counts), len(known)),
        together_share=_share(len(_together(known)), len(known)),
        successor_share=_share(_successors(known), len(known)),
        repeated_names_share=_share(len(jobs) - len(names), len(jobs)),
        # Ties by name, so that one log always gives one report.
        top=tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:TOP]),
    )


def _together(jobs: Sequence[SacctJob]) -> set[str]:
    """Ids of jobs whose first wait overlaps with that of another of the same model."""
    groups: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for job in jobs:
        since, until = job.waits[0]
        if until > since:
            groups[job.model].append((since, until, job.job_id))
    found: set[str] = set()
    for waits in groups.values():
        waits.sort()
        latest, latest_id = float("-inf"), ""
        for since, until, job_id in waits:
            if since < latest:
                # Of those before, the one that waits longest overlaps if any does. The others
                # were marked by their own next neighbour.
                found |= {job_id, latest_id}
            if until > latest:
                latest, latest_id = until, job_id
        for (_, until, job_id), (since, _, _) in pairwise(waits):
            if since < until:
                found.add(job_id)
    return found


def _successors(jobs: Sequence[SacctJob]) -> int:
    """Jobs in whose first wait another of the same model and GPU count ended."""
    ends: dict[tuple[str, int], list[float]] = defaultdict(list)
    for job in jobs:
        ends[job.model, job.gpus] += [s.end_s for s in job.spans if s.end_s is not None]
    for times in ends.values():
        times.sort()
    count = 0
    for job in jobs:
        since, until = job.waits[0]
        times = ends[job.model, job.gpus]
        # Its own end comes after its start, so it never counts, unless it ran for 0 s.
        if until > since and bisect_right(times, until) > bisect_left(times, since):
            count += 1
    return count


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

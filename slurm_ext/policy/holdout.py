"""Which starts are worth declining: those that end much later than waiting for more GPUs would.

A job that is not restarted keeps the GPUs that it starts with. What is free at this moment may be
one GPU for a job of days, while running jobs are about to give back eight. So for each count it is
reckoned when a placement of it will be open, from the expected ends of the running jobs, and a
count is left out on which the job would take more than ``factor`` times as long as the best of
waiting and running together:

    left out where   R(count) > factor * min over counts of (wait(count) + R(count))

A wait is a promise of nobody: others compete for the GPUs that come free. Hence a factor well above
one (with 2, waiting still pays when it takes longer than foreseen by all of the predicted time;
docs/policy.md has the measurements), and a bound: a count is not declined by a job that has waited
for longer than the run on it takes, so that whatever becomes of the promise, declining costs a job
no more than that run.

Nothing is left out of a job with one candidate, and no count on which a job keeps its deadline.
The choice a reader would question: a running job that has outlived its expected end is taken to go
on for as long as it already did. To expect its end now, at every decision anew, would let others
wait for it for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

from slurm_ext.domain.configuration import Candidate
from slurm_ext.domain.node import Node
from slurm_ext.domain.policy import JobFacts, View
from slurm_ext.domain.spans import about, counted
from slurm_ext.policy.queue import Field, held_on

# Of how many nodes have at least 1, 2, ... free GPUs: what decides whether a placement has room.
_Counts = tuple[int, ...]


class Waits(dict[tuple[int, ...], float]):
    """Placement -> seconds until a pool has room for it; infinity where it never will have.

    Filled as it is asked, which is once per candidate of every waiting job.
    """

    def __init__(self, times: Sequence[float], counts: Sequence[_Counts]) -> None:
        super().__init__()
        self._times = times
        self._counts = counts

    def __missing__(self, placement: tuple[int, ...]) -> float:
        needs = [(share, sum(s >= share for s in placement)) for share in set(placement)]
        # Counts only grow along the line, so that the first one with room can be searched for.
        place = bisect_left(self._counts, True, key=lambda have: _room(have, needs))
        at = self._times[place] if place < len(self._times) else math.inf
        found = self[placement] = at - self._times[0]
        return found


class Openings:
    """When the placements of a field will be open if nothing else starts meanwhile.

    GPUs only: CPUs and memory of a node are taken to come free with them. A running job without a
    known end never gives anything back.
    """

    def __init__(self, view: View, part: Field, now: float) -> None:
        self._view = view
        self._part = part
        self._now = now
        self._pools: dict[str, Waits] = {}

    def of(self, pool: str) -> Waits:
        """The waits of one pool."""
        found = self._pools.get(pool)
        if found is None:
            found = self._pools[pool] = Waits(*self._line(pool))
        return found

    def _line(self, pool: str) -> tuple[list[float], list[_Counts]]:
        names = set(self._view.pools[pool])
        nodes = {n.name: n for n in self._part.nodes if n.name in names and n.available}
        free = {name: node.gpus_free for name, node in nodes.items()}
        most = max((node.gpus for node in nodes.values()), default=0)
        counts = [sum(have > share for have in free.values()) for share in range(most)]
        times, line = [self._now], [tuple(counts)]
        for end, gpus in self._releases(nodes):
            for name, more in gpus.items():
                after = min(nodes[name].gpus, free[name] + more)
                for share in range(free[name], after):
                    counts[share] += 1
                free[name] = after
            times.append(end)
            line.append(tuple(counts))
        return times, line

    def _releases(self, nodes: Mapping[str, Node]) -> list[tuple[float, dict[str, int]]]:
        """Expected end and GPUs by node of what runs on these nodes, the first end in front."""
        found = []
        for job in self._view.snapshot.running():
            end = self._view.free_at_s.get(job.job_id, job.end_s)
            if end is None or not job.gpus or nodes.keys().isdisjoint(job.node_names):
                continue
            late = max(0.0, self._now - end)
            found.append((max(end, self._now + late), job.job_id, held_on(job, nodes)))
        found.sort(key=lambda item: item[:2])
        return [(end, gpus) for end, _, gpus in found]


def _room(have: _Counts, needs: Sequence[tuple[int, int]]) -> bool:
    return all(share <= len(have) and have[share - 1] >= nodes for share, nodes in needs)


@dataclass(frozen=True, slots=True)
class Declined:
    """The best start that a job does not take now, and what it waits for instead."""

    now: Candidate
    later: Candidate
    wait_s: float

    @property
    def words(self) -> str:
        """Why, for whoever asks."""
        held, then = counted(self.now.gpus, "GPU"), counted(self.later.gpus, "GPU")
        return (
            f"{then}, expected in {about(self.wait_s)}: so it is done in "
            f"{about(self.wait_s + self.later.remaining_s.value)}, and on the {held} that "
            f"{'is' if self.now.gpus == 1 else 'are'} free only in "
            f"{about(self.now.remaining_s.value)}"
        )


def worth_taking(
    candidates: list[Candidate], fact: JobFacts, openings: Openings, factor: float, now: float
) -> tuple[list[Candidate], Declined | None]:
    """The candidates of a job without those that it had better not take; see the module.

    Those that serve a second job come last, and are weighed among themselves.
    """
    waits = openings.of(fact.pool)
    own = candidates
    if len(candidates[-1].job_ids) > 1:
        own = [c for c in candidates if len(c.job_ids) == 1]
        if not own:
            return candidates, None
    runs_s = [c.remaining_s.value for c in own]
    done_s = _done_s(own, runs_s, waits)
    most_s = max(factor * min(done_s), now - fact.waiting_since_s)
    if fact.deadline_s is not None:
        most_s = max(most_s, fact.deadline_s - now)
    if own is candidates and max(runs_s) <= most_s:
        return candidates, None
    kept = [c for c, run_s in zip(own, runs_s, strict=True) if run_s <= most_s]
    if own is not candidates:
        # Nothing of one job alone may play a part here: both must come to the same answer.
        merged = candidates[len(own) :]
        merged_s = [c.remaining_s.value for c in merged]
        most_merged_s = factor * min(_done_s(merged, merged_s, waits))
        kept += [c for c in merged if c.remaining_s.value <= most_merged_s]
    at_once = [c for c in own if not waits[c.configuration.placement]]
    if not at_once or any(c.remaining_s.value <= most_s for c in at_once):
        return kept, None
    taken = min(at_once, key=lambda c: (c.remaining_s.value, c.gpus))
    best = own[done_s.index(min(done_s))]
    return kept, Declined(taken, best, waits[best.configuration.placement])


def _done_s(candidates: Sequence[Candidate], runs_s: Sequence[float], waits: Waits) -> list[float]:
    """Seconds from now until each candidate would be done, its wait included."""
    return list(map(add, runs_s, [waits[c.configuration.placement] for c in candidates]))

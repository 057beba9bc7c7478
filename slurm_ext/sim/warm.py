"""Which models are still loaded on which GPUs: where a pipeline switch takes a cold start's place.

A job that ends leaves its model on its GPUs; whoever starts there next takes the place of what was
loaded. Only a job that finds its own model on all of its GPUs, left at most ``warm_for_s`` ago, is
switched to; which GPUs of a node those are is not looked at, only how many.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_ext.sim.costs import Costs
from slurm_ext.sim.model import SimJob


class Warm:
    """What is loaded, by node: (since when its job is gone, model, GPUs)."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._loaded: dict[str, list[tuple[float, str, int]]] = {}

    def leave(self, job: SimJob, seats: Mapping[str, int], now: float) -> None:
        """A run has ended."""
        if job.model and self._costs.pipeline_switch_s is not None:
            for name, gpus in seats.items():
                self._loaded.setdefault(name, []).append((now, job.model, gpus))

    def take(self, job: SimJob, seats: Mapping[str, int], now: float) -> float:
        """A run begins; the seconds of its start that a pipeline switch spares."""
        warm_s = self._costs.warm_s(job.model, job.gpu_type)
        found = True
        for name, gpus in seats.items():
            kept = [
                item
                for item in self._loaded.pop(name, ())
                if now - item[0] <= self._costs.warm_for_s
            ]
            found = found and sum(n for _, model, n in kept if model == job.model) >= gpus
            # Whoever starts here now takes the place of what was loaded, oldest first.
            taken = gpus
            for at, model, n in sorted(kept, key=lambda item: (item[1] != job.model, item[0])):
                if n > taken:
                    self._loaded.setdefault(name, []).append((at, model, n - taken))
                taken = max(0, taken - n)
        if warm_s is None or not found:
            return 0.0
        return max(0.0, job.cold_s - warm_s)

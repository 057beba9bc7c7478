"""Builders of views in which jobs run and may be stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_ext.domain.job import Job, JobState
from slurm_ext.domain.plan import Plan, Verdict
from slurm_ext.domain.policy import JobFacts, View
from tests.unit.policy.build import facts, job, nodes, view

START_UP_S = 44.0


@dataclass(frozen=True)
class Running:
    """A job on the named nodes: ``left_s`` if it goes on, ``again`` counts -> seconds if anew."""

    number: int
    gpus: int
    at: tuple[str, ...]
    left_s: float
    again: Mapping[int, float] | None = None
    attained: float = 0.0
    since: float = 0.0

    @property
    def facts(self) -> JobFacts:
        times = self.again or {self.gpus: self.left_s + START_UP_S}
        return replace(facts(self.number, times, since=self.since), attained_gpu_s=self.attained)

    @property
    def row(self) -> Job:
        return replace(
            job(self.number, self.gpus, self.since), state=JobState.RUNNING, node_names=self.at
        )


def seen(
    running: Sequence[Running],
    waiting: Mapping[int, JobFacts],
    machines: int = 2,
    now: float = 0.0,
    sizes: Mapping[int, int] | None = None,
) -> View:
    """``machines`` nodes of four GPUs with what runs on them, and what waits."""
    used = dict.fromkeys((f"n{i:02d}" for i in range(machines)), 0)
    for one in running:
        for name in one.at:
            used[name] += one.gpus // len(one.at)
    rows = [one.row for one in running]
    rows += [
        job(number, (sizes or {}).get(number, fact.candidates[0].gpus), fact.waiting_since_s)
        for number, fact in waiting.items()
    ]
    seen_jobs = view(
        rows,
        {str(number): fact for number, fact in waiting.items()},
        nodes(machines, used=list(used.values())),
        free_at={str(one.number): now + one.left_s for one in running},
    )
    return replace(seen_jobs, running={str(one.number): one.facts for one in running})


def verdicts(plan: Plan) -> dict[str, str]:
    """Job id -> what happens to it, with the GPU count where it starts."""
    found = {}
    for decision in plan.decisions.values():
        if decision.verdict is Verdict.START:
            assert decision.configuration is not None
            found[decision.job_id] = f"start {decision.configuration.gpus}"
        else:
            found[decision.job_id] = str(decision.verdict)
    return found


def overbooked(v: View, plan: Plan) -> str:
    """Empty where what the plan wants fits on the nodes, stops counted first."""
    free = {node.name: node.gpus_free for node in v.snapshot.nodes}
    running = {one.job_id: one for one in v.snapshot.running()}
    acted = [d for d in plan.decisions.values() if d.verdict in (Verdict.START, Verdict.STOP)]
    for decision in acted:
        one = running.get(decision.job_id)
        if one is not None:
            for name in one.node_names:
                free[name] += one.gpus // len(one.node_names)
    for decision in acted:
        if decision.verdict is not Verdict.START:
            continue
        assert decision.configuration is not None
        shares = sorted(decision.configuration.placement, reverse=True)
        for name, share in zip(decision.nodes, shares, strict=True):
            free[name] -= share
            if free[name] < 0:
                return f"{name} is overbooked by {decision.job_id}"
    return ""

"""A small daemon around the pure half of acting, for tests: FakeSlurm, a ledger, and the waves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slurm_ext.control.permits import SlurmFacts, classify
from slurm_ext.control.reconcile import Reconciled, Refusal, reconcile
from slurm_ext.control.rules import ActingRules
from slurm_ext.control.undo import release_actions
from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import Job, JobState, ShapeKind
from slurm_ext.domain.journal import LedgerEntry
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.domain.snapshot import Snapshot
from tests.fakes.model import FakeJob
from tests.fakes.slurm import FakeSlurm

EVERYTHING = frozenset({"order", "resize", "lease", "pin"})
RULES = ActingRules(acts={"main": EVERYTHING})
MAX_WAVES = 8


def estimate(value: float, high: float | None = None, source: Source = Source.MEASURED) -> Estimate:
    return Estimate(value, value * 0.9, high if high is not None else value * 1.2, source)


def configuration(gpus: int, per_node: int = 4) -> Configuration:
    full, rest = divmod(gpus, per_node)
    return Configuration(gpus, (per_node,) * full + ((rest,) if rest else ()))


def decision(
    job_id: str,
    verdict: Verdict,
    *,
    gpus: int | None = None,
    rank: int = 0,
    nodes: tuple[str, ...] = (),
    remaining: Estimate | None = None,
) -> Decision:
    return Decision(
        job_id,
        verdict,
        rank,
        "because the test says so",
        configuration=None if gpus is None else configuration(gpus),
        nodes=nodes,
        remaining_s=remaining,
    )


def directive_for(job: FakeJob, kind: ShapeKind, *, resizable: bool = True) -> Directive:
    """What job_submit.lua would have recorded for this job."""
    per_task = kind is ShapeKind.RANK_PER_GPU
    return Directive(
        model="vit-large",
        gpus=GpuRequest(GpuRequestKind.AUTO if resizable else GpuRequestKind.REQUESTED),
        shape=kind,
        req=RequestedShape(
            gpus=job.gpus,
            nodes=job.nodes,
            ntasks=job.ntasks,
            gpus_per_node=0 if per_task else job.gpus // job.nodes,
            gpus_per_task=1 if per_task else 0,
            nodes_max=1 if kind is ShapeKind.SINGLE_NODE else 0,
        ),
    )


@dataclass
class World:
    """A fake Slurm and what a daemon keeps beside it."""

    slurm: FakeSlurm
    rules: ActingRules = RULES
    facts: SlurmFacts = field(default_factory=SlurmFacts)
    ledger: dict[str, LedgerEntry] = field(default_factory=dict)
    directives: dict[str, Directive] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    at_submitted: dict[str, Estimate] = field(default_factory=dict)

    def submit(
        self,
        gpus: int = 4,
        *,
        nodes: int = 1,
        kind: ShapeKind = ShapeKind.RANK_PER_GPU,
        foreign: bool = False,
        resizable: bool = True,
        **more: object,
    ) -> str:
        made = kind
        if kind is ShapeKind.TASKS_PER_NODE:  # to the fake, a launcher with more tasks
            made, more["ntasks"] = ShapeKind.LAUNCHER_PER_NODE, gpus
        job_id = self.slurm.submit(gpus=gpus, nodes=nodes, kind=made, **more)  # type: ignore[arg-type]
        if not foreign:
            job = self.slurm.find(job_id)
            self.directives[job_id] = directive_for(job, kind, resizable=resizable)
        return job_id

    def snapshot(self) -> Snapshot:
        return replace(self.slurm.snapshot(), limits=self.slurm.site_limits)

    def row(self, job_id: str) -> Job:
        found = self.slurm.snapshot().job(job_id)
        assert found is not None, f"{job_id} is not in the queue"
        return found

    def fake(self, job_id: str) -> FakeJob:
        return self.slurm.find(job_id)

    def permits(self, snapshot: Snapshot) -> Mapping[str, Permit]:
        return {
            job.job_id: classify(
                job,
                self.directives.get(job.job_id),
                self.ledger.get(job.job_id),
                self.facts,
                self.rules,
                self.slurm.now,
            )
            for job in snapshot.pending()
        }

    def wave(self, plan: Plan, snapshot: Snapshot | None = None) -> Reconciled:
        """What would be written next."""
        snapshot = snapshot or self.snapshot()
        return reconcile(
            plan,
            snapshot,
            self.ledger,
            self.permits(snapshot),
            self.directives,
            self.rules,
            self.slurm.now,
            at_submitted=self.at_submitted,
        )

    def act(
        self, *decisions: Decision, before: Callable[[int], bool] | None = None
    ) -> list[Action]:
        """Waves until there is nothing to write. ``before`` may end it (a kill) by returning True.

        It is asked twice a wave: after the ledger was stored and before the writes, and after.
        """
        plan = plan_of(*decisions)
        snapshot = self.snapshot()
        permits = self.permits(snapshot)
        written: list[Action] = []
        for number in range(MAX_WAVES):
            found = reconcile(
                plan,
                snapshot,
                self.ledger,
                permits,
                self.directives,
                self.rules,
                self.slurm.now,
                at_submitted=self.at_submitted,
            )
            self.refusals += found.refusals
            self.ledger.update(found.entries)
            if not found.actions:
                return written
            if before is not None and before(2 * number):
                return written
            self.slurm.apply(found.actions)
            written += found.actions
            if before is not None and before(2 * number + 1):
                return written
            snapshot = self.snapshot()
        raise AssertionError(f"still writing after {MAX_WAVES} waves: {found.actions}")

    def release(self) -> list[Action]:
        """What ``slurm-ext release`` does."""
        written: list[Action] = []
        for _ in range(MAX_WAVES):
            found = release_actions(
                self.snapshot(), self.ledger, self.directives, self.rules, self.slurm.now
            )
            self.ledger.update(found.entries)
            if not found.actions:
                return written
            self.slurm.apply(found.actions)
            written += found.actions
        raise AssertionError("release does not come to an end")

    def leased(self, job_id: str) -> bool:
        job = self.fake(job_id)
        return job.state is JobState.PENDING and job.begin_s > self.slurm.now


def plan_of(*decisions: Decision) -> Plan:
    return Plan("test", 0.0, {d.job_id: d for d in decisions})


def kinds(actions: list[Action]) -> list[ActionKind]:
    return [action.kind for action in actions]


def fields_of(actions: list[Action], kind: ActionKind) -> dict[str, str]:
    """Fields of the only action of a kind."""
    found = [action for action in actions if action.kind is kind]
    assert len(found) == 1, found
    return dict(found[0].fields)

"""Random plans, races, kills and people against the state machine: what must hold whatever happens.

The fake lets time pass only between steps, and in races between two writes of one wave, so that a
job may start at any of these moments.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slurm_ext.control.lease import Hold, hold_of
from slurm_ext.control.resume import revoking
from slurm_ext.control.submitted import carries_ours
from slurm_ext.domain.job import JobState, ShapeKind
from slurm_ext.domain.plan import Verdict
from tests.fakes.slurm import FakeSlurm
from tests.unit.control.acting import RULES, World, decision, estimate

COUNTS = {
    ShapeKind.RANK_PER_GPU: (1, 2, 4, 8, 16),
    ShapeKind.LAUNCHER_PER_NODE: (1, 2, 4, 8, 16),
    ShapeKind.SINGLE_NODE: (1, 2, 4),
    ShapeKind.TASKS_PER_NODE: (4, 8, 16),
}
SIZE_FIELDS = {"NumTasks", "NumNodes", "TresPerNode", "NumCPUs", "TimeLimit", "ReqNodeList"}


class Acting(RuleBasedStateMachine):
    """A cluster, a daemon that plans at random, and people."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(FakeSlurm(nodes=4, gpus_per_node=4))
        self.world.slurm.config["schedulerparameters"] = ""  # shrinking is possible
        self.world.slurm.before_write = self._watch
        self.submitted: dict[str, tuple[int, int, int, float | None]] = {}
        self.kinds: dict[str, ShapeKind] = {}
        self.race_at: int | None = None
        self.count = 0

    def _watch(self, slurm: FakeSlurm, action) -> None:
        if action.job_id in self.submitted:
            job = slurm.find(action.job_id)
            if SIZE_FIELDS & dict(action.fields).keys():
                assert job.state is JobState.PENDING
                assert job.begin_s - slurm.now >= RULES.safe_s, "size written without a lease"
        else:
            raise AssertionError(f"wrote to a foreign job: {action}")
        assert "Priority" not in dict(action.fields)
        self.count += 1
        if self.race_at is not None and self.count == self.race_at:
            slurm.advance(0)

    # -- the cluster -----------------------------------------------------------------------------

    @initialize(free=st.booleans())
    def begin(self, free: bool) -> None:
        if not free:
            self.world.submit(16, nodes=4, foreign=True, run_s=900.0, time_limit_s=1200.0)
            self.world.slurm.advance()

    @rule(
        kind=st.sampled_from([k for k in ShapeKind if k is not ShapeKind.FIXED]),
        gpus=st.sampled_from([1, 2, 4, 8]),
        base=st.integers(1, 40),
        grace=st.booleans(),
    )
    def submit(self, kind: ShapeKind, gpus: int, base: int, grace: bool) -> None:
        if kind is ShapeKind.SINGLE_NODE:
            gpus = min(gpus, 4)
        elif kind is ShapeKind.TASKS_PER_NODE:
            gpus = max(gpus, 4)
        nodes = max(1, gpus // 4)
        begin = self.world.slurm.now + RULES.grace_s if grace else None
        job = self.world.submit(
            gpus,
            nodes=nodes,
            kind=kind,
            base_priority=base,
            begin_s=begin,
            run_s=lambda g: 4000.0 / g,
        )
        row = self.world.row(job)
        self.submitted[job] = (row.gpus, row.nodes, row.ntasks, row.time_limit_s)
        self.kinds[job] = kind

    @rule(gpus=st.sampled_from([1, 4, 16]), base=st.integers(1, 40))
    def submit_foreign(self, gpus: int, base: int) -> None:
        self.world.submit(
            gpus, nodes=max(1, gpus // 4), foreign=True, base_priority=base, run_s=500.0
        )

    @rule(seconds=st.sampled_from([1, 5, 5, 5, 60, 200, 400, 2000]))
    def pass_time(self, seconds: int) -> None:
        self.world.slurm.advance(seconds)

    @precondition(lambda self: self.pending() or self.running())
    @rule(data=st.data())
    def people(self, data: st.DataObject) -> None:
        what = data.draw(st.sampled_from(["hold", "free", "cancel", "requeue"]))
        waiting, running = self.pending(), self.running()
        if what in ("hold", "free", "cancel") and waiting:
            job = data.draw(st.sampled_from(waiting))
            if what == "hold":
                self.world.slurm.hold(job)
            elif what == "free":
                self.world.slurm.release_hold(job)
            else:
                self.world.slurm.cancel(job)
        elif what == "requeue" and running:
            self.world.slurm.requeue(data.draw(st.sampled_from(running)))

    # -- the daemon ------------------------------------------------------------------------------

    def plan(self, data: st.DataObject):
        waiting = self.pending()
        ranks = data.draw(st.permutations(range(len(waiting))))
        decisions = []
        for rank, job in zip(ranks, waiting, strict=True):
            verdict = data.draw(st.sampled_from([*Verdict, Verdict.START, Verdict.WAIT, None]))
            if verdict is None:
                continue
            gpus = data.draw(st.sampled_from(COUNTS[self.kinds[job]]))
            nodes = ("n01", "n02", "n03", "n04")[: max(1, gpus // 4)]
            pinned = data.draw(st.booleans())
            decisions.append(
                decision(
                    job,
                    verdict,
                    rank=rank,
                    gpus=gpus if verdict is Verdict.START else None,
                    nodes=nodes if pinned else (),
                    remaining=estimate(4000.0 / gpus),
                )
            )
        return decisions

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), lost=st.booleans())
    def cycle(self, data: st.DataObject, lost: bool) -> None:
        if lost and data.draw(st.integers(0, 9)) == 0:
            self.world.ledger.clear()
        decisions = self.plan(data)
        self.world.act(*decisions)
        assert self.world.act(*decisions) == [], "a second application wrote something"
        for job in self.pending():
            planned = next((d for d in decisions if d.job_id == job), None)
            row = self.world.row(job)
            permit = self.world.permits(self.world.snapshot())[job]
            if planned is not None and planned.verdict is Verdict.WAIT and permit.lease:
                entry = self.world.ledger[job]
                own = row.eligible_s is not None and row.eligible_s > self.world.slurm.now
                assert own, f"{job} waits without a lease"
                if entry.lease_until_s is not None:
                    assert not carries_ours(row, entry)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), step=st.integers(0, 8))
    def killed_cycle(self, data: st.DataObject, step: int) -> None:
        self.world.act(*self.plan(data), before=lambda number: number >= step)

    @precondition(lambda self: self.pending())
    @rule(data=st.data(), at=st.integers(1, 6))
    def raced_cycle(self, data: st.DataObject, at: int) -> None:
        self.race_at = self.count + at
        self.world.act(*self.plan(data))
        self.race_at = None

    @precondition(lambda self: self.pending())
    @rule()
    def release(self) -> None:
        self.world.release()
        assert self.world.release() == []
        now = self.world.slurm.now
        for job in self.pending():
            row, entry = self.world.row(job), self.world.ledger[job]
            assert not carries_ours(row, entry)
            # A future start that is left is Slurm's or one that we cannot prove to be ours; that of
            # a job which came back a moment ago ends by itself.
            hold = hold_of(row, entry, self.world.directives[job], RULES, now)
            assert hold is not Hold.OURS or revoking(row, now)
            if not row.held:
                assert row.site_factor == 0

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def no_running_job_was_written_to(self) -> None:
        assert self.world.slurm.late_size_writes == []
        assert self.world.slurm.late_limit_writes == []
        assert self.world.slurm.shrunk == []

    @invariant()
    def every_lease_ends(self) -> None:
        now = self.world.slurm.now
        for job in self.pending():
            begin = self.world.fake(job).begin_s
            assert begin <= now + RULES.lease_s + 1

    @invariant()
    def holds_are_never_touched(self) -> None:
        for job in self.pending():
            assert self.world.fake(job).set_priority is None

    def pending(self) -> list[str]:
        return [
            j.job_id
            for j in self.world.slurm.queue.values()
            if j.state is JobState.PENDING and j.job_id in self.submitted
        ]

    def running(self) -> list[str]:
        return [
            j.job_id
            for j in self.world.slurm.queue.values()
            if j.state is JobState.RUNNING and j.job_id in self.submitted
        ]

    def teardown(self) -> None:
        """The daemon is gone for good and the release timer has run: everything is as submitted."""
        self.world.release()
        for job in self.pending():
            row = self.world.row(job)
            gpus, nodes, ntasks, _limit = self.submitted[job]
            assert (row.gpus, row.nodes, row.ntasks) == (gpus, nodes, ntasks)
        self.world.slurm.advance(RULES.lease_s + 1)
        for job in self.pending():
            assert self.world.fake(job).begin_s <= self.world.slurm.now


TestActing = Acting.TestCase
TestActing.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)

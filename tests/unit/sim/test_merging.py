"""Merged runs in a replay: offered, charged, carried out, and undone where they fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import View
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import Hardware, SimJob, SimulationError, replay, seats_overlap
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.outages import Outage
from slurm_ext.sim.summary import summarise
from tests.bench.titan_fm_data import HARDWARE, jobs_as_ours
from tests.unit.sim.test_engine import sim_job

ONE = Hardware(1, 1)
MACHINE = Hardware(2, 4)


def job(
    name: str, submit: float = 0, work: float = 100, start_up: float = 0, gpus: int = 1, **more
) -> SimJob:
    plain = sim_job(name, submit, gpus, work + start_up, **more)
    return replace(plain, model="vit", start_up_s=start_up)


def ends(found) -> dict[str, tuple[float, str, int]]:
    return {run.job_id: (run.end_s, run.cause, run.gpus) for run in found.runs}


class Merge:
    """Merges whatever pair it is offered; else starts what it sees, in order."""

    name = "merge"
    merges = True

    def __call__(self, view: View, now: float) -> Plan:
        decisions, rides = {}, {}
        for key, fact in view.facts.items():
            if key in rides:
                continue
            candidate = fact.candidates[-1]
            if candidate.carrier == key:
                decisions[key] = Decision(
                    key, Verdict.START, len(decisions), "", candidate.configuration
                )
                rides |= dict.fromkeys(candidate.job_ids[1:], key)
        return Plan(self.name, now, decisions, rides=rides)


def test_both_end_together_and_one_holds_no_gpus() -> None:
    pair = [job("a", work=100, start_up=10), job("b", work=60, start_up=10)]
    found = replay(pair, ONE, Merge(), merging=Merging(saved=0.5))
    # 10 s of start-up once, 100 + 60 - 30 s of work.
    assert ends(found) == {"a": (140, "done", 1), "b": (140, "done", 0)}


@pytest.mark.parametrize(("saved", "end"), [(0.0, 160), (0.5, 130), (1.0, 100)])
def test_what_merging_saves_is_a_share_of_the_smaller_task(saved: float, end: float) -> None:
    pair = [job("a", work=100), job("b", work=60)]
    assert ends(replay(pair, ONE, Merge(), merging=Merging(saved)))["b"][0] == end


def test_a_rider_that_misses_its_target_trains_by_itself() -> None:
    pair = [job("a", work=100), job("b", work=60)]
    found = replay(pair, ONE, Merge(), merging=Merging(0.5, failed=1.0))
    mine = [run for run in found.runs if run.job_id == "b"]
    assert [(r.start_s, r.end_s, r.cause, r.gpus) for r in mine] == [
        (0, 130, "unmerged", 0),
        (130, 190, "done", 1),
    ]


def test_neighbours_in_size_of_one_model_are_paired() -> None:
    jobs = [job("a", work=100), job("b", 1, work=20), job("c", 2, work=90), job("d", 3, work=30)]
    other = replace(job("e", 4, work=95), model="bert")
    unknown = replace(job("f", 5, work=96), model="")
    found = Merging().pairs([*jobs, other, unknown])
    assert [(one.job_id, two.job_id) for one, two in found] == [("b", "d"), ("a", "c")]


def test_jobs_of_different_counts_are_not_merged() -> None:
    assert Merging().merged(job("a", gpus=1), job("b", gpus=2)) is None


def test_the_estimate_is_merged_as_the_truth_is_but_from_estimates() -> None:
    off = job("b", work=60)
    (seen,) = off.candidates
    wrong = replace(seen, remaining_s=replace(seen.remaining_s, low=40.0, value=40.0))
    pair = Merging(1.0).merged(job("a", work=50), replace(off, candidates=(wrong,)))
    assert pair is not None
    assert pair.true_run_s[1] == 60
    assert pair.candidates[0].remaining_s.value == 50


def test_a_merged_run_is_one_job_until_its_end() -> None:
    """An outage ends the run; both come back as one, and are done once."""
    pair = [job("a", work=100), job("b", work=60)]
    machine = Hardware(1, 1)
    found = replay(
        pair, machine, TitanPolicy(), outages=[Outage("n1", 50, 70)], merging=Merging(1.0)
    )
    assert [(r.job_id, r.start_s, r.end_s, r.cause) for r in found.runs] == [
        ("a", 0, 50, "outage"),
        ("a", 70, 120, "done"),
        ("b", 0, 120, "done"),
    ]


def test_a_policy_that_does_not_know_pairs_sees_none() -> None:
    from slurm_ext.sim.policies import policy_named

    pair = [job("a", work=100), job("b", work=60)]
    for name in ("fifo", "srtf", "backfill"):
        found = replay(pair, ONE, policy_named(name), merging=Merging(1.0))
        assert all(run.gpus == 1 for run in found.runs)


def test_what_was_not_offered_cannot_be_merged() -> None:
    class Invents(Merge):
        def __call__(self, view: View, now: float) -> Plan:
            start = Decision("a", Verdict.START, 0, "", Configuration(1, (1,)))
            return Plan(self.name, now, {"a": start}, rides={"b": "a"})

    pair = [job("a"), replace(job("b"), model="bert")]
    with pytest.raises(SimulationError, match="merges b into a, which was not offered"):
        replay(pair, ONE, Invents(), merging=Merging())
    with pytest.raises(SimulationError, match="nothing is merged here"):
        replay(pair, ONE, Invents())


@pytest.mark.parametrize("values", [(1.1, 0.0), (-0.1, 0.0), (0.5, 2.0), (float("nan"), 0.0)])
def test_shares_are_shares(values: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="from 0 to 1"):
        Merging(*values)


def test_merging_that_saves_nothing_changes_nothing_and_else_it_pays() -> None:
    """On a published workload: two jobs in one are no faster than one after the other, and the
    policy knows; with half of the smaller task's work spared they are."""
    jobs = jobs_as_ours("FM-1-vit")

    def jct(merging: Merging | None) -> float:
        return summarise(replay(jobs, HARDWARE, TitanPolicy(), merging=merging)).avg_jct_s

    plain = jct(None)
    assert jct(Merging(saved=0.0)) == plain
    assert jct(Merging(saved=0.5)) < 0.97 * plain
    assert jct(Merging(saved=1.0)) < 0.85 * plain


rows = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.sampled_from([1, 2, 4, 8]),
        st.integers(5, 60),
        st.sampled_from([(), (1, 2, 4, 8)]),
        st.sampled_from(["vit", "bert", ""]),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=30, deadline=None)
@given(
    rows=rows,
    saved=st.sampled_from([0.0, 0.5, 1.0]),
    failed=st.sampled_from([0.0, 0.5]),
    grow=st.booleans(),
    outage=st.booleans(),
)
def test_every_job_is_done_once(
    rows: list[tuple[int, int, int, tuple[int, ...], str]],
    saved: float,
    failed: float,
    grow: bool,
    outage: bool,
) -> None:
    jobs = [
        replace(
            sim_job(f"j{n:02}", submit, gpus, 3.0 * work, counts=counts, hardware=MACHINE),
            model=model,
            start_up_s=1.0,
        )
        for n, (submit, gpus, work, counts, model) in enumerate(rows)
    ]
    policy = TitanPolicy(GROWING) if grow else TitanPolicy()
    outages = [Outage("n1", 40, 50)] if outage else []

    def run():
        return replay(
            jobs, MACHINE, policy, Costs(), outages=outages, merging=Merging(saved, failed)
        )

    found = run()
    assert found == run()
    assert seats_overlap(found.runs, MACHINE) == ""
    assert sorted(r.job_id for r in found.runs if r.cause == "done") == [j.job_id for j in jobs]
    submitted = {j.job_id: j.submit_s for j in jobs}
    for ride in found.runs:
        assert ride.start_s >= submitted[ride.job_id]
        if ride.gpus == 0:
            # Whoever rides ends with a run of the same model that held GPUs.
            model = next(j.model for j in jobs if j.job_id == ride.job_id)
            assert any(
                r.end_s == ride.end_s
                and r.gpus
                and r.cause == "done"
                and next(j.model for j in jobs if j.job_id == r.job_id) == model
                for r in found.runs
            )

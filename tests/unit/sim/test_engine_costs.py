"""Starts, stops and switches cost what `Costs` says, and Slurm what `Overhead` says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from slurm_ext.domain.configuration import Candidate, Configuration
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.job import JobState
from slurm_ext.domain.plan import Decision, Plan, Verdict
from slurm_ext.domain.policy import View
from slurm_ext.policy.backfill import Backfill
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import Hardware, Run, SimJob, SimulationError, replay, seats_overlap
from slurm_ext.sim.outages import Outage
from slurm_ext.sim.overhead import Overhead
from slurm_ext.sim.policies import policy_named

ONE = Hardware(1, 4)
FIFO = Backfill(reserve=False)


def job(
    name: str,
    submit: float = 0,
    gpus: int = 4,
    work: float = 100,
    start_up: float = 0,
    *,
    cold: float = 0,
    model: str = "",
    counts: tuple[int, ...] = (),
    believed: float = 1.0,
) -> SimJob:
    """``work`` seconds at ``gpus`` after ``start_up``; perfect scaling to ``counts``."""
    times = {n: start_up + work * gpus / n for n in sorted({gpus, *counts})}
    candidates = []
    for n, seconds in times.items():
        value = start_up + (seconds - start_up) * believed
        estimate = Estimate(value, value, value, Source.MEASURED)
        candidates.append(Candidate((name,), Configuration(n, ONE.placement(n)), estimate))
    return SimJob(
        name,
        submit,
        gpus,
        10 * work,
        tuple(candidates),
        times,
        times[gpus],
        model=model,
        start_up_s=start_up,
        cold_s=cold,
    )


Choice = tuple[Verdict, int]


class Script:
    """Does what a function says: job id -> (verdict, GPUs)."""

    name = "script"

    def __init__(
        self, choose: Callable[[View, float], dict[str, Choice]], preemptive: bool = True
    ) -> None:
        self._choose = choose
        self.preemptive = preemptive

    def __call__(self, view: View, now: float) -> Plan:
        return Plan(
            self.name,
            now,
            {
                key: Decision(key, verdict, rank, "", Configuration(n, ONE.placement(n)))
                for rank, (key, (verdict, n)) in enumerate(self._choose(view, now).items())
            },
        )


def all_wait(view: View) -> dict[str, Choice]:
    """Start whoever waits, first come first served."""
    return {j.job_id: (Verdict.START, j.gpus) for j in view.snapshot.pending()}


def runs_of(jobs: list[SimJob], policy: object, **more: object) -> list[Run]:
    hardware = more.pop("hardware", ONE)
    schedule = replay(jobs, hardware, policy, **more)  # type: ignore[arg-type]
    assert seats_overlap(schedule.runs, hardware) == ""  # type: ignore[arg-type]
    return list(schedule.runs)


def first_stops_for_second(view: View, now: float) -> dict[str, Choice]:
    """``a`` is stopped as soon as ``b`` waits, and goes on behind it."""
    if "b" in view.facts and "a" in view.running:
        return {"a": (Verdict.STOP, 4), "b": (Verdict.START, 4)}
    return all_wait(view) if not view.running else {}


def test_a_stopped_job_keeps_its_work_and_pays_its_start_again() -> None:
    jobs = [job("a", 0, work=100, start_up=10), job("b", 40, work=20, start_up=10)]
    first, second, other = runs_of(jobs, Script(first_stops_for_second))
    # 30 of 100 s are done at 40; b runs 40..70; a's start-up and 70 s of work follow.
    assert (first.start_s, first.end_s, first.cause) == (0, 40, "stop")
    assert (first.share, first.lost_s) == (pytest.approx(0.3), 10)
    assert (other.start_s, other.end_s) == (40, 70)
    assert (second.start_s, second.end_s, second.cause) == (70, 150, "done")
    assert (second.share, second.lost_s, second.queued_s) == (pytest.approx(0.7), 10, 40)
    assert second.submit_s == 0


def test_a_job_stopped_during_its_start_has_done_nothing() -> None:
    jobs = [job("a", 0, work=100, start_up=50), job("b", 40, work=20)]
    first, second, _ = runs_of(jobs, Script(first_stops_for_second))
    assert (first.share, first.lost_s) == (0, 40)
    assert second.end_s - second.start_s == 150


def test_saving_holds_the_gpus_and_requeueing_delays_the_next_start() -> None:
    costs = Costs(save_s=5, requeue_delay_s=30)
    seen: list[tuple[float, set[str]]] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        seen.append((now, set(view.facts)))
        if "b" in view.facts and "a" in view.running:
            return {"a": (Verdict.STOP, 4)}
        return all_wait(view) if not any(view.snapshot.running()) else {}

    jobs = [job("a", 0, work=100), job("b", 40, work=20)]
    first, second, other = runs_of(jobs, Script(choose), costs=costs)
    assert first.end_s == 45
    assert first.share == pytest.approx(0.4)  # nothing is done while saving
    assert (other.start_s, other.end_s) == (45, 65)
    # Back in the queue at 75, although the GPUs are free from 65 on.
    assert (second.start_s, second.end_s) == (75, 135)
    # b, which ends at 65, finds nobody in the queue.
    assert (75.0, {"a"}) in seen
    assert all("a" not in names for now, names in seen if 40 < now < 75)


def test_a_job_that_ends_while_it_would_save_is_let_run() -> None:
    jobs = [job("a", 0, work=42), job("b", 40, work=20)]
    policy = Script(first_stops_for_second)
    first, other = runs_of(jobs, policy, costs=Costs(save_s=5))
    assert (first.end_s, first.cause) == (42, "done")
    assert other.start_s == 42


def test_resize_restarts_at_once_with_full_cost() -> None:
    def choose(view: View, now: float) -> dict[str, Choice]:
        if now == 60:
            return {"a": (Verdict.START, 4)}
        return {key: (Verdict.START, 2 if key == "a" else 1) for key in view.facts}

    jobs = [job("a", 0, 2, work=200, start_up=10, counts=(4,)), job("b", 60, 1, work=1)]
    first, second, _ = runs_of(jobs, Script(choose), hardware=Hardware(1, 5))
    assert (first.end_s, first.gpus, first.cause) == (60, 2, "resize")
    assert first.share == pytest.approx(50 / 200)
    # 150 of 200 s on 2 GPUs are left: 75 s on 4, after 10 s of start-up.
    assert (second.start_s, second.gpus) == (60, 4)
    assert second.end_s == pytest.approx(60 + 10 + 75)


def test_start_of_a_running_job_as_it_is_changes_nothing() -> None:
    def choose(view: View, now: float) -> dict[str, Choice]:
        return {"a": (Verdict.START, 2), **all_wait(view)}

    jobs = [job("a", 0, 2, work=100), job("b", 50, 2, work=10)]
    assert [run.end_s for run in runs_of(jobs, Script(choose))] == [100, 60]


@pytest.mark.parametrize("verdict", [Verdict.STOP, Verdict.START])
def test_a_policy_that_does_not_say_so_may_stop_nothing(verdict: Verdict) -> None:
    def choose(view: View, now: float) -> dict[str, Choice]:
        assert not view.running
        return {"a": (verdict, 4)} if now else {"a": (Verdict.START, 2)}

    jobs = [job("a", 0, 2, counts=(4,)), job("b", 10, 1)]
    with pytest.raises(SimulationError, match="preemptive"):
        replay(jobs, ONE, Script(choose, preemptive=False))


def test_stopping_what_does_not_run_is_refused() -> None:
    with pytest.raises(SimulationError, match="does not run"):
        replay([job("a")], ONE, Script(lambda view, now: {"a": (Verdict.STOP, 4)}))


def test_policy_sees_restart_costs_and_held_time_but_not_true_progress() -> None:
    seen: list[tuple[float, float, float, float]] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        if now == 60:
            fact = view.running["a"]
            restart = fact.candidates[0].remaining_s.value
            seen.append((restart, fact.attained_gpu_s, view.free_at_s["a"], len(view.running)))
        return all_wait(view)

    # In truth a works 100 s; it is believed to work 200 s.
    jobs = [job("a", 0, 2, work=100, start_up=10, believed=2.0), job("b", 60, 2, work=1)]
    runs_of(jobs, Script(choose), costs=Costs(save_s=3, requeue_delay_s=7))
    # 50 of 200 s seem to be done: 150 s, the start-up, saving and requeueing.
    assert seen == [(pytest.approx(150 + 10 + 10), 120, 210, 1)]


def test_a_job_that_outlives_its_estimate_is_shown_as_nearly_done() -> None:
    left: list[float] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        if now == 90:
            left.append(view.running["a"].candidates[0].remaining_s.value)
        return all_wait(view)

    jobs = [job("a", 0, 2, work=100, believed=0.5), job("b", 90, 2, work=1)]
    runs_of(jobs, Script(choose))
    assert left == [pytest.approx(0.01 * 50)]


def test_interval_decides_at_its_multiples_only() -> None:
    jobs = [job("a", 10, work=100), job("b", 20, work=10), job("c", 900, work=10)]
    found = runs_of(jobs, FIFO, interval_s=300)
    assert [run.start_s for run in found] == [300, 600, 900]


def test_interval_asks_again_while_jobs_wait() -> None:
    asked: list[float] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        asked.append(now)
        return all_wait(view) if now >= 200 else {}

    (run,) = runs_of([job("a", 10, work=30)], Script(choose, preemptive=False), interval_s=50)
    assert asked == [50, 100, 150, 200]
    assert run.start_s == 200


def test_a_policy_that_never_starts_anything_does_not_run_for_ever() -> None:
    never = Script(lambda view, now: {})
    with pytest.raises(SimulationError, match="never started a"):
        replay([job("a")], ONE, never, interval_s=60)


@pytest.mark.parametrize("interval_s", [1e-9, -1.0, math.nan, math.inf])
def test_an_interval_that_the_clock_cannot_count_is_refused(interval_s: float) -> None:
    """A nanosecond added to a date is the same date: such a replay would never come to its end."""
    with pytest.raises(SimulationError, match="decision interval"):
        replay([job("a", 1e9, work=5)], ONE, FIFO, interval_s=interval_s)


def test_a_cycle_delays_starts_to_its_beat() -> None:
    jobs = [job("a", 0.5, work=10), job("b", 0.5, work=10)]
    found = runs_of(jobs, FIFO, costs=Costs(overhead=Overhead(cycle_s=4)))
    assert [run.start_s for run in found] == [4, 16]  # a ends at 14


def test_launch_and_epilog_hold_the_gpus() -> None:
    seen: list[JobState] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        seen.extend(row.state for row in view.snapshot.running())
        return all_wait(view) if not any(view.snapshot.running()) else {}

    overhead = Overhead(launch_s=3, epilog_s=2)
    jobs = [job("a", 0, work=10), job("b", 13, work=10)]
    one, two = runs_of(jobs, Script(choose), costs=Costs(overhead=overhead))
    assert (one.start_s, one.end_s, one.lost_s) == (0, 13, 3)
    assert two.start_s == 15
    assert JobState.COMPLETING in seen


@pytest.mark.parametrize("submit", [10.0, 11.0, 12.0, 13.0])
def test_nobody_slips_in_where_a_job_was_stopped(submit: float) -> None:
    """Its GPUs come free one after the other; a longer job on them would be stopped in turn."""
    jobs = [
        job("long", 0, 2, work=100),
        job("whole", 10, 4, work=20),
        job("longest", submit, 2, work=500),
    ]
    costs = Costs(save_s=2.0, overhead=Overhead(cycle_s=1.0, launch_s=2.0, epilog_s=1.0))
    runs = runs_of(jobs, policy_named("srtf-preemptive"), costs=costs)
    assert [run.job_id for run in runs if run.cause == "stop"] == ["long"]


def test_grace_delays_what_a_policy_knows_not_the_submission() -> None:
    (run,) = runs_of([job("a", 5, work=10)], FIFO, costs=Costs(overhead=Overhead(grace_s=2)))
    assert (run.submit_s, run.start_s) == (5, 7)


def switches(warm_for: float = 0, pipeline: bool = True) -> Costs:
    return Costs(pipeline_switch_s={("vit", ""): 2.0} if pipeline else None, warm_for_s=warm_for)


@pytest.mark.parametrize(
    ("model", "submit", "costs", "took"),
    [
        ("vit", 0.0, switches(), 52),  # the ranks are still there
        ("bert", 0.0, switches(), 60),  # another model
        ("vit", 115.0, switches(), 60),  # a ended at 110
        ("vit", 115.0, switches(warm_for=5), 52),
        ("vit", 0.0, switches(pipeline=False), 60),
        ("vit", 0.0, switches().without_switch(), 60),
    ],
)
def test_pipeline_switch_spares_the_cold_one(
    model: str, submit: float, costs: Costs, took: float
) -> None:
    jobs = [
        job("a", 0, work=100, start_up=10, cold=10, model="vit"),
        job("b", submit, work=50, start_up=10, cold=10, model=model),
    ]
    runs = runs_of(jobs, FIFO, costs=costs)
    assert runs[1].end_s - runs[1].start_s == pytest.approx(took)
    assert runs[1].lost_s == pytest.approx(took - 50)


def test_a_pipeline_switch_needs_every_gpu_of_the_new_job_warm() -> None:
    jobs = [
        job("a", 0, 2, work=100, start_up=10, cold=10, model="vit"),
        job("x", 0, 2, work=100, start_up=10, cold=10, model="bert"),
        job("b", 0, 4, work=50, start_up=10, cold=10, model="vit"),
    ]
    runs = runs_of(jobs, FIFO, costs=switches())
    assert runs[2].end_s - runs[2].start_s == 60


def test_an_outage_ends_runs_keeps_checkpoints_and_closes_the_node() -> None:
    jobs = [job("a", 0, 4, work=100), job("b", 0, 4, work=100)]
    outages = [Outage("n1", 45, 70)]
    costs = Costs(checkpoint_every_s=20)
    found = runs_of(jobs, FIFO, hardware=Hardware(2, 4), outages=outages, costs=costs)
    lost, again, other = found
    assert (lost.end_s, lost.cause, lost.share) == (45, "outage", pytest.approx(0.4))
    assert lost.lost_s == pytest.approx(5)
    assert (again.start_s, again.end_s) == (70, 130)
    assert (other.start_s, other.end_s) == (0, 100)


@pytest.mark.parametrize("name", ["titan", "titan-rigid", "titan-grow", "backfill"])
@pytest.mark.parametrize(("interval", "again_s"), [(0, 500), (60, 540)])
def test_an_evicted_job_starts_as_soon_as_its_node_is_back(
    name: str, interval: float, again_s: float
) -> None:
    outages = [Outage("n1", 100, 500), Outage("n1", 2000, 2500)]
    found = runs_of([job("a", work=3600)], policy_named(name), outages=outages, interval_s=interval)
    assert [run.start_s for run in found] == [0, again_s, 2500 if not interval else 2520]
    assert found[-1].cause == "done"


def test_a_node_is_back_when_none_of_its_outages_holds() -> None:
    outages = [Outage("n1", 5, 20), Outage("n1", 10, 40)]
    (run,) = runs_of([job("a", 15, work=10)], FIFO, outages=outages)
    assert run.start_s == 40


def test_a_job_that_spans_a_failed_node_gives_back_all_its_nodes() -> None:
    jobs = [job("wide", 0, 8, work=100), job("narrow", 1, 4, work=10)]
    outages = [Outage("n1", 30)]
    found = replay(jobs[1:] + jobs[:1], Hardware(3, 4), Backfill(), outages=outages).runs
    assert seats_overlap(found, Hardware(3, 4)) == ""
    assert all("n1" not in run.seats for run in found if run.start_s >= 30)
    wide = [run for run in found if run.job_id == "wide"]
    assert [run.cause for run in wide] == ["outage", "done"]


def test_a_machine_that_stays_away_is_told() -> None:
    with pytest.raises(SimulationError, match=r"never started a: .*; n1 never came back"):
        replay([job("a", 5)], ONE, FIFO, outages=[Outage("n1", 0)])
    many = [job(f"j{n}", 5) for n in range(12)]
    with pytest.raises(SimulationError, match="j9 and 2 more: "):
        replay(many, ONE, FIFO, outages=[Outage("n1", 0)])


def test_a_policy_that_restarts_for_ever_is_told() -> None:
    def choose(view: View, now: float) -> dict[str, Choice]:
        return dict.fromkeys(view.running, (Verdict.STOP, 4)) or all_wait(view)

    restless = Script(choose)
    with pytest.raises(SimulationError, match="stopped job a 500 times"):
        replay([job("a", work=5, start_up=9)], ONE, restless, interval_s=3)


def test_outage_of_an_unknown_node_is_refused() -> None:
    with pytest.raises(SimulationError, match="unknown node n9"):
        replay([job("a")], ONE, FIFO, outages=[Outage("n9", 0)])


def test_progress_is_told_up_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    replay([job("a"), job("b"), job("c")], ONE, FIFO, progress=lambda *now: told.append(now))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_full_machine_is_not_worth_a_question() -> None:
    asked: list[float] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        asked.append(now)
        return all_wait(view)

    jobs = [job("a", 0), job("b", 10), job("c", 20)]
    runs_of(jobs, Script(choose, preemptive=False))
    assert asked == [0, 100, 200]


def test_a_view_that_somebody_keeps_does_not_change() -> None:
    kept: list[tuple[View, tuple[object, ...]]] = []

    def contents(view: View) -> tuple[object, ...]:
        queues = {pool: tuple(queue) for pool, queue in (view.queues or {}).items()}
        snapshot = view.snapshot
        return (
            dict(view.facts),
            queues,
            tuple(snapshot.pending()),
            tuple(snapshot.running()),
            snapshot.jobs,
            snapshot.nodes,
            dict(view.free_at_s),
            {key: view.running[key] for key in view.running},
        )

    def choose(view: View, now: float) -> dict[str, Choice]:
        kept.append((view, contents(view)))
        return first_stops_for_second(view, now)

    jobs = [job("a", 0), job("b", 40), *(job(f"c{n}", 50 + n) for n in range(5))]
    runs_of(jobs, Script(choose))
    assert len(kept) > 6
    for view, before in kept:
        assert contents(view) == before


def test_a_view_that_nobody_keeps_is_not_copied() -> None:
    parts: list[int] = []

    def choose(view: View, now: float) -> dict[str, Choice]:
        parts.append(id(view.facts))
        return all_wait(view)

    runs_of([job(f"j{n}", n) for n in range(20)], Script(choose, preemptive=False))
    assert len(set(parts)) == 1


@pytest.mark.parametrize("name", ["tiresias", "optimus"])
@pytest.mark.parametrize("delay", [0, 30])
def test_rules_that_charge_nothing_for_a_stop_come_to_an_end_on_events(
    name: str, delay: float
) -> None:
    """Every stop is an event that they react to, and a start that does no work helps nobody: no
    job is stopped before it has run for longer than the stop costs it."""
    jobs = [
        job(f"j{n:02}", 40 * n, (1, 2, 4)[n % 3], 5000, 60, counts=(1, 2, 4)) for n in range(24)
    ]
    costs = Costs(save_s=20, requeue_delay_s=delay, overhead=Overhead(launch_s=5, epilog_s=3))
    runs = runs_of(jobs, policy_named(name), costs=costs)
    assert [run.cause for run in runs].count("done") == 24
    stopped = [run for run in runs if run.cause != "done"]
    assert stopped
    # A stop costs saving, the delay (or the epilog), launch and start-up.
    cost = 20 + max(delay, 3) + 5 + 60
    for run in stopped:
        assert run.end_s - run.start_s > cost
        assert run.share > 0

"""What comes out: summaries, rows of jobs, curves, and how well a replay agrees with reality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.curves import (
    HOURS,
    distribution,
    draw_jct,
    draw_utilisation,
    in_use,
    share_in_use,
    use_over_time,
)
from slurm_ext.sim.engine import Hardware, replay
from slurm_ext.sim.gantt import waiting
from slurm_ext.sim.metrics import outcomes_of
from slurm_ext.sim.model import Run, Schedule
from slurm_ext.sim.overhead import Overhead, agreement, calibrate, launch_seconds
from slurm_ext.sim.policies import policy_named
from slurm_ext.sim.summary import job_rows, summarise
from tests.unit.sim.test_engine import sim_job


def run(job_id: str, submit: float, start: float, end: float, gpus: int = 2, **more: object) -> Run:
    return Run(job_id, submit, start, end, gpus, {"n1": gpus}, 10.0, **more)  # type: ignore[arg-type]


# a runs 10..20, is stopped, and runs 30..50 on four GPUs; b runs 0..10.
RUNS = (
    run("a", 0, 10, 20, cause="stop", share=0.4, lost_s=2),
    run("a", 0, 30, 50, gpus=4, queued_s=20, share=0.6, lost_s=3),
    run("b", 0, 0, 10),
)


def test_a_job_of_several_runs_is_one_outcome() -> None:
    one, two = outcomes_of(RUNS)
    assert (one.jct_s, one.held_s, one.gpu_seconds) == (50, 30, 20 + 80)
    assert (two.jct_s, two.held_s) == (10, 10)


def test_summary_counts_waits_starts_and_losses() -> None:
    found = summarise(Schedule("x", 4, RUNS, 7, 1))
    assert (found.avg_jct_s, found.makespan_s, found.jobs) == (30, 50, 2)
    assert (found.avg_wait_s, found.p99_wait_s) == (10, pytest.approx(19.8))
    assert found.starts_per_job == 1.5
    assert found.gpu_s_lost == 2 * 2 + 4 * 3
    assert found.gpu_utilisation == pytest.approx(120 / 200)
    assert found.worst_slowdown == 5
    assert (found.share_better_than_srtf, found.share_worse_than_srtf) == (None, None)
    assert (found.decisions, found.refused_starts) == (7, 1)


def test_better_and_worse_than_srtf_begin_at_a_tenth() -> None:
    base = Schedule("srtf", 4, tuple(run(n, 0, 0, 100) for n in "abcde"))
    ends = {"a": 90, "b": 91, "c": 100, "d": 109, "e": 110}
    ours = Schedule("x", 4, tuple(run(n, 0, 0, end) for n, end in ends.items()))
    found = summarise(ours, base)
    assert (found.share_better_than_srtf, found.share_worse_than_srtf) == (0.2, 0.2)
    with pytest.raises(DataError, match="jobs differ"):
        summarise(ours, replace(base, runs=base.runs[:2]))


def test_rows_of_jobs_have_the_first_start_and_the_last_end() -> None:
    rows = job_rows(RUNS)
    assert [{k: v for k, v in row.items() if k not in ("nodes", "gpu_type")} for row in rows] == [
        {"job_id": "a", "submit_s": 0, "start_s": 10, "end_s": 50, "gpus": 4},
        {"job_id": "b", "submit_s": 0, "start_s": 0, "end_s": 10, "gpus": 2},
    ]


def test_rows_of_jobs_tell_where_the_last_run_was() -> None:
    spread = replace(RUNS[0], job_id="c", seats={"n3": 4, "n1": 4, "n2": 4})
    rider = replace(RUNS[0], job_id="r", seats={}, gpus=0)
    rows = job_rows([spread, rider], {"n1": "A100", "n2": "A100", "n3": "A100"})
    assert [(row["nodes"], row["gpu_type"]) for row in rows] == [("n[1-3]", "A100"), ("", "")]


def test_a_stopped_job_waits_from_its_stop_on() -> None:
    assert waiting(RUNS) == [(0, 1), (10, 0), (20, 1), (30, 0)]


def test_distribution_and_use() -> None:
    assert distribution([3, 1, 1, 2]) == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert in_use(RUNS) == [(0, 2), (20, 0), (30, 4), (50, 0)]
    shares = share_in_use(in_use(RUNS), 4, 10)
    assert [at for at, _ in shares] == [5, 15, 25, 35, 45]
    assert [share for _, share in shares] == pytest.approx([0.5, 0.5, 0, 1, 1])
    assert share_in_use([], 4, 10) == []


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0.01, 1e4), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.5, 1e4),
)
def test_shares_add_up_to_the_gpu_time(rows: list[tuple[float, float, int]], width: float) -> None:
    runs = [run(f"j{n}", 0, at, at + long, gpus) for n, (at, long, gpus) in enumerate(rows)]
    shares = share_in_use(in_use(runs), 32, width)
    begin, end = min(r.start_s for r in runs), max(r.end_s for r in runs)
    each = (end - begin) / len(shares)
    used = sum(r.gpus * (r.end_s - r.start_s) for r in runs)
    assert sum(share for _, share in shares) * each * 32 == pytest.approx(used, rel=1e-6)
    assert all(-1e-9 <= share <= 1 + 1e-9 for _, share in shares)


def test_use_goes_down_to_nothing_and_pictures_name_what_they_show(tmp_path: Path) -> None:
    points = use_over_time(RUNS, 4)
    assert points[-1] == (50, 0.0)
    assert points[-2][1] == 1.0  # the last interval is averaged over itself only
    assert use_over_time([], 4) == []
    draw_utilisation({"x": RUNS}, 4, tmp_path / "use.svg", "w.csv on 1x4")
    draw_jct({"x": RUNS}, tmp_path / "jct.svg", "w.csv on 1x4")
    for name in ("use.svg", "jct.svg"):
        assert "<!-- w.csv on 1x4 -->" in (tmp_path / name).read_text()
    assert f"<!-- {HOURS} -->" in (tmp_path / "use.svg").read_text()


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_jct({"x": RUNS, "y": RUNS[:2]}, tmp_path / "new" / "jct.png")
    draw_utilisation({"x": RUNS}, 4, tmp_path / "use.svg")
    assert (tmp_path / "new" / "jct.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "use.svg").read_text()


# -- beside a real cluster -----------------------------------------------------------------------


def test_agreement_is_relative_and_signed() -> None:
    real = [run("a", 0, 10, 100), run("b", 0, 0, 50)]
    model = [run("a", 0, 4, 88), run("b", 0, 1, 47)]
    found = agreement(real, model)
    assert found.avg_jct_error == pytest.approx(135 / 150 - 1)
    assert found.makespan_error == pytest.approx(-0.12)
    assert found.p90_start_error_s == 6
    with pytest.raises(DataError, match="jobs differ"):
        agreement(real, model[:1])


def test_launch_is_what_runs_take_beyond_their_work() -> None:
    real = [run(name, 0, 0, 10 + extra) for name, extra in [("a", 1), ("b", 2), ("c", 9)]]
    assert launch_seconds(real, lambda r: 10.0) == 2


def test_calibration_finds_the_delays_that_made_the_record() -> None:
    hardware = Hardware(2, 4)
    jobs = [sim_job(f"j{n:02}", 7.3 * n, 4, 20 + n) for n in range(20)]

    def replayed(overhead: Overhead) -> tuple[Run, ...]:
        policy = policy_named("backfill")
        return replay(jobs, hardware, policy, Costs(overhead=overhead)).runs

    made = Overhead(cycle_s=4, launch_s=1.5, epilog_s=2)
    real = replayed(made)
    grid = (0.0, 2.0, 4.0, 8.0)
    found = calibrate(real, replayed, grid, grid, Overhead(launch_s=1.5))
    assert found == made
    assert agreement(real, replayed(found)).p90_start_error_s == 0
    assert agreement(real, replayed(Overhead())).p90_start_error_s > 5


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_senseless_overhead_is_refused(value: float) -> None:
    with pytest.raises(DataError, match="cycle_s"):
        Overhead(cycle_s=value)

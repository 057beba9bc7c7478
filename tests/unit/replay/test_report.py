"""Table, verdict and JSON from made-up schedules whose ratios are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ci.replay.ideal import Ideal
from ci.replay.options import Options, Variant
from ci.replay.records import Record
from ci.replay.report import as_json, make, table, verdict
from ci.replay.stage import Finished
from slurm_ext.sim.engine import Run
from slurm_ext.sim.metrics import measure, outcomes_of

# Ten jobs that wait `wait` each and run 100 s on one GPU of 32.
JSON_KEYS = {
    "avg_jct_s",
    "median_jct_s",
    "p95_jct_s",
    "p99_jct_s",
    "makespan_s",
    "max_slowdown",
    "share_hurt_10pct",
    "queue_share_of_jct",
    "gpu_utilisation",
}


def schedule(wait: float, last: float = 0.0) -> list[Run]:
    runs = [Run(f"j{i}", i, i + wait, i + wait + 100, 1, {"n1": 1}, 100.0) for i in range(10)]
    return [*runs[:-1], replace(runs[-1], end_s=runs[-1].end_s + last)]


def finished(variant: Variant, runs: list[Run], lag: float = 0.0) -> Finished:
    return Finished(variant, tuple(Record(run, 2, False) for run in runs), lag, "c")


def ideal(wait: float) -> Ideal:
    runs = schedule(wait)
    return Ideal("EASY", tuple(runs), measure(outcomes_of(runs), 32))


FULL = Options(full=True, jobs=None)
PLAIN = finished(Variant.PLAIN, schedule(100))


def test_json_has_exactly_the_promised_keys() -> None:
    parts = [PLAIN, finished(Variant.ORDER, schedule(50)), finished(Variant.FULL, schedule(0))]
    document = json.loads(json.dumps(as_json(make(Options(), parts, [ideal(100)]))))
    assert set(document) == {"plain", "order", "slurm_ext", "ratio", "meta"}
    for name in ("plain", "order", "slurm_ext", "ratio"):
        assert set(document[name]) == JSON_KEYS
    assert document["plain"]["avg_jct_s"] == pytest.approx(200)
    assert document["ratio"]["avg_jct_s"] == pytest.approx(2)
    assert document["meta"]["ratio_order"]["avg_jct_s"] == pytest.approx(200 / 150)
    assert document["meta"]["variants"]["slurm_ext"]["resized"] == 10


def test_ratio_is_against_the_better_of_plain_and_ideal() -> None:
    ours = finished(Variant.FULL, schedule(0))
    against_ideal = make(FULL, [PLAIN, ours], [ideal(90)])
    assert against_ideal.ratio[Variant.FULL]["avg_jct_s"] == pytest.approx(1.9)
    assert against_ideal.baseline == "the ideal EASY replay"
    against_plain = make(FULL, [PLAIN, ours], [ideal(105)])
    assert against_plain.ratio[Variant.FULL]["avg_jct_s"] == pytest.approx(2.0)
    assert against_plain.baseline == "the plain run"


@pytest.mark.parametrize(("wait", "valid"), [(100, True), (82, True), (81, False), (123, False)])
def test_plain_run_far_from_the_ideal_one_is_invalid(wait: float, valid: bool) -> None:
    report = make(FULL, [PLAIN, finished(Variant.FULL, schedule(0))], [ideal(wait)])
    assert report.valid is valid
    assert report.passed is valid
    assert ("INVALID" in verdict(report)) is not valid


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (schedule(0), ""),
        (schedule(19), "average JCT"),  # 200 / 119 = 1.68
        (schedule(0, last=115), "p99"),
        (schedule(0, last=100.5), "makespan"),
    ],
)
def test_targets_of_the_benchmark(ours: list[Run], missed: str) -> None:
    report = make(FULL, [PLAIN, finished(Variant.FULL, ours)], [ideal(100)])
    names = [check.name for check in report.checks if not check.passed]
    assert report.passed is not bool(missed)
    assert any(missed in name for name in names) if missed else names == []
    assert ("MISS" in verdict(report)) is bool(missed)


def test_no_targets_for_the_demonstration_and_for_other_workloads() -> None:
    slow = [PLAIN, finished(Variant.FULL, schedule(99))]
    assert make(Options(), slow, [ideal(100)]).passed
    assert make(replace(FULL, workload="FM-2-vit"), slow, [ideal(100)]).passed
    assert not make(FULL, slow, [ideal(100)]).passed


def test_late_submissions_are_a_miss() -> None:
    late = finished(Variant.PLAIN, schedule(100), lag=3.2)
    report = make(Options(), [late], [ideal(100)])
    assert not report.passed
    assert "latest 3.20 s late" in verdict(report)


def test_hurt_is_against_the_plain_run() -> None:
    slower = finished(Variant.FULL, schedule(100, last=50))
    report = make(Options(), [PLAIN, slower], [ideal(0)])
    assert report.metrics[Variant.FULL].share_hurt_10pct == pytest.approx(0.1)


def test_table_shows_every_metric_in_hours_and_per_cent() -> None:
    report = make(Options(), [PLAIN, finished(Variant.FULL, schedule(0))], [ideal(100)])
    lines = table(report).splitlines()
    assert len(lines) == 2 + len(JSON_KEYS)
    assert lines[0].split() == ["|", "measured", "|", "ratio", "|", "ideal"]
    assert lines[1].split() == ["|", "plain", "slurm_ext", "|", "slurm_ext", "|", "EASY"]
    assert lines[2].split() == [
        *["average", "JCT", "(h)"],
        "|",
        "0.056",
        "0.028",
        "|",
        "2.00",
        "|",
        "0.056",
    ]
    hurt = next(line for line in lines if line.startswith("jobs hurt"))
    assert hurt.endswith("|")
    assert "no benchmark" in verdict(report)
    assert "no benchmark" not in verdict(make(FULL, [PLAIN], [ideal(100)]))

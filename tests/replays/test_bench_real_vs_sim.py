"""The simulator beside records of a real Slurm: the comparison holds, and it can say no."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.sim.overhead import Overhead
from tests.bench.real_vs_sim import (
    CALIBRATE,
    JUDGE,
    Finding,
    Record,
    Twin,
    compare,
    misses,
    read_record,
)

# Around what the whole grid finds; the whole of it is the benchmark's business.
CYCLES_S, EPILOGS_S = (0.75,), (0.2, 0.3)


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return compare(read_record(CALIBRATE), read_record(JUDGE), CYCLES_S, EPILOGS_S)


def test_records_hold_every_job_of_their_workloads() -> None:
    for path, jobs in ((CALIBRATE, 160), (JUDGE, 240)):
        record = read_record(path)
        assert {variant: len(runs) for variant, runs in record.runs.items()} == {
            "plain": jobs,
            "slurm_ext": jobs,
        }
        for runs in record.runs.values():
            assert all(run.submit_s <= run.start_s < run.end_s for run in runs)


def test_calibrated_on_one_workload_the_other_is_within_a_tenth(findings: list[Finding]) -> None:
    assert misses(findings) == []
    for found in findings:
        assert abs(found.judged.avg_jct_error) < 0.03
        assert abs(found.judged.makespan_error) < 0.01
        # Half of the jobs of this workload run for more than a quarter of an hour.
        assert found.judged.p90_start_error_s < 600


def test_calibration_is_worth_it(findings: list[Finding]) -> None:
    plain, ours = findings
    assert abs(plain.judged.avg_jct_error) < abs(plain.ideal.avg_jct_error)
    for found in (plain, ours):
        assert found.judged.p90_start_error_s < found.ideal.p90_start_error_s


def test_a_wrong_overhead_is_noticed(findings: list[Finding]) -> None:
    """Ten times the epilog that was found: the simulation is then off, and that is told."""
    record = read_record(JUDGE)
    twin = Twin(record, "plain")
    slow = twin.simulate(Overhead(cycle_s=60, epilog_s=300))
    off = replace(findings[0], judged=_judge(twin, slow))
    assert any("average JCT" in line for line in misses([off]))


def _judge(twin: Twin, runs: object) -> object:
    from slurm_ext.sim.overhead import agreement

    return agreement(twin.real, runs)  # type: ignore[arg-type]


def test_the_wrong_policy_is_noticed() -> None:
    """Plain Slurm's record does not look like slurm-ext's simulation."""
    record = read_record(CALIBRATE)
    mixed = Record(
        record.workload,
        record.jobs,
        record.nodes,
        record.gpus_per_node,
        record.scale,
        record.seed,
        {"plain": record.runs["slurm_ext"], "slurm_ext": record.runs["plain"]},
    )
    twin = Twin(mixed, "plain")
    found = _judge(twin, twin.simulate(Overhead()))
    assert found.avg_jct_error > 0.5  # type: ignore[attr-defined]


def test_a_record_is_what_the_replay_writes(tmp_path: Path) -> None:
    from ci.replay.__main__ import _records
    from ci.replay.options import Options, Variant

    first = read_record(CALIBRATE)

    class Stage:
        def __init__(self, variant: Variant) -> None:
            self.variant = variant
            self.finished = self
            self.records = [_Kept(run) for run in first.runs[str(variant)]]

    class _Kept:
        def __init__(self, run: object) -> None:
            self.run = run

    options = Options(full=True, jobs=None)
    text = _records(options, [Stage(Variant.PLAIN), Stage(Variant.FULL)])  # type: ignore[list-item]
    path = tmp_path / "record.json"
    path.write_text(text)
    assert json.loads(text)["meta"]["time_scale"] == 60
    assert read_record(path) == first

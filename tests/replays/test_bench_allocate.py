"""The allocation benchmark on small sizes: it runs, and each of its checks can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_ext.optimize.problem import Problem
from tests.bench import allocate as bench


def test_small_sizes_meet_every_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    code = bench.main(["--sizes", "20x64,80x64", "--seeds", "2", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "20 x 64" in out
    assert "80 x 64" in out
    written = json.loads(file.read_text())
    assert written["failures"] == []
    runs = [run for size in written["sizes"] for run in size["runs"]]
    assert {run["solver"] for run in runs} == {"knapsack", "highs", "highs-nopresolve", "cbc"}
    assert all(run["finished"] for run in runs)


def test_a_solver_stopped_by_its_limit_is_shown_as_such(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A limit that no machine keeps.
    code = bench.main(["--sizes", "80x64", "--seeds", "1", "--limit", "0.000001"])
    out = capsys.readouterr().out
    assert "1/1 stopped by the limit" in out
    assert "ours was not solved exactly" in out
    assert code == 1


def test_a_ratio_below_the_target_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "TARGET_SIZE", (20, 64))
    monkeypatch.setattr(bench, "TARGET_RATIO", 1e9)
    assert bench.main(["--sizes", "20x64", "--seeds", "1"]) == 1
    assert "MISSED 20x64" in capsys.readouterr().out


def test_a_different_objective_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def worse(problem: Problem, limit_s: float) -> tuple[bool, float, float, float]:
        done, value, solve_s, build_s = bench.run_ours(problem, limit_s)
        return done, value * (1.0 - 1e-6), solve_s, build_s

    monkeypatch.setitem(bench.SOLVERS, "knapsack", worse)
    assert bench.main(["--sizes", "20x64", "--seeds", "1"]) == 1
    out = capsys.readouterr().out
    for oracle in ("highs", "highs-nopresolve", "cbc", "the recurrence"):
        assert f"seed 0: {oracle} says" in out


def test_problems_look_like_throughput_curves() -> None:
    problem = bench.make_problem(50, 64, 7)
    assert problem == bench.make_problem(50, 64, 7)
    assert problem != bench.make_problem(50, 64, 8)
    for item in problem.items:
        counts = [option.gpus for option in item.options]
        assert counts == [2**k for k in range(len(counts))]
        per_gpu = [option.value / option.gpus for option in item.options]
        assert per_gpu[-1] < per_gpu[0]

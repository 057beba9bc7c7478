"""The benchmark of the session's cost: it runs, and its check can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import agreement as bench


def blocks(with_ms: float, without_ms: float) -> tuple[bench.Block, bench.Block]:
    return ([with_ms / 1000] * 4, 0.0003), ([without_ms / 1000] * 4, 0.0001)


def test_summary_is_of_pairs_and_not_of_whatever_else_the_machine_does() -> None:
    """Half of the run was twice as slow, for both kinds alike."""
    pairs = [blocks(50.1, 50.0)] * 5 + [blocks(100.2, 100.0)] * 5
    found = bench.summary(pairs, [0.0001] * 20)
    assert found["share"] == pytest.approx(0.002)
    assert found["low"] == found["high"] == pytest.approx(0.002)
    assert found["cpu_us"] == pytest.approx(200)
    assert found["call_us"] == pytest.approx(100)


def test_a_cost_above_the_limit_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = ["--pairs", "2", "--ranks", "2", "--step-ms", "5", "--json", str(file)]
    assert bench.main([*arguments, "--extra-ms", "50"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert json.loads(file.read_text())["share"] > 1

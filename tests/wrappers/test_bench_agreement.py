"""The benchmark of the session's cost: it runs, and its check can fail."""

from __future__ import annotations

import json
import random
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


def on_a_busy_machine(extra_ms: float, seed: int) -> dict[str, float]:
    """A run as was seen beside other work: steps much longer now and then, slow times of it."""
    rng = random.Random(seed)

    def block(step_ms: float, busy: float) -> bench.Block:
        noise = (rng.lognormvariate(0.0, 1.0) * busy for _ in range(bench.STEPS_A_BLOCK))
        return [(step_ms + each) / 1000 for each in noise], 0.0

    pairs = []
    for _ in range(120):
        busy = rng.uniform(0.5, 2.5)
        pairs.append((block(50.05 + extra_ms, busy), block(50.0, busy)))
    return bench.summary(pairs, [0.00005] * 20)


@pytest.mark.parametrize("seed", range(2))
def test_half_a_millisecond_is_seen_through_the_noise_and_noise_is_no_cost(seed: int) -> None:
    cheap, dear = on_a_busy_machine(0.0, seed), on_a_busy_machine(0.5, seed)
    assert cheap["share"] < bench.WANTED_SHARE < dear["share"]
    assert cheap["low"] < 0.001 < cheap["high"]
    assert dear["low"] < 0.011 < dear["high"]


@pytest.mark.parametrize("transport", [bench.AUTO, bench.GLOO])
def test_a_cost_above_the_limit_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    file = tmp_path / "out.json"
    arguments = ["--pairs", "2", "--ranks", "2", "--step-ms", "5", "--json", str(file)]
    assert bench.main([*arguments, "--extra-ms", "50", "--transport", transport]) == 1
    assert "FAILED" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["share"] > 1
    assert result["through"] == {bench.AUTO: "memory", bench.GLOO: "messages"}[transport]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_half_a_millisecond_of_real_steps_fails() -> None:
    assert bench.main(["--pairs", "40", "--ranks", "2", "--extra-ms", "0.5"]) == 1

"""What a switch is worth: replayed with the costs that are given, and harm is a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.policy.titan import TitanPolicy
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.library import find_workload
from slurm_ext.sim.trace import read_trace
from tests.bench import switch_gain
from tests.bench.switch_gain import Ground, Row, from_file, misses, one, rows_of, show, stated

SMALL = Ground(
    "one workload",
    Hardware(nodes=8, gpus_per_node=4),
    (tuple(read_trace(find_workload("FM-1-roberta-base")).jobs),),
)


def test_a_dear_cold_start_is_worth_a_switch_and_an_equal_one_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dear, equal = rows_of(SMALL, {"dear": stated(200.0, 1.0)})[0], stated(200.0, 200.0)
    assert dear.shorter > 0.1
    assert dear.warm > 0.1
    assert misses([dear]) == []
    # A switch that takes as long as a cold start changes no time at all.
    (same, *_) = rows_of(SMALL, {"equal": equal})
    assert same.with_h == same.without_h == pytest.approx(dear.without_h)
    assert (same.shorter, same.warm) == (0.0, 0.0)
    show([dear])
    assert f"{dear.with_h:.3f}" in capsys.readouterr().out


def test_harm_beyond_what_lists_differ_by_is_a_miss() -> None:
    def row(shorter: float, error: float) -> Row:
        return Row("jobs", "costs", "titan", 1.0, 1.0, 0.5, shorter, error)

    assert misses([row(-0.03, 0.01)]) == ["titan on jobs, costs: 3.0% longer with the switch"]
    assert misses([row(-0.03, 0.02), row(-0.009, 0.0), row(0.1, 0.0)]) == []


def test_a_site_s_costs_come_from_a_file_of_the_throughput_table(tmp_path: Path) -> None:
    file = tmp_path / "costs.csv"
    file.write_text(
        "kind,model,gpu_type,gpus,seconds\ncold_start,,,4,40\nswitch,,,2,3\nswitch,,,4,2\n"
    )
    costs = from_file(file)
    assert (costs.cold_s("vit"), costs.warm_s("vit")) == (40.0, 3.0)
    assert (costs.checkpoint_s, costs.warm_for_s) == (30.0, switch_gain.WARM_FOR_S)
    jct_h, warm = one(SMALL, SMALL.lists[0], TitanPolicy(), costs)
    assert jct_h > 0
    assert 0 < warm < 1
    file.write_text("kind,model,gpu_type,gpus,seconds\ncold_start,,,4,40\n")
    with pytest.raises(SystemExit, match="needs rows of the kinds cold_start and switch"):
        from_file(file)

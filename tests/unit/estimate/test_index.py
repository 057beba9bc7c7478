"""Which rows answer which request, holes, bounds and costs."""

from __future__ import annotations

import pytest

from slurm_ext.estimate.index import MEMO_SIZE, ThroughputIndex
from slurm_ext.estimate.interpolate import UNKNOWN_SPREAD, Reading
from slurm_ext.estimate.measurement import Cost, CostKind, Settings
from tests.unit.estimate.builders import row

BF16 = Settings(precision="bf16", frozen="none", grad_checkpointing=False)


def match_notes(index: ThroughputIndex, wanted: Settings) -> list[tuple[str, str]]:
    return [(m.settings.precision, m.note) for m in index.matches("m", "V100", wanted, (1,))]


def test_equal_settings_come_first_and_contradictions_never() -> None:
    index = ThroughputIndex(
        [
            row(8, 1.0),
            row(8, 2.0, settings=BF16),
            row(8, 3.0, settings=Settings(precision="fp32")),
        ]
    )
    assert match_notes(index, BF16) == [
        ("bf16", ""),
        ("", "frozen, precision, grad checkpointing not recorded"),
    ]


def test_what_the_user_did_not_say_is_assumed_and_told() -> None:
    index = ThroughputIndex([row(8, 2.0, settings=BF16)])
    wanted = Settings(frozen="none", grad_checkpointing=False)
    assert match_notes(index, wanted) == [("bf16", "precision bf16 assumed")]


def test_another_environment_comes_last_with_wider_bounds() -> None:
    old, blank = Settings(environment="cuda12.1"), Settings()
    index = ThroughputIndex([row(8, 2.0, settings=old), row(8, 3.0, settings=blank)])
    found = list(index.matches("m", "V100", Settings(environment="cuda12.8"), (1,)))
    assert [m.settings.environment for m in found] == ["", "cuda12.1"]
    assert found[1].note == "measured in another environment"
    assert found[1].spread > found[0].spread == 0


def test_gpu_type_ignores_case_and_blank_means_the_only_one() -> None:
    index = ThroughputIndex(
        [row(8, 1.0), row(8, 1.0, model="two"), row(8, 1.0, model="two", gpu_type="A100")]
    )
    assert index.gpu_type("m", "v100") == "v100"
    assert index.gpu_type("m", "") == "v100"
    assert index.gpu_type("m", "a100") == ""
    assert index.gpu_type("two", "") == ""
    assert index.gpu_types("two") == ("a100", "v100")


def test_node_count_rows_answer_only_where_no_placement_is_known() -> None:
    by_nodes = row(8, 5.0, 8)
    by_nodes = type(by_nodes)(
        type(by_nodes.key)("m", "V100", 8, 2, (), 8), by_nodes.throughput, by_nodes.step_time_s
    )
    index = ThroughputIndex([by_nodes])
    (only,) = index.matches("m", "V100", Settings(), (4, 4))
    assert only.note == "measured by node count only"
    both = ThroughputIndex([by_nodes, row(8, 7.0, 8)])
    first = next(both.matches("m", "V100", Settings(), (4, 4)))
    reading = first.curves[1].read(8)
    assert isinstance(reading, Reading)
    assert reading.throughput == 7.0
    assert list(index.matches("m", "V100", Settings(), (4, 2, 2))) == []


def test_hole_is_what_most_placements_have_and_one_lacks() -> None:
    rows = [row(b, 10.0 * b * g, g) for g in (1, 2, 4) for b in (16, 24, 32) if (g, b) != (4, 24)]
    index = ThroughputIndex(rows)
    curve = next(index.matches("m", "V100", Settings(), (4,))).curves[1]
    assert curve.walls == (24,)
    assert isinstance(curve.read(20), str)


def test_one_run_at_an_odd_batch_is_no_hole_elsewhere() -> None:
    rows = [row(b, 10.0 * b * g, g) for g in (1, 2, 4) for b in (16, 32)] + [row(23, 230.0)]
    curve = next(ThroughputIndex(rows).matches("m", "V100", Settings(), (4,))).curves[1]
    assert curve.walls == ()
    assert isinstance(curve.read(20), Reading)


def test_bounds_come_from_variance_in_a_known_environment_only() -> None:
    here = Settings(environment="e1")

    def width(settings: Settings, variance: float | None, count: int) -> float:
        m = row(8, 100.0, settings=settings, variance=variance, count=count)
        reading = next(ThroughputIndex([m]).matches("m", "V100", settings, (1,))).curves[1].read(8)
        assert isinstance(reading, Reading)
        return reading.high / reading.throughput - 1

    assert width(here, 4.0, 5) == pytest.approx(2 * 2.0 / 100)
    assert width(here, 0.0, 5) == pytest.approx(0.02)
    assert width(here, None, 1) == pytest.approx(UNKNOWN_SPREAD)
    assert width(Settings(), 4.0, 5) == pytest.approx(UNKNOWN_SPREAD)
    assert width(Settings(), 900.0, 5) == pytest.approx(0.6)


def test_costs_most_specific_first() -> None:
    index = ThroughputIndex(
        costs=[
            Cost(CostKind.CHECKPOINT, 30.0),
            Cost(CostKind.COLD_START, 5.0, "m", "V100"),
            Cost(CostKind.COLD_START, 9.0, "m", "V100", 8),
        ]
    )
    assert index.startup_s("m", "v100", 1) == 35.0
    assert index.startup_s("m", "v100", 8) == 39.0
    assert index.startup_s("other", "v100", 8) == 30.0
    assert index.cost_s(CostKind.SWITCH, "m", "v100", 8) is None
    near = ThroughputIndex(
        costs=[Cost(CostKind.SWITCH, s, "m", "", g) for g, s in ((2, 1), (8, 4))]
    )
    assert near.cost_s(CostKind.SWITCH, "m", "v100", 6) == 4


def test_memo_is_bounded() -> None:
    index = ThroughputIndex()
    for i in range(MEMO_SIZE + 1):
        index.remember(i, i)
    assert index.recall(0) is None
    assert index.recall(MEMO_SIZE) == MEMO_SIZE

"""Known average JCTs come out. The ablation varies what the daemon runs, and fails where a shipped
setting is beaten.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from slurm_ext.control.config import Config
from slurm_ext.policy.titan import TitanConfig
from slurm_ext.sim.library import workload_names
from tests.bench import replay_ideal
from tests.bench.replay_ideal import SEEDS, Ablated, ablate, settings, show_ablation

SMALL = "FM-1-roberta-base"


def test_known_averages_come_out_and_another_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--workload", "FM-1-vit-large", "FM-1.5-vit-large"]
    assert replay_ideal.main(small) == 0
    assert capsys.readouterr().out.count("0.375") > 1
    monkeypatch.setitem(replay_ideal.KNOWN_H, ("FM-1-vit-large", "knapsack", True), 0.38)
    assert replay_ideal.main(small) == 1
    assert "DEVIATES" in capsys.readouterr().out


def test_the_first_setting_of_each_group_is_what_the_daemon_runs() -> None:
    for choices in settings().values():
        first, *others = choices
        assert first.shipped
        assert not any(other.shipped for other in others)
        assert first.weights == TitanConfig().weights
        assert first.floor == Config().efficiency_floor
        assert len({(c.weights, c.floor) for c in choices}) == len(choices)


def test_a_replay_of_one_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert SMALL in workload_names()
    found = ablate(["floor"], [SMALL])
    assert [a.setting.label for a in found] == ["floor 0.5", "floor 0", "floor 0.6"]
    # Without hidden errors, and with them: not the same replay twice.
    assert all(a.exact != a.mean for a in found)
    assert len({a.exact for a in found}) > 1
    show_ablation(found)
    told = capsys.readouterr().out
    assert f"{found[0].exact[0]:.3f}" in told
    assert len(SEEDS) == 5


def _made(group: str, factors: tuple[float, ...]) -> list[Ablated]:
    return [
        Ablated(group, setting, name, (1.0, 2.0), (factor * base, 2.0))
        for name, base in (("a", 1.0), ("b", 10.0))
        for setting, factor in zip(settings()[group], factors, strict=True)
    ]


@pytest.mark.parametrize(
    ("group", "factors", "beaten"),
    [
        ("start", (1.0, 1.1, 1.2), False),
        ("start", (1.0, 1.1, 0.9), True),
        ("floor", (1.0, 0.99, 1.0), True),
        ("patience", (1.0, 1.1, 0.9), False),
    ],
)
def test_a_shipped_setting_that_is_beaten_fails(
    group: str, factors: tuple[float, ...], beaten: bool
) -> None:
    assert show_ablation(_made(group, factors)) is beaten


def test_ratios_are_geometric() -> None:
    found = _made("start", (1.0, 2.0, 1.0))
    doubled = [replace(a, mean=(a.mean[0] / 4, 2.0)) if a.workload == "a" else a for a in found]
    ours, other = settings()["start"][:2]
    assert math.isclose(replay_ideal.geometric(doubled, other, ours, 0), 2.0)

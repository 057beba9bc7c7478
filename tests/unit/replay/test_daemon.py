"""The daemon of a replay: the compressed table answers as the starter table does, only faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci.replay.daemon import config, grace_s, lua_config, scaled_csv, tables
from ci.replay.options import Variant
from slurm_ext.control.config import Act, load_config
from slurm_ext.sim.library import starter_truth
from slurm_ext.sim.truth import read_truth


@pytest.mark.parametrize("scale", [1, 10, 60, 240])
@pytest.mark.parametrize("variant", [Variant.ORDER, Variant.FULL])
def test_the_product_accepts_the_configuration(
    tmp_path: Path, variant: Variant, scale: float
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config(variant, scale))
    loaded = load_config(path, environ={})
    assert loaded.may("main", Act.ORDER)
    assert loaded.may("main", Act.RESIZE) is (variant is Variant.FULL)
    assert loaded.grace_s == grace_s(scale)


def test_leases_and_grace_are_scaled_but_never_below_what_slurm_can_tell_apart() -> None:
    assert json.loads(config(Variant.FULL, 1))["lease_s"] == 300
    assert json.loads(config(Variant.FULL, 60))["lease_s"] == 5
    assert (grace_s(1), grace_s(60)) == (5, 3)
    assert "submit_grace_s = 3," in lua_config(60)


def test_scaling_touches_the_named_columns_only() -> None:
    text = "model,throughput,step_time_s,sync_time_s\nvit,10,0.5,\n"
    columns = {"throughput": 1, "step_time_s": -1, "sync_time_s": -1}
    assert scaled_csv(text, columns, 4) == (
        "model,throughput,step_time_s,sync_time_s\nvit,40,0.125,\n"
    )


def test_the_daemons_table_is_the_truth_without_the_hidden_error(tmp_path: Path) -> None:
    made = tables(60)
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    compressed = read_truth(tmp_path / "throughput.csv", tmp_path / "costs.csv")
    checkpoint = next(line for line in made["costs.csv"].splitlines() if "checkpoint" in line)
    assert "0.5" in checkpoint.split(",")
    work = ("vit-large", 192, 66283.0, (4, 4))
    # The constant of 30 s for a checkpoint is a row of the costs for the daemon.
    expected = starter_truth().run_s(*work) / 60
    assert compressed.run_s(*work) - 30 + 0.5 == pytest.approx(expected, rel=1e-6)

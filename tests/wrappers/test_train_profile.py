"""``slurm-ext table profile`` with real programs on this machine: its rows can be imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.estimate.table import read_table
from tests.wrappers.mpi_launcher import ROOT


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'wrappers'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def imported(path: Path, table: Path):
    assert main(["table", "import", str(path), f"--table={table}", "--strict"]) == 0
    return read_table(table)


@pytest.mark.timeout(120)
def test_the_reference_trainer_is_measured_and_its_rows_and_cold_starts_are_imported(
    tmp_path, capsys
):
    out = tmp_path / "rows.csv"
    step_s = 0.05  # what a step takes at least, so that the row can be wrong
    trainer = f"--threads=1 --dim=16 --depth=2 --image=8 --emulate-step-s={step_s}"
    words = ["table", "profile", "--local", "--model=small", "-G1,2", "-b2", "--steps=12"]
    words += ["--warmup=3", f"-O{out}", f"--trainer={trainer}"]
    assert main(words) == 0
    content = imported(out, tmp_path / "table.sqlite")
    assert [row.key.gpus for row in content.measurements] == [1, 2]
    for row in content.measurements:
        assert row.key.placement == (row.key.gpus,)
        assert (row.key.gpu_type, row.key.settings.input_shape) == ("cpu", "8")
        assert row.key.settings.environment.startswith("torch-")
        assert row.step_time_s is not None
        assert row.sync_time_s is not None
        assert step_s <= row.step_time_s < 20 * step_s
        assert row.throughput == pytest.approx(2 * row.key.gpus / row.step_time_s)
        assert 0.0 <= row.sync_time_s <= row.step_time_s - step_s
    costs = imported(tmp_path / "rows-costs.csv", tmp_path / "table.sqlite").costs
    assert [(cost.kind.value, cost.gpus) for cost in costs] == [
        ("cold_start", 1),
        ("cold_start", 2),
    ]
    assert all(0.5 < cost.seconds < 100 for cost in costs)
    said = capsys.readouterr().out
    assert "spent 0.0" in said


@pytest.mark.timeout(120)
def test_a_loop_with_a_session_is_measured_by_its_own_command(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    program = ROOT / "site" / "examples" / "train_plain.py"
    command = f"{sys.executable} {program} --epochs=1000 --local-batch={{local_batch}}"
    words = ["table", "profile", "--local", "--model=plain", "-b4", "--steps=400", "--warmup=20"]
    words += [f"-O{out}", f"--command={command}", "--gpu-type=cpu"]
    assert main(words) == 0, capsys.readouterr().out
    (row,) = imported(out, tmp_path / "table.sqlite").measurements
    assert row.step_time_s is not None
    assert 0.0002 < row.step_time_s < 1.0
    # It would have gone on for 128,000 steps, and was ended when it had said enough.
    assert "failed" not in capsys.readouterr().out

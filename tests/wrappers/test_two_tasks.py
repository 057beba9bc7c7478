"""The example of the switch in a program of its own, and the names that it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slurm_ft.switch

EXAMPLE = Path(__file__).parents[2] / "site" / "examples" / "two_tasks.py"


def states(folder: Path, *argv: str) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of each file that the example writes."""
    command = [sys.executable, str(EXAMPLE), str(folder), *argv]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for path in sorted(folder.glob("task-*.pt")):
        saved = torch.load(path, weights_only=True)
        tensors = dict(saved["model"])
        for index, moments in saved["optimizer"]["state"].items():
            tensors |= {f"{index}.{name}": value for name, value in moments.items()}
        found[path.stem] = tensors
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    base = tmp_path_factory.mktemp("alone")
    return states(base / "one", "--only=1") | states(base / "two", "--only=2")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spare", [0, 100_000])
def test_both_tasks_are_what_they_are_alone(
    tmp_path: Path, alone: dict[str, dict[str, torch.Tensor]], spare: int
) -> None:
    switched = states(tmp_path / "switched", f"--spare-bytes={spare}")
    assert switched.keys() == alone.keys() == {"task-1", "task-2"}
    for name, wanted in alone.items():
        assert switched[name].keys() == wanted.keys()
        assert len(wanted) > 30
        assert [k for k, v in wanted.items() if not torch.equal(v, switched[name][k])] == []
    changed = [k for k, v in alone["task-1"].items() if not torch.equal(v, alone["task-2"][k])]
    assert len(changed) > 30, "the two tasks would not be told apart"


def test_the_public_names_are_there_and_no_others() -> None:
    for name in slurm_ft.switch.__all__:
        assert getattr(slurm_ft.switch, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'plan_stages'"):
        _ = slurm_ft.switch.plan_stages


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, slurm_ft.switch, slurm_ft.switch.chain; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"

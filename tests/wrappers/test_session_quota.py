"""A quota for checkpoints, as FT_CHECKPOINT_QUOTA gives it to a session: real saves of torch's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import slurm_ft
from slurm_ext.domain.errors import ConfigError
from slurm_ft import status, variables
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import examine
from tests.wrappers.ranks import run_ranks, values

KIB = 1 << 10
# The small state of two ranks takes about this with everything beside it, the large one far more.
QUOTA = "256K"
SMALL, LARGE = 4 * KIB, 512 * KIB


def _environment(rank: int, place: Path) -> None:
    os.environ.update(
        {
            variables.JOB: "7",
            variables.STATUS: str(place / f"status-{rank}.json"),
            variables.CHECKPOINT_DIR: str(place / "ck"),
            variables.COLLECTIVE_TIMEOUT_S: "20",
            variables.CHECKPOINT_QUOTA: QUOTA,
        }
    )


def _train(rank: int, root: str, checkpoint: str) -> dict[str, Any]:
    """Grows beyond the quota in step 3 and is small again in step 4."""
    place = Path(root)
    _environment(rank, place)
    state = {"part": torch.zeros(SMALL)}
    saved = []
    raised = []
    errors = []
    with slurm_ft.session(state=state, total_steps=4, checkpoint=checkpoint) as ft:
        for step in range(1, 5):
            state["part"] = torch.full((LARGE if step == 3 else SMALL,), float(step))
            ft.step(step, samples=1)
            try:
                ft.save(step)
                raised.append("")
            except CheckpointError as exc:
                raised.append(str(exc))
            saved.append(ft.last_saved_step)
            said = status.read(place / f"status-{rank}.json")
            errors.append(said.save_error if said is not None else "no status")
    return {
        "saved": saved,
        "raised": raised,
        "errors": errors,
        "steps": [c.step for c in examine(place / "ck").complete],
    }


@pytest.mark.parametrize("checkpoint", ["sync", "async"])
def test_a_save_beyond_the_quota_fails_and_the_job_goes_on(tmp_path: Path, checkpoint: str) -> None:
    for told in values(run_ranks(2, _train, str(tmp_path), checkpoint)):
        assert told["saved"] == [1, 2, 2, 4], told
        assert [bool(error) for error in told["errors"]] == [False, False, True, False], told
        assert [bool(error) for error in told["raised"]] == [False, False, True, False], told
        assert "its quota of 262144 bytes lacks" in told["errors"][2]
        assert told["steps"] == [4, 2], told
    used = sum(path.stat().st_size for path in (tmp_path / "ck").rglob("*") if path.is_file())
    assert 0 < used <= 256 * KIB


def test_a_quota_that_is_none_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.CHECKPOINT_QUOTA, "plenty")
    monkeypatch.setenv(variables.CHECKPOINT_DIR, str(tmp_path / "ck"))
    with (
        pytest.raises(ConfigError, match=r"FT_CHECKPOINT_QUOTA.*plenty"),
        slurm_ft.session(state={"part": torch.zeros(1)}),
    ):
        raise AssertionError("it must not open")

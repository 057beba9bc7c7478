"""The pause of an MPI job: ranks agree over their own communicator, no torch anywhere."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from slurm_ft.pause.client import NetStore
from slurm_ft.pause.table import StoreLostError
from tests.wrappers.mpi_launcher import MpiLauncher
from tests.wrappers.pause_ranks import address, at_step, ended, paused, served, until, wait_outcome

_COLLECTIVE_S = 4.0
_PROGRAM = """
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1])
os.environ.update(
    FT_JOB_ID="7", FT_STATE_DIR=str(place), FT_CHECKPOINT_DIR=str(place / "ck"),
    FT_COLLECTIVE_TIMEOUT_S="4", FT_PAUSE_MOVE_S="5",
)
from mpi4py import MPI
import slurm_ft

world = MPI.COMM_WORLD
total = 0
def save(directory, step):
    (directory / f"rank-{world.rank}").write_text(str(total))
with slurm_ft.session(save=save, restore=lambda directory, step: None, total_steps=150) as ft:
    step = ft.restore()
    while step < 150:
        time.sleep(0.02)
        total = world.allreduce(total % 1000 + world.rank + step)
        step += 1
        ft.step(step)
        (place / f"step-{world.rank}").write_text(str(step))
(place / f"sum-{world.rank}").write_text(str(total))
assert "torch" not in sys.modules
"""


def _expected(ranks: int) -> int:
    totals = [0] * ranks
    for step in range(150):
        totals = [sum(total % 1000 + rank + step for rank, total in enumerate(totals))] * ranks
    return totals[0]


def test_mpi_ranks_are_paused_for_longer_than_the_timeout(mpi: MpiLauncher, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    rows: list[dict[str, Any]] = []
    done: list[subprocess.CompletedProcess[str]] = []
    with served(tmp_path, _COLLECTIVE_S):
        job = threading.Thread(
            target=lambda: done.append(mpi.run(3, _PROGRAM, str(tmp_path), limit_s=60))
        )
        job.start()
        store = NetStore(address(tmp_path))
        until(lambda: at_step(tmp_path, 0) >= 5, 30.0, "step 5")
        store.pause("nothing", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
        assert wait_outcome(store, "a", paused, 10.0)["stage"] == "held"
        before = [at_step(tmp_path, rank) for rank in range(3)]
        assert len(set(before)) == 1
        time.sleep(_COLLECTIVE_S * 1.5)
        assert [at_step(tmp_path, rank) for rank in range(3)] == before
        store.resume("enough")
        try:
            rows.append(wait_outcome(store, "a", ended, 10.0))
        except StoreLostError as exc:
            raise AssertionError(str(exc)) from exc
        job.join(60.0)
    assert done
    assert done[0].returncode == 0, done[0].stderr
    assert rows[0]["end"] == "resumed"
    sums = {json.loads((tmp_path / f"sum-{rank}").read_text()) for rank in range(3)}
    assert sums == {_expected(3)}

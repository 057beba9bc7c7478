"""ft-run in front of the real torchrun: its agent must not come between a signal and a save."""

from __future__ import annotations

import os
import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from slurm_ext.domain.attempt import Cause, parse_attempts
from tests.wrappers.launched import PROGRAM, Slurm, await_true, ready

BIN = str(Path(sys.executable).parent)
# What torchrun's agent leaves its ranks after TERM where nobody says otherwise.
AGENT_S = 30.0


def leave(tmp_path: Path, number: int, *options: str, save_s: float = 0.2) -> tuple[Slurm, str]:
    """Two ranks under torchrun get a signal through ft-run; returns what they printed."""
    end = datetime.now() + timedelta(seconds=100)
    slurm = Slurm(tmp_path, PATH=f"{tmp_path}/bin:{BIN}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    slurm.record(end=end.strftime("%Y-%m-%dT%H:%M:%S"))
    process = slurm.start(
        "--",
        "torchrun",
        "--standalone",
        "--nproc-per-node=2",
        *options,
        str(PROGRAM),
        f"--ready={tmp_path}/ready{{rank}}-{{start}}",
        f"--save={save_s}",
    )
    try:
        for rank in (0, 1):
            ready(tmp_path / f"ready{rank}-0")
        process.send_signal(number)
        out, _ = process.communicate(timeout=save_s + 45)
    finally:
        process.kill()
    return slurm, out


def check(slurm: Slurm, out: str, number: int) -> None:
    # A rank may hear it twice: from Slurm and from the agent.
    assert out.count(f"heard {number:d}") >= 2
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    path = slurm.state / "attempts-77.json"
    last = parse_attempts(path.read_text(), str(path)).attempts[-1]
    assert (last.cause, last.saved_step, last.requeued) == (Cause.TIME_LIMIT, 10, True)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_both_ranks_save_and_the_job_comes_back(tmp_path: Path, number: int):
    """The agent would die of USR2, and on TERM begin to count its own seconds."""
    check(*leave(tmp_path, number), number)


def test_ranks_that_have_left_are_not_started_again_for_long(tmp_path: Path):
    slurm, out = leave(tmp_path, signal.SIGUSR2, "--max-restarts=3")
    check(slurm, out, signal.SIGUSR2)
    assert not (tmp_path / "ready0-2").exists()


@pytest.mark.full
@pytest.mark.timeout(180)
def test_sig_30s_a_save_longer_than_the_agent_s_patience(tmp_path: Path):
    """sig-30s: a save of 40 s within a grace of minutes; TERM comes to the agent as well."""
    slurm = Slurm(tmp_path, PATH=f"{tmp_path}/bin:{BIN}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    end = datetime.now() + timedelta(seconds=100)
    slurm.record(end=end.strftime("%Y-%m-%dT%H:%M:%S"))
    process = slurm.start(
        "--grace=120",
        "--",
        "torchrun",
        "--standalone",
        "--nproc-per-node=2",
        str(PROGRAM),
        f"--ready={tmp_path}/ready{{rank}}-{{start}}",
        f"--save={AGENT_S + 10}",
    )
    try:
        for rank in (0, 1):
            ready(tmp_path / f"ready{rank}-0")
        # As Slurm does it: everything in the step is signalled, the agent too.
        agent = _agent(process.pid)
        os.kill(agent, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=AGENT_S + 60)
    finally:
        process.kill()
    assert out.count("heard") == 2
    assert slurm.calls("requeue") == ["scontrol requeue 77"]


def _agent(ft_run: int) -> int:
    """Process id of torchrun below ft-run."""
    found: list[int] = []

    def look() -> bool:
        children = Path(f"/proc/{ft_run}/task/{ft_run}/children").read_text().split()
        found[:] = [
            int(pid) for pid in children if b"torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return bool(found)

    await_true(look, "agent")
    return found[0]

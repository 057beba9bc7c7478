"""cuda-checkpoint as a part: a made-up command that keeps the state of one process in a file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_ft.pause.cuda import CudaCheckpoint
from slurm_ft.pause.ladder import LostStateError, PartError

_COMMAND = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >> calls
case "$*" in
    --help) echo "--action lock|checkpoint|restore|unlock" ;;
    --get-state*) cat state ;;
    --action=*)
        action=${1#--action=}
        if [ -e "fail-$action" ]; then echo "OS call failed" >&2; exit 1; fi
        if [ -e "hang-$action" ]; then exec sleep 30; fi
        case "$(cat state)-$action" in
            running-lock) echo locked > state ;;
            locked-checkpoint) echo checkpointed > state ;;
            checkpointed-restore) echo locked > state ;;
            locked-unlock) echo running > state ;;
            *) echo "not from $(cat state)" >&2; exit 1 ;;
        esac ;;
esac
"""
ASKED = {"FT_PAUSE_CUDA": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cuda-checkpoint"
    path.write_text(_COMMAND)
    path.chmod(0o755)
    (tmp_path / "state").write_text("running\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def state(driver: Path) -> str:
    return (driver / "state").read_text().strip()


def test_there_and_back(driver: Path) -> None:
    part = CudaCheckpoint(ASKED, pid=42)
    assert part.missing() == ""
    part.release(time.monotonic() + 10)
    assert state(driver) == "checkpointed"
    part.restore(time.monotonic() + 10)
    assert state(driver) == "running"
    assert "--action=lock --pid=42" in (driver / "calls").read_text()


@pytest.mark.parametrize("failing", ["lock", "checkpoint"])
def test_any_failure_leaves_the_process_running(driver: Path, failing: str) -> None:
    (driver / f"fail-{failing}").touch()
    with pytest.raises(PartError, match="OS call failed"):
        CudaCheckpoint(ASKED, pid=42).release(time.monotonic() + 10)
    assert state(driver) == "running"


def test_a_lock_that_hangs_ends_at_its_limit(driver: Path) -> None:
    """pause-lock-peers: a peer's lock may block every action for ever."""
    (driver / "hang-lock").touch()
    began_s = time.monotonic()
    with pytest.raises(PartError, match="timed out"):
        CudaCheckpoint(ASKED, pid=42).release(time.monotonic() + 0.4)
    assert time.monotonic() - began_s < 10
    assert state(driver) == "running"


def test_a_failed_restore_is_told(driver: Path) -> None:
    """pause-restore-fails."""
    part = CudaCheckpoint(ASKED, pid=42)
    part.release(time.monotonic() + 10)
    (driver / "fail-restore").touch()
    with pytest.raises(PartError, match="OS call failed"):
        part.restore(time.monotonic() + 10)


def test_a_process_that_cannot_be_unlocked_is_told(driver: Path) -> None:
    (driver / "fail-checkpoint").touch()
    (driver / "fail-unlock").touch()
    with pytest.raises(LostStateError, match="cannot be undone"):
        CudaCheckpoint(ASKED, pid=42).release(time.monotonic() + 10)
    assert state(driver) == "locked"


def test_when_it_is_left_out(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pause-nvls, not asked for, an old release, not installed."""
    assert "not asked for" in CudaCheckpoint({}).missing()
    assert "NVLS" in CudaCheckpoint({"FT_PAUSE_CUDA": "1"}).missing()
    command = driver / "cuda-checkpoint"
    command.write_text("#!/bin/sh\necho --toggle\n")
    assert "--action" in CudaCheckpoint(ASKED).missing()
    command.unlink()
    assert "cannot be run" in CudaCheckpoint(ASKED).missing()

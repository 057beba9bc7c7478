"""Which signals mean what, and who has them already."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slurm_ft.launch import signals
from slurm_ft.launch.errors import UsageError


def test_names():
    assert signals.parse_signals("USR2,TERM") == (signal.SIGUSR2, signal.SIGTERM)
    assert signals.parse_signals("sigusr2, usr2") == (signal.SIGUSR2,)


@pytest.mark.parametrize("text", ["KILL", "STOP", "CHLD", "SEGV", "12", "", "USR2,", "CONT"])
def test_what_cannot_mean_save_and_come_back(text: str):
    with pytest.raises(UsageError, match="--signals="):
        signals.parse_signals(text)


def test_sig_usr1_nccl():
    assert "NCCL" in signals.usr1_warning((signal.SIGUSR1,))
    assert signals.usr1_warning((signal.SIGUSR2, signal.SIGTERM)) == ""


def test_slurm_is_known_by_its_daemon(tmp_path: Path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "comm").write_text("slurmstepd\n")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "comm").write_text("bash\n")
    assert signals.sent_by_slurm(7, str(tmp_path))
    assert not signals.sent_by_slurm(8, str(tmp_path))
    assert not signals.sent_by_slurm(9, str(tmp_path))
    # Outside our pid namespace, where slurmstepd is for a step in a container.
    assert signals.sent_by_slurm(0, str(tmp_path))
    assert not signals.sent_by_slurm(os.getpid())


@pytest.mark.parametrize(
    ("text", "pgid"),
    [
        ("ProctrackType=proctrack/pgid\n", True),
        ("  proctracktype = proctrack/pgid # old\n", True),
        ("ProctrackType=proctrack/cgroup\n", False),
        ("#ProctrackType=proctrack/pgid\n", False),
        ("ClusterName=lab\n", False),
    ],
)
def test_sites_that_signal_one_group_only(tmp_path: Path, text: str, pgid: bool):
    path = tmp_path / "slurm.conf"
    path.write_text(text)
    assert signals.signals_one_group_only({"SLURM_CONF": str(path)}) is pgid


def test_settings_of_slurm_conf(tmp_path: Path):
    path = tmp_path / "slurm.conf"
    path.write_text("KillWait=5\nJobFileAppend = 1\n")
    env = {"SLURM_CONF": str(path)}
    assert signals.slurm_setting(env, "killwait") == "5"
    assert signals.slurm_setting(env, "JobFileAppend") == "1"
    assert signals.slurm_setting(env, "Missing") == ""

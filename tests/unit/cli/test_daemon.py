"""``slurm-ext daemon`` as a process, with fake Slurm commands that say that slurmctld is away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slurm_ext.control.locks import FileLock, life_lock


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A configuration whose daemon finds no slurmctld."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("squeue", "scontrol", "sprio", "sinfo", "sacctmgr", "sdiag"):
        script = commands / name
        script.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        script.chmod(0o755)
    (tmp_path / "run").mkdir()
    keys = {
        "cycle_s": 0.2,
        "journal": str(tmp_path / "var" / "journal.sqlite"),
        "spool": str(tmp_path / "spool"),
        "table": str(tmp_path / "table.sqlite"),
        "heartbeat": str(tmp_path / "run" / "beat"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    return tmp_path


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slurm_ext", *words, "--config", str(place / "config.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
    )


def test_one_cycle_without_slurm_fails_and_says_so(place):
    out, err = start(place, "daemon", "--once").communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert any("skipped" in line["message"] for line in lines), err
    assert "Unable to contact slurm controller" in out


def test_the_exit_code_of_one_cycle_without_slurm(place):
    process = start(place, "daemon", "--once")
    process.communicate(timeout=60)
    assert process.returncode == 1


def test_it_survives_slurm_being_away_and_stops_when_told(place):
    process = start(place, "daemon")
    assert process.stdout is not None
    skipped = 0
    deadline = time.monotonic() + 60
    while skipped < 3 and time.monotonic() < deadline:
        skipped += "skipped" in process.stdout.readline()
    assert skipped == 3
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped" in out
    assert err == ""
    assert not (place / "run" / "beat").exists()


def test_a_second_daemon_is_refused(place):
    lock = FileLock(life_lock(place / "var" / "journal.sqlite"))
    assert lock.acquire()
    process = start(place, "daemon", "--once")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "another daemon runs with this journal" in err
    lock.release()


@pytest.mark.parametrize("words", [["--once"], ["--once", "--observe"]])
def test_a_second_daemon_with_a_journal_of_its_own_is_kept_from_the_spool(place, words):
    first = start(place, "daemon")
    assert first.stdout is not None
    try:
        assert first.stdout.readline()  # it speaks of its journal, so it holds both
        second = start(place, "daemon", *words, "--set", f"journal={place / 'other.sqlite'}")
        _, err = second.communicate(timeout=60)
        assert second.returncode == 1
        (line,) = err.splitlines()
        assert "another daemon plans in this spool" in line
        assert f"{place / 'spool'}" in line
        assert "--set spool=DIR" in line
        assert not (place / "other.sqlite").exists()
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60)
    # The kernel drops the lock with the process.
    start(place, "daemon", "--once", "--set", f"journal={place / 'other.sqlite'}").communicate(
        timeout=60
    )
    assert (place / "other.sqlite").exists()


def test_a_release_that_cannot_see_slurm_fails_so_that_it_is_tried_again(place):
    process = start(place, "release")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "could not be read" in err


def test_the_timer_without_anything_of_ours_is_content(place):
    start(place, "daemon", "--once").communicate(timeout=60)  # makes an empty journal
    process = start(place, "release", "--if-stale")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "nothing of ours is out" in out


def test_resuming_without_a_release_says_so(place):
    out, _ = start(place, "release", "--resume").communicate(timeout=60)
    assert "nothing was released" in out

"""Heartbeat, notifications and metrics: how others see that the daemon lives."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import generate_latest

from slurm_ext.control.heartbeat import beat, is_stale, last_beat
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.notify import Notifier
from slurm_ext.domain.errors import ConfigError, DataError


def test_a_beat_is_fresh_for_one_lease(tmp_path):
    path = tmp_path / "beat"
    assert is_stale(path, 0.0)
    beat(path, 1000.0, 300.0, 4)
    found = last_beat(path)
    assert found is not None
    assert (found.at_s, found.lease_s, found.cycle) == (1000.0, 300.0, 4)
    assert not is_stale(path, 1300.0)
    assert is_stale(path, 1300.1)
    assert is_stale(path, 600.0)  # the clock was set back by more than a lease


@pytest.mark.parametrize("text", ["", "x", "{}", "[]", '{"at_s": null}', "\xff"])
def test_an_unreadable_beat_is_stale(tmp_path, text):
    path = tmp_path / "beat"
    path.write_text(text, encoding="latin-1")
    assert last_beat(path) is None
    assert is_stale(path, 0.0)


def test_a_beat_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="install -d"):
        beat(tmp_path / "file" / "beat", 1.0, 1.0, 1)


def test_the_directory_of_the_beat_is_made(tmp_path):
    beat(tmp_path / "run" / "slurm-ext" / "beat", 1.0, 1.0, 1)
    assert last_beat(tmp_path / "run" / "slurm-ext" / "beat") is not None


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_what_we_say(tmp_path, abstract):
    name = f"slurm-ext-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0" + name if abstract else name)
        server.settimeout(5)
        address = f"@{name}" if abstract else name
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2500000"})
        assert notifier.watchdog_s == 2.5
        notifier.ready("observing")
        assert server.recv(200) == b"READY=1\nSTATUS=observing"
        notifier.watchdog("cycle 3")
        assert server.recv(200) == b"WATCHDOG=1\nSTATUS=cycle 3"
        notifier.reloading()
        assert server.recv(200).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        notifier.stopping()
        assert server.recv(200) == b"STOPPING=1"


def test_without_systemd_nothing_is_said(tmp_path):
    Notifier({}).ready("x")
    gone = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_PID": "1"})
    gone.ready("x")
    assert gone.watchdog_s is None


def test_metrics_are_served_and_a_taken_port_is_a_config_error():
    metrics = Metrics()
    metrics.skipped.labels("squeue").inc()
    text = generate_latest(metrics.registry).decode()
    assert 'slurm_ext_skipped_cycles_total{reason="squeue"} 1.0' in text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="choose a free port"):
            metrics.serve(f"127.0.0.1:{taken.getsockname()[1]}")

"""The loop: what it survives, what ends it, what systemd hears."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
import threading

import pytest

from slurm_ext.control.config import Config
from slurm_ext.control.cycle import Report
from slurm_ext.control.locks import FileLock, daemon_lives, life_lock
from slurm_ext.control.logs import JsonFormatter, setup_logging
from slurm_ext.control.loop import Loop
from slurm_ext.control.metrics import Metrics
from slurm_ext.control.notify import Notifier
from slurm_ext.domain.errors import ConfigError, DataError


class Heard(Notifier):
    """Keeps what would be sent."""

    def __init__(self) -> None:
        super().__init__({})
        self.lines: list[str] = []

    def send(self, *lines: str) -> None:
        self.lines.append(lines[0])


class StubEngine:
    """Plays a list of outcomes, then tells the process to stop."""

    def __init__(self, outcomes: list[object], config: Config) -> None:
        self.outcomes = outcomes
        self.config = config
        self.metrics = Metrics()
        self.ran = 0
        self.reconfigured: list[Config] = []

    def cycle(self) -> Report:
        outcome = self.outcomes[min(self.ran, len(self.outcomes) - 1)]
        self.ran += 1
        if callable(outcome):
            outcome = outcome()
        if self.ran >= len(self.outcomes):
            os.kill(os.getpid(), signal.SIGTERM)
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, Report)
        return outcome

    def reconfigure(self, config: Config) -> None:
        self.config = config
        self.reconfigured.append(config)


FAST = Config(cycle_s=0.2)
FINE = Report(1)
SKIPPED = Report(1, skipped="squeue could not be read")


def run(outcomes: list[object], reload=lambda: FAST) -> tuple[StubEngine, Heard]:
    engine, heard = StubEngine(outcomes, FAST), Heard()
    asyncio.run(asyncio.wait_for(Loop(engine, heard, reload).run(), 30))
    return engine, heard


def test_ready_comes_with_the_first_cycle_that_did_not_fail_and_stopping_last():
    engine, heard = run([ValueError("a bug"), SKIPPED, FINE])
    assert engine.ran == 3
    assert heard.lines == ["WATCHDOG=1", "READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


def test_a_cycle_that_fails_is_logged_counted_and_survived(caplog):
    engine, _ = run([ValueError("a bug"), FINE])
    assert engine.ran == 2
    assert "a bug" in caplog.text
    assert engine.metrics.errors._value.get() == 1.0


def test_a_hangup_reads_the_configuration_between_cycles():
    new = Config(cycle_s=0.3)

    def hang_up() -> Report:
        os.kill(os.getpid(), signal.SIGHUP)
        return FINE

    engine, heard = run([hang_up, FINE, FINE], reload=lambda: new)
    assert engine.reconfigured == [new]
    assert "RELOADING=1" in heard.lines


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("config.yaml: cycle", "unknown key", "did you mean cycle_s?"),
        ValueError("a bug that says: did you mean cycle_s?"),
    ],
    ids=["told", "unforeseen"],
)
def test_a_bad_configuration_leaves_the_old_one_in_force(caplog, error):
    def bad() -> Config:
        raise error

    def hang_up() -> Report:
        os.kill(os.getpid(), signal.SIGHUP)
        return FINE

    engine, _ = run([hang_up, FINE, FINE], reload=bad)
    assert engine.config == FAST
    assert engine.ran == 3
    assert "did you mean cycle_s?" in caplog.text


def test_metrics_that_cannot_be_served_leave_the_old_configuration_in_force(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        new = Config(cycle_s=0.3, metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}")

        def hang_up() -> Report:
            os.kill(os.getpid(), signal.SIGHUP)
            return FINE

        engine, _ = run([hang_up, FINE, FINE], reload=lambda: new)
    assert engine.config == FAST
    assert "choose a free port" in caplog.text


def test_stopping_waits_for_the_cycle_in_progress():
    finished = threading.Event()

    def slow() -> Report:
        os.kill(os.getpid(), signal.SIGTERM)
        # Long enough for the signal to be handled while the cycle is still running.
        threading.Event().wait(0.3)
        finished.set()
        return FINE

    engine, _ = run([slow, FINE, FINE])
    assert finished.is_set()
    assert engine.ran == 1


def test_one_daemon_at_a_time(tmp_path):
    journal = tmp_path / "j.sqlite"
    first, second = FileLock(life_lock(journal)), FileLock(life_lock(journal))
    assert not daemon_lives(journal)
    assert first.acquire()
    assert first.acquire()
    assert daemon_lives(journal)
    assert not second.acquire(0.05)
    with pytest.raises(DataError, match="another daemon"), second.held(0.0, "another daemon"):
        raise AssertionError("never reached")
    first.release()
    with second.held(1.0, "nobody"):
        assert daemon_lives(journal)
    assert not daemon_lives(journal)


def test_a_lock_in_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="daemon's user"):
        FileLock(tmp_path / "file" / "lock").acquire()


def test_log_lines_are_json_with_their_data():
    stream = io.StringIO()
    logger = logging.getLogger("slurm_ext")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        setup_logging("info", stream)
        setup_logging("info", stream)  # a reload does not double the lines
        log = logging.getLogger("slurm_ext.control.x")
        log.debug("unseen")
        log.info("decision", extra={"data": {"job": "7", "action": "start"}})
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("failed")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["job"] == "7"
    assert first["action"] == "start"
    assert first["from"] == "control.x"
    assert first["level"] == "info"
    assert "boom" in second["traceback"]
    assert isinstance(logger.handlers, list)
    assert JsonFormatter().format(logging.LogRecord("n", 20, "", 1, "m", (), None))

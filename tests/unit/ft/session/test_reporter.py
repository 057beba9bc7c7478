"""Progress: written aside, at most so often, and never in the way."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.domain.progress import MAX_BYTES, MAX_RANKS, Progress, parse_progress
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.session.pace import Pace
from slurm_ft.session.record import Record, own_path
from slurm_ft.session.reporter import Reporter, progress_text, rounded
from slurm_ft.session.saving import ASYNC, Saving
from slurm_ft.session.settings import Settings

BASE = Progress(
    job_id="7", attempt=0, at_s=1.0, step=1, samples=8, samples_per_s=2.0, gpus=1, save_s=0.5
)


def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


class Steps:
    """Progress that counts how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Progress:
        self.asked += 1
        return replace(BASE, step=self.asked)


def test_news_do_not_wait_until_it_is_time(tmp_path: Path) -> None:
    steps = Steps()
    reporter = Reporter(tmp_path / "progress-7.json", 60.0, steps, lambda: None)
    reporter.start()
    reporter.ready()
    until(lambda: steps.asked == 1)
    reporter.soon()
    until(lambda: steps.asked == 2)
    reporter.stop(5.0)
    assert steps.asked == 3


def test_a_report_is_read_by_the_daemons_own_parser(tmp_path: Path) -> None:
    path, steps = tmp_path / "progress-7.json", Steps()
    reporter = Reporter(path, 60.0, steps, lambda: None)
    reporter.start()
    assert not path.exists()
    reporter.ready()
    until(path.exists)
    assert parse_progress(path.read_text(), "x") == replace(BASE, step=1)
    assert path.stat().st_mode & 0o777 == 0o644
    reporter.stop(5.0)
    assert parse_progress(path.read_text(), "x").step == 2
    assert steps.asked == 2
    assert os.listdir(tmp_path) == ["progress-7.json"]


def test_reports_come_in_their_interval(tmp_path: Path) -> None:
    steps, also = Steps(), []
    reporter = Reporter(tmp_path / "p", 0.02, steps, lambda: also.append(1))
    reporter.start()
    reporter.ready()
    until(lambda: steps.asked >= 4)
    reporter.stop(5.0)
    assert len(also) == steps.asked


def test_a_spool_that_cannot_be_written_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = tmp_path / "spool"
    path, steps = spool / "progress-7.json", Steps()
    reporter = Reporter(path, 0.01, steps, lambda: None)
    with caplog.at_level(logging.WARNING):
        reporter.start()
        reporter.ready()
        until(lambda: steps.asked >= 5)
        spool.mkdir()
        until(path.exists)
        reporter.stop(5.0)
    assert caplog.text.count("cannot be written") == 1
    assert str(path) in caplog.text


def test_a_full_disk_is_no_reason_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    steps = Steps()
    # Its directory takes no temporary file from an ordinary user; root gets a file in /dev, so a
    # name that cannot be made is used for both.
    reporter = Reporter(full / "progress-7.json", 0.01, steps, lambda: None)
    reporter.start()
    reporter.ready()
    until(lambda: steps.asked >= 3)
    reporter.stop(5.0)
    assert "the job goes on" in caplog.text


def test_a_file_system_that_hangs_does_not_hold_up_the_end() -> None:
    released = threading.Event()
    reporter = Reporter(None, 60.0, lambda: None, lambda: released.wait(20.0))
    reporter.start()
    began = time.monotonic()
    reporter.stop(0.1)
    assert time.monotonic() - began < 2.0
    released.set()


def test_seconds_of_very_many_ranks_are_left_out_before_the_file_is_too_long() -> None:
    few = progress_text(replace(BASE, rank_compute_s=(rounded(0.123456),) * 1000))
    assert len(parse_progress(few, "x").rank_compute_s) == 1000
    many = progress_text(replace(BASE, rank_compute_s=(rounded(0.123456),) * MAX_RANKS))
    assert len(many) < MAX_BYTES
    assert parse_progress(many, "x").rank_compute_s == ()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.123456, 0.1235), (123.456, 123.5), (0.0, 0.0), (1e-9, 1e-9)]
)
def test_digits(seconds: float, shown: float) -> None:
    assert rounded(seconds) == shown


def test_a_record_tells_nothing_before_the_first_step() -> None:
    record = Record(Settings(job_id="9", gpus=4), SoloComm(), total_steps=100)
    assert record.progress() is None
    record.saving, record.pace = Saving(None, ASYNC), Pace(0.0)
    record.pace.step(2.0, 8, None)
    record.step, record.samples, record.first_step_s = 3, 24, 1e9
    progress = record.progress()
    assert progress is not None
    told = json.loads(progress.to_json())
    assert (told["job_id"], told["gpus"], told["step"], told["samples"]) == ("9", 4, 3, 24)
    assert (told["total_steps"], told["samples_per_s"]) == (100, 4.0)
    assert record.status().step == 3


def test_tasks_of_one_job_are_one_row_of_steps() -> None:
    """A task that was finished is progress that was saved, before the next one has saved any."""
    record = Record(Settings(job_id="9"), SoloComm())
    record.saving, record.pace = Saving(None, ASYNC), Pace(0.0)
    record.begin(0, 30, before=10)
    record.began_at(4)
    status = record.status()
    assert (status.step, status.restored_step, status.saved_step) == (14, 14, None)
    record.saving.saved_step = 8
    assert record.status().saved_step == 18
    record.saving.saved_step = None
    record.begin(0, 30, before=20)
    record.step, record.first_step_s = 3, 1e9
    status, progress = record.status(), record.progress()
    assert (status.step, status.restored_step, status.saved_step) == (23, 14, 20)
    assert progress is not None
    assert (progress.step, progress.total_steps, progress.last_checkpoint_step) == (23, 30, 20)
    # A task that starts cold restores in the same attempt: what that began with stays.
    record.began_at(2)
    assert record.status().restored_step == 14


def test_ranks_below_one_torchrun_have_files_of_their_own() -> None:
    path = Path("/s/status-0.json")
    agent = {"TORCHELASTIC_RUN_ID": "x"}
    assert own_path(path, {}) == path
    assert own_path(path, {"LOCAL_RANK": "2"}) == path  # its own ft-run
    assert own_path(path, {**agent, "LOCAL_RANK": "0"}) == path
    assert own_path(path, {**agent, "LOCAL_RANK": "2"}) == Path("/s/status-0.json.2")
    assert own_path(None, {**agent, "LOCAL_RANK": "2"}) is None

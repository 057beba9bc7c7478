"""A session of one process with the user's own files: everything but other ranks, without torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import slurm_ft
from slurm_ext.domain.attempt import Attempt, Attempts
from slurm_ext.domain.progress import parse_progress
from slurm_ft import exits, status, variables
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.session.agreement import Kind
from slurm_ft.session.errors import SessionError
from slurm_ft.session.session import Session

# Long enough that the ranks agree at every step.
STEP_S = 0.027


class Program:
    """State in one file, as a program that cannot use torch would keep it."""

    def __init__(self) -> None:
        self.value = 0
        self.saves: list[int] = []

    def save(self, directory: Path, step: int) -> None:
        self.saves.append(step)
        (directory / "state.json").write_text(json.dumps(self.value))

    def restore(self, directory: Path, step: int) -> None:
        self.value = json.loads((directory / "state.json").read_text())
        assert self.value == step

    def session(self, **more: Any) -> Session:
        return slurm_ft.session(save=self.save, restore=self.restore, **more)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("FT_", "SLURM_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variables.CHECKPOINT_DIR, str(tmp_path / "ck"))
    monkeypatch.setenv(variables.JOB, "7")
    monkeypatch.setenv(variables.STATUS, str(tmp_path / "status-0.json"))
    monkeypatch.setenv(variables.PROGRESS, str(tmp_path / "progress-7.json"))


def train(program: Program, ft: Session, upto: int, signal_at: int = 0, number: int = 0) -> None:
    step = ft.restore()
    while step < upto:
        program.value += 1
        step += 1
        if step == signal_at:
            signal.raise_signal(number)
        time.sleep(STEP_S)
        ft.step(step, samples=4, position={"index": step * 4}, compute_s=0.001)


def told(tmp_path: Path) -> status.Status:
    found = status.read(tmp_path / "status-0.json")
    assert found is not None
    return found


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_saves_and_asks_for_requeue_then_the_next_attempt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """sig-term-only and sig-handler-work: TERM alone is enough, and the save is at a safe point."""
    program = Program()
    with pytest.raises(SystemExit) as left, program.session(total_steps=50) as ft:
        train(program, ft, 50, signal_at=10, number=number)
    assert left.value.code == exits.REQUEUE
    assert program.saves == [11]
    end = told(tmp_path)
    assert (end.leaving, end.heard) == (status.SIGNALLED, signal.Signals(number).name)
    assert (end.saved_step, end.step, end.restored_step, end.pid) == (11, 11, 0, os.getpid())
    assert not end.done
    restore_handlers(ft)

    monkeypatch.setenv(variables.ATTEMPT, "1")
    again = Program()
    with again.session(total_steps=50) as ft:
        assert ft.restore() == 11
        assert again.value == 11
        assert ft.position == {"index": 44}
        train(again, ft, 30)
        assert ft.attempt == 1
    assert again.value == 30
    end = told(tmp_path)
    assert (end.leaving, end.restored_step, end.step, end.done) == (None, 11, 30, True)
    report = parse_progress((tmp_path / "progress-7.json").read_text(), "x")
    assert (report.step, report.samples, report.restored_step) == (30, 120, 11)
    assert (report.attempt, report.total_steps) == (1, 50)


def restore_handlers(ft: Session) -> None:
    """A session that left keeps its handlers to the end of the process, which a test outlives."""
    ft._watch.restore()
    ft._guard.stop()
    ft._watch.close()


def test_a_session_that_left_does_not_step_again(tmp_path: Path) -> None:
    program = Program()
    with program.session() as ft:
        ft.ask_to_leave("test")
        ft.step(1)
        with pytest.raises(SystemExit) as left:
            ft.step(2)
        with pytest.raises(SystemExit) as again:
            ft.step(3)
    assert left.value.code == again.value.code == exits.REQUEUE
    assert program.saves == [2]
    assert told(tmp_path).leaving == status.ASKED
    restore_handlers(ft)


def test_checkpoints_come_in_their_interval_and_handlers_are_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.CHECKPOINT_INTERVAL, "0.05")
    before = signal.getsignal(signal.SIGTERM)
    program = Program()
    with program.session(checkpoint="sync") as ft:
        assert signal.getsignal(signal.SIGTERM) is not before
        step = ft.restore()
        end = time.monotonic() + 5.0
        while len(program.saves) < 3 and time.monotonic() < end:
            step += 1
            program.value = step
            time.sleep(0.005)
            ft.step(step)
        assert ft.last_saved_step == program.saves[-1]
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(program.saves) == 3
    assert told(tmp_path).stall_s > 0


def test_a_save_that_fails_leaves_the_job_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variables.CHECKPOINT_INTERVAL, "0.01")
    program = Program()

    def fail(directory: Path, step: int) -> None:
        program.saves.append(step)
        raise OSError(28, "No space left on device", str(directory / "state.json"))

    with slurm_ft.session(save=fail, restore=program.restore) as ft:
        for step in range(1, 30):
            time.sleep(0.005)
            ft.step(step)
        assert ft.last_saved_step is None
        with pytest.raises(CheckpointError, match="No space left"):
            ft.save()
    assert len(program.saves) >= 3
    assert "training goes on" in caplog.text
    end = told(tmp_path)
    assert (end.step, end.saved_step, end.done) == (29, None, True)


def test_an_explicit_save_is_durable_at_once(tmp_path: Path) -> None:
    program = Program()
    with program.session() as ft:
        with pytest.raises(SessionError, match="save\\(0\\)"):
            ft.save()
        train(program, ft, 3)
        assert ft.save().step == 3
        assert (tmp_path / "ck" / "step-000000000003" / "state.json").read_text() == "3"
        assert ft.last_saved_step == 3
    assert program.saves == [3]


@pytest.mark.parametrize(("grace", "saves"), [("0.001", []), ("60", [6])])
def test_a_grace_too_short_for_a_save_relies_on_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace: str, saves: list[int]
) -> None:
    monkeypatch.setenv(variables.GRACE_S, grace)
    program = Program()
    with program.session() as ft:
        # The guard would end this process at the end of the grace; its clock is another test's.
        ft._guard.stop()
        train(program, ft, 3)
        ft.save()
        program.saves.clear()
        time.sleep(STEP_S)
        ft.step(4)
        signal.raise_signal(signal.SIGUSR2)
        ft.step(5)
        with pytest.raises(SystemExit) as left:
            ft.step(6)
    assert left.value.code == exits.REQUEUE
    assert program.saves == saves
    end = told(tmp_path)
    assert end.saved_step == (saves[0] if saves else 3)
    assert ("not saved, because" in end.note) is not bool(saves)
    ft._watch.restore()


def test_an_error_of_the_program_is_told_as_its_own(tmp_path: Path) -> None:
    program = Program()

    def fail() -> None:
        with program.session() as ft:
            train(program, ft, 3)
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        fail()
    end = told(tmp_path)
    assert end.failed is not None
    assert end.failed.startswith("ZeroDivisionError")
    assert (end.leaving, end.done, end.step) == (None, False, 3)


def test_hooks_get_what_was_agreed_on_and_their_time_is_not_the_steps(tmp_path: Path) -> None:
    program = Program()
    epochs: list[int] = []

    def pause(epoch: int) -> None:
        epochs.append(epoch)
        time.sleep(0.3)

    with program.session() as ft:
        ft.on_agreed[Kind.PAUSE] = pause
        ft.want(Kind.PAUSE, 3)
        for step in range(1, 40):
            time.sleep(0.002)
            ft.step(step, samples=1)
        rate = ft._together.pace.samples_per_s
    assert epochs == [3]
    # 39 samples in 39 short steps; with the pause in it the rate would be below 125.
    assert rate > 125


def test_without_ft_run_and_slurm_there_is_nothing_but_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (variables.STATUS, variables.PROGRESS, variables.JOB, variables.CHECKPOINT_DIR):
        monkeypatch.delenv(name)
    program = Program()
    with program.session() as ft:
        train(program, ft, 2)
        ft.save()
    assert os.listdir(tmp_path) == ["ft-checkpoints"]
    assert sorted(os.listdir(tmp_path / "ft-checkpoints" / "local")) == [
        "LATEST",
        "step-000000000002",
    ]


@pytest.mark.parametrize(
    ("arguments", "told_what"),
    [
        ({"checkpoint": "often"}, "async, sync, none"),
        ({"keep": 0}, "keep=0"),
        ({"restore": print}, "without save="),
        ({"state": {}, "save": print}, "not both"),
        ({"state": [print]}, r"write state=\{\"model\": model"),
        ({"state": {"f": print}}, r'state\["f"\]'),
    ],
)
def test_what_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], told_what: str
) -> None:
    monkeypatch.delenv(variables.STATUS)
    with pytest.raises(SessionError, match=told_what), slurm_ft.session(**arguments):
        pass


def test_under_ft_run_a_refusal_is_one_line_and_an_error_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variables.CHECKPOINT_DIR, str(tmp_path / "file" / "ck"))
    with pytest.raises(SystemExit) as caught, Program().session():
        pytest.fail("it trains and saves nothing")
    assert caught.value.code == exits.REFUSED
    assert exits.REFUSED not in exits.ASKS_FOR_REQUEUE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"slurm_ft: {tmp_path / 'file' / 'ck'}: ")
    end = told(tmp_path)
    assert end.failed is not None
    assert line.endswith(end.failed)
    assert (end.leaving, end.done) == (None, False)


def test_a_failed_save_is_kept_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work was lost and only the job's output said so."""
    monkeypatch.setenv(variables.CHECKPOINT_INTERVAL, "1000")
    full = True

    def save(directory: Path, step: int) -> None:
        if full:
            raise OSError(28, "No space left on device")
        (directory / "x").write_text("")

    def to_the_end(ft: Session) -> None:
        signal.raise_signal(signal.SIGUSR2)
        for step in range(2, 200):
            time.sleep(STEP_S)
            ft.step(step)

    with slurm_ft.session(save=save, restore=lambda directory, step: None) as ft:
        ft.step(1)
        with pytest.raises(CheckpointError):
            ft.save()
        assert "step 1 is not saved: " in told(tmp_path).save_error
        assert "No space left" in told(tmp_path).save_error
        full = False
        ft.save()
        assert told(tmp_path).save_error == ""
        full = True
        with pytest.raises(SystemExit):
            to_the_end(ft)
    restore_handlers(ft)
    end = told(tmp_path)
    assert (end.leaving, end.saved_step) == (status.SIGNALLED, 1)
    assert "No space left" in end.save_error


def test_a_checkpoint_that_nobody_can_read_is_an_error(tmp_path: Path) -> None:
    program = Program()
    with program.session() as ft:
        train(program, ft, 2)
        ft.save()
    with pytest.raises(SessionError, match="restore="), slurm_ft.session(save=program.save) as ft:
        ft.restore()


def test_nothing_to_save_is_possible_and_said(tmp_path: Path) -> None:
    with slurm_ft.session() as ft:
        assert ft.restore() == 0
        ft.step(1)
        with pytest.raises(SessionError, match="nothing to save"):
            ft.save()
        assert (ft.rank, ft.size, ft.stopping) == (0, 1, False)
    assert told(tmp_path).done


def test_no_torch_was_needed() -> None:
    """The whole of this file ran without it."""
    if "torch" in sys.modules:
        pytest.skip("another test has imported torch")
    import slurm_ft.session.session

    assert slurm_ft.session.session is not None
    assert "torch" not in sys.modules


@pytest.mark.parametrize("saved", [12, None])
def test_a_checkpoint_directory_that_is_gone_is_worth_a_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saved: int | None,
):
    """Weeks of training begun again at step 0 looked like any other start."""
    monkeypatch.setenv(variables.STATE_DIR, str(tmp_path))
    monkeypatch.setenv(variables.ATTEMPT, "1")
    before = Attempts("7", (Attempt(0, 1.0, 1, ended_s=2.0, saved_step=saved),))
    (tmp_path / "attempts-7.json").write_text(before.to_json())
    with Program().session() as ft:
        assert ft.restore() == 0
    told_so = "holds no checkpoint, though attempt 0 saved step 12" in caplog.text
    assert told_so == (saved is not None)

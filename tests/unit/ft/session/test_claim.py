"""One session at a time in a checkpoint directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ft import status
from slurm_ft.session import claim
from slurm_ft.session.settings import Settings

STEP_0 = {"SLURM_STEP_ID": "0"}
STEP_1 = {"SLURM_STEP_ID": "1"}


def settings(tmp_path: Path, step: int, attempt: int = 0, job_id: str = "77") -> Settings:
    return Settings(
        job_id=job_id,
        attempt=attempt,
        status=tmp_path / f"status-{job_id}-{attempt}-{step}-0.json",
        checkpoint_dir=tmp_path / "checkpoints",
        progress_interval_s=0.4,
    )


def say(of: Settings, **more: object) -> None:
    assert of.status is not None
    said = status.Status(attempt=of.attempt, rank=0, pid=1, at_s=time.time())
    status.write(of.status, replace(said, **more))  # type: ignore[arg-type]


@pytest.fixture
def renewing() -> Iterator[Callable[[Settings], Callable[[], None]]]:
    """Starts what a session's reporter does; what it returns ends it."""
    ends: list[Callable[[], None]] = []

    def begin(of: Settings) -> Callable[[], None]:
        over = threading.Event()

        def run() -> None:
            while not over.wait(0.1):
                say(of)

        thread = threading.Thread(target=run)
        say(of)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        ends.append(end)
        return end

    yield begin
    for end in ends:
        end()


def test_another_step_that_is_at_work_is_named(
    tmp_path: Path, renewing: Callable[[Settings], Callable[[], None]]
):
    """Two steps with one directory deleted each other's saves and loaded each other's model."""
    first = settings(tmp_path, 0)
    assert claim.take(first, STEP_0) == ""
    renewing(first)
    words = claim.take(settings(tmp_path, 1), STEP_1)
    assert f"{tmp_path}/checkpoints: step 0 of this job keeps its checkpoints there" in words
    assert "--checkpoint-dir" in words
    elsewhere = replace(settings(tmp_path, 1), checkpoint_dir=tmp_path / "other")
    assert claim.take(elsewhere, STEP_1) == ""


@pytest.mark.parametrize(
    "end", [{"done": True}, {"failed": "ValueError: x"}, {"leaving": status.SIGNALLED}]
)
def test_the_step_before_has_ended(tmp_path: Path, end: dict[str, object]):
    first = settings(tmp_path, 0)
    claim.take(first, STEP_0)
    say(first, **end)
    begin = time.monotonic()
    assert claim.take(settings(tmp_path, 1), STEP_1) == ""
    assert time.monotonic() - begin < 0.3


def test_a_step_that_was_killed_costs_a_wait_and_no_more(tmp_path: Path):
    first = settings(tmp_path, 0)
    claim.take(first, STEP_0)
    say(first)
    begin = time.monotonic()
    assert claim.take(settings(tmp_path, 1), STEP_1) == ""
    assert 0.9 < time.monotonic() - begin < 5


@pytest.mark.parametrize("left", [False, True])
def test_of_steps_that_come_in_one_moment_one_is_let_in(tmp_path: Path, left: bool):
    """Both saw an empty directory, and both took it; ``left``: a name of earlier lies there."""
    for attempt in range(3):
        root = tmp_path / f"{attempt}"
        steps = [replace(settings(root, step), job_id="77") for step in range(4)]
        if left:
            claim.take(settings(root, 9, job_id="76"), {"SLURM_STEP_ID": "9"})
        ready = threading.Barrier(len(steps))
        said: list[str] = []

        def begin(of: Settings, number: int, ready: threading.Barrier, said: list[str]) -> None:
            assert of.status is not None
            of.status.parent.mkdir(exist_ok=True)
            ready.wait()
            words = claim.take(of, {"SLURM_STEP_ID": str(number)})
            said.append(words)
            # The one that is in prepares for a while before it says anything.
            for _ in range(6):
                time.sleep(0.02)
                if not words:
                    say(of)

        threads = [
            threading.Thread(target=begin, args=(of, number, ready, said))
            for number, of in enumerate(steps)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(bool, said)) == [False, True, True, True], said


def test_one_name_stays(tmp_path: Path):
    for step in range(5):
        mine = settings(tmp_path, step)
        assert claim.take(mine, {"SLURM_STEP_ID": str(step)}) == ""
        say(mine, done=True)
    assert [path.name for path in mine.checkpoint_dir.iterdir()] == [claim.CLAIM.format(number=5)]


def test_the_attempt_before_is_gone(
    tmp_path: Path, renewing: Callable[[Settings], Callable[[], None]]
):
    first = settings(tmp_path, 0)
    claim.take(first, STEP_0)
    renewing(first)
    assert claim.take(settings(tmp_path, 0, attempt=1), STEP_0) == ""


@pytest.mark.parametrize("step", [STEP_0, STEP_1])
def test_another_job_that_is_at_work_is_named(
    tmp_path: Path, renewing: Callable[[Settings], Callable[[], None]], step: dict[str, str]
):
    """Two jobs whose scripts name one directory, as those of an array do."""
    first = settings(tmp_path, 0)
    claim.take(first, STEP_0)
    end = renewing(first)
    words = claim.take(settings(tmp_path, 0, job_id="78_2"), step)
    assert f"{tmp_path}/checkpoints: job 77 is at work" in words
    assert "--checkpoint-dir" in words
    assert "--dependency=afterany:77" in words
    end()
    # It has been killed; after a wait the directory is free.
    assert claim.take(settings(tmp_path, 0, job_id="78_2"), step) == ""


@pytest.mark.parametrize("said", [False, True])
def test_whoever_went_silent_long_ago_costs_no_wait(tmp_path: Path, said: bool):
    first = settings(tmp_path, 0)
    long_ago = time.time() - 900
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim.time, "time", lambda: long_ago)
        assert claim.take(first, STEP_0) == ""
        if said:
            say(first, at_s=long_ago + 1)
    assert claim.take(settings(tmp_path, 0, job_id="78"), STEP_0) == ""
    assert time.monotonic() - begin < 0.3


def test_a_claim_that_cannot_be_read_or_written_keeps_nobody_away(tmp_path: Path):
    mine = settings(tmp_path, 1)
    mine.checkpoint_dir.mkdir()
    (mine.checkpoint_dir / claim.CLAIM.format(number=3)).write_text('{"job_id": 7')
    assert claim.take(mine, STEP_1) == ""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert claim.take(replace(mine, checkpoint_dir=blocked / "x"), STEP_1) == ""
    assert claim.take(Settings(), {}) == ""

"""Who takes the place of a leader that gives no sign of life any more."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from slurm_ft.launch import pulse
from slurm_ft.launch.marks import MOST_TERMS, Marks
from slurm_ft.launch.pulse import SILENCE_S, STAGGER_S, Pulse, Watch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(str(tmp_path), "77", 0, 0)


def beat(marks: Marks, tmp_path: Path, number: int, term: int = 0) -> None:
    """A sign of life at a time of the file server's own."""
    marks.beat(term)
    os.utime(tmp_path / f"lead-77-0-0-{term}", ns=(number, number))


def first_turn(watch: Watch, clock: Clock, limit_s: float = 200.0) -> tuple[float, int] | None:
    """After how long it is a rank's turn, and in which term."""
    start = clock.now
    while clock.now < start + limit_s:
        clock.now += 0.5
        term = watch.turn()
        if term is not None:
            return clock.now - start, term
    return None


def test_a_leader_that_lives_is_left_alone_however_long_it_takes(marks: Marks, tmp_path: Path):
    clock = Clock()
    watch = Watch(marks, 1, clock)
    for number in range(100):
        # Its clock goes backwards: only the change counts.
        beat(marks, tmp_path, 10_000 - number)
        clock.now += 5.0
        assert watch.turn() is None


def test_the_lowest_rank_has_its_turn_first(marks: Marks, tmp_path: Path):
    beat(marks, tmp_path, 1)
    waits = []
    for rank in (1, 2, 3, 1000, 1001):
        clock = Clock()
        found = first_turn(Watch(marks, rank, clock), clock)
        assert found is not None
        assert found[1] == 1
        waits.append(found[0])
    assert waits[0] >= SILENCE_S
    assert [b - a for a, b in itertools.pairwise(waits[:3])] == [STAGGER_S, STAGGER_S]
    # Thousands of dead ranks before it do not keep one waiting for hours.
    assert waits[3] == waits[4] < SILENCE_S + 12 * STAGGER_S


def test_nobody_who_has_never_begun_to_lead_is_waited_for_longer(marks: Marks):
    clock = Clock()
    found = first_turn(Watch(marks, 1, clock), clock)
    assert found is not None
    assert found[0] >= SILENCE_S


def test_the_time_in_which_the_follower_itself_was_stopped_does_not_count(
    marks: Marks, tmp_path: Path
):
    clock = Clock()
    beat(marks, tmp_path, 1)
    watch = Watch(marks, 1, clock)
    assert watch.turn() is None
    clock.now += 10_000.0  # scontrol suspend, which stops the leader as well
    assert watch.turn() is None
    assert first_turn(watch, clock) is not None


def test_a_deputy_that_dies_is_followed_by_another_and_that_is_all(marks: Marks, tmp_path: Path):
    beat(marks, tmp_path, 1)
    for term in range(1, MOST_TERMS):
        clock = Clock()
        found = first_turn(Watch(marks, 1, clock), clock)
        assert found is not None
        assert found[1] == term
        assert marks.claim(term)
        assert not marks.claim(term)
    clock = Clock()
    assert first_turn(Watch(marks, 1, clock), clock) is None


def test_a_leader_that_waits_for_slurm_gives_signs_of_life(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    stop = Pulse(marks).keep()
    try:
        seen = set()
        end = time.monotonic() + 10
        while len(seen) < 5 and time.monotonic() < end:
            seen.add(marks.last_beat())
            time.sleep(0.002)
        assert len(seen) >= 5
    finally:
        stop()

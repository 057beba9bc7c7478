"""When a rank gives up: never before leaving was asked for, then at the earlier of two limits."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import status
from slurm_ft.session.guard import (
    ONE_WAKE_S,
    SECOND_SIGNAL_S,
    Guard,
    Leaving,
    Pulse,
    asked_again,
    stuck_limit_s,
    verdict,
)
from slurm_ft.session.signals import SignalWatch

TIMES = st.floats(0, 1e6)


def asked(**more: float) -> Leaving:
    return Leaving(100.0, status.SIGNALLED, "SIGUSR2", **more)


@given(TIMES, TIMES, st.floats(0, 1e5))
def test_a_slow_run_that_nobody_asked_to_leave_goes_on(now: float, at: float, limit: float) -> None:
    assert verdict(now, None, Pulse(at, "a step", limit)) is None


@given(TIMES)
def test_a_step_that_was_long_before_the_signal_gets_its_whole_limit(before: float) -> None:
    pulse = Pulse(-before, "a step", 30.0)
    assert verdict(129.9, asked(), pulse) is None
    told = verdict(130.1, asked(), pulse)
    assert told is not None
    assert told[0] == status.STUCK


def test_each_safe_point_begins_the_limit_anew() -> None:
    assert verdict(500.0, asked(), Pulse(480.0, "a step", 30.0)) is None


@pytest.mark.parametrize(
    ("leaving", "deadline_s"),
    [
        (asked(), None),
        (asked(grace_s=20.0), 118.0),  # a tenth is kept for what comes after
        (asked(grace_s=600.0), 695.0),  # but never more than five seconds
        (asked(again_s=110.0), 110.0 + SECOND_SIGNAL_S),
        (asked(again_s=110.0, grace_s=20.0), 118.0),
        (asked(again_s=110.0, grace_s=600.0), 110.0 + SECOND_SIGNAL_S),
        (asked(grace_s=0.0), 100.0),
    ],
)
def test_deadline(leaving: Leaving, deadline_s: float | None) -> None:
    assert leaving.deadline_s == deadline_s


def test_the_end_of_the_grace_says_what_came_and_where_the_rank_is() -> None:
    told = verdict(119.0, asked(grace_s=20.0), Pulse(101.0, "a step after step 7", 1e9))
    assert told is not None
    word, note = told
    assert word == status.GRACE_OVER
    assert "SIGUSR2 came 19.0 s ago" in note
    assert "18.0 s ago in a step after step 7" in note


def test_an_echo_is_no_second_signal() -> None:
    assert not asked_again(asked(), 100.0 + ONE_WAKE_S)
    assert asked_again(asked(), 100.1 + ONE_WAKE_S)
    assert not asked_again(asked(again_s=105.0), 110.0)


def test_stuck_is_many_steps_or_a_collective() -> None:
    assert stuck_limit_s(None, 600.0) == 600.0
    assert stuck_limit_s(2.0, 600.0) == 600.0
    assert stuck_limit_s(120.0, 600.0) == 1200.0


class Heard:
    """A guard with its watch, and what it was told."""

    def __init__(self, leaving: Leaving | None = None) -> None:
        self.leaving = leaving
        self.signals: list[int] = []
        self.noted: list[int] = []
        self.gave_up: list[str] = []
        self.something = threading.Event()
        self.watch = SignalWatch((signal.SIGUSR2,), self.noted.append)
        self.guard = Guard(self.watch, self._hear, self._give_up, lambda: self.leaving)

    def _hear(self, number: int, now_s: float) -> None:
        self.signals.append(number)
        self.something.set()

    def _give_up(self, word: str, note: str) -> None:
        self.gave_up.append(word)
        self.something.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    made.watch.install()
    made.guard.start()
    yield made
    made.guard.stop()
    made.watch.restore()
    made.watch.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_the_thread_hears_what_the_main_thread_cannot_handle_yet(heard: Heard) -> None:
    """sig-in-collective: Python's handler waits for the main thread, the listener does not.

    The main thread is inside one call of C that lets go of the interpreter and that no signal
    ends, as it is in a collective.
    """
    begun = threading.Event()
    seen: list[tuple[list[int], list[int]]] = []

    def signal_it() -> None:
        begun.wait(5.0)
        os.kill(os.getpid(), signal.SIGUSR2)
        heard.something.wait(5.0)
        seen.append((list(heard.signals), list(heard.noted)))

    thread = threading.Thread(target=signal_it)
    thread.start()
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
    thread.join()
    assert seen == [([signal.SIGUSR2], [])]
    assert heard.noted == [signal.SIGUSR2]


def test_the_guard_gives_up_without_being_woken_by_a_signal(heard: Heard) -> None:
    heard.guard.alive("a step", 0.05)
    heard.leaving = Leaving(time.monotonic(), status.ASKED, "test")
    heard.watch.wake()
    assert heard.something.wait(5.0)
    assert heard.gave_up == [status.STUCK]
    assert heard.signals == []

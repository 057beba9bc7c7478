"""A rank's part in pauses with a store in memory and real threads: two ranks, no torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slurm_ft.pause.conduct import Conductor
from slurm_ft.pause.ladder import LostStateError, PartError
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.participant import Participant
from slurm_ft.pause.protocol import Board, End, Exit, Key, Request, Rung, Step
from slurm_ft.pause.table import StoreLostError, Table

LIMITS = Limits(
    ack_s=1.0, slack_s=0.3, lost_s=0.4, release_s=1.0, restore_s=1.0, up_s=2.0, poll_s=0.02
)


class Memory:
    """A store for threads; `down` cuts it off."""

    def __init__(self, size: int) -> None:
        self.table = Table()
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self.down = False
        self.conductor = Conductor(self.table, LIMITS, time.monotonic, lambda: None)
        self.conductor.join(0, size)

    def _check(self) -> None:
        if self.down:
            raise StoreLostError("down")

    def join(self, rank: int, size: int) -> None:
        self._check()

    def newest(self) -> int:
        self._check()
        with self.lock:
            return self.table.newest()

    def newest_after(self, epoch: int, limit_s: float) -> int:
        with self.news:
            self.news.wait_for(lambda: self.table.newest() > epoch, min(limit_s, 0.1))
        return self.newest()

    def read(self, epoch: int) -> Board:
        self._check()
        with self.lock:
            return self.table.read(epoch)

    def wait(self, epoch: int, seen: Board, limit_s: float) -> Board:
        self._check()
        with self.news:
            self.news.wait_for(lambda: self.table.read(epoch) != seen, min(limit_s, 0.1))
        return self.read(epoch)

    def write(self, epoch: int, key: Key, value: str | int | Request) -> None:
        self._check()
        with self.news:
            self.table.write(epoch, key, value)
            self.conductor.look()
            self.news.notify_all()

    def look(self) -> None:
        with self.news:
            self.conductor.look()
            self.news.notify_all()

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Actions:
    """What was done to a rank, and what goes wrong."""

    release_error: Exception | None = None
    restore_error: Exception | None = None
    diary: list[str] = field(default_factory=list)

    def release(self, rung: Rung, limit_s: float) -> None:
        if self.release_error is not None:
            raise self.release_error
        self.diary.append(f"release {rung}")

    def restore(self, limit_s: float) -> None:
        if self.restore_error is not None:
            raise self.restore_error
        self.diary.append("restore")


def run(
    store: Memory, actions: list[Actions], meanwhile: Callable[[], None], hold_s: float = 0.2
) -> list[Step | Exit]:
    """Both ranks go through pause 1 while the controller looks on."""
    with store.lock:
        store.conductor.ask(Rung.MEMORY, wait_s=5.0, hold_s=hold_s, by="test")
    ends: dict[int, Step | Exit] = {}

    def rank(number: int) -> None:
        participant = Participant(
            number, 2, LIMITS, lambda: store, actions[number], heard=lambda epoch: None
        )
        ends[number] = participant.pause(1)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    meanwhile()
    end_s = time.monotonic() + 15.0
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end_s:
        store.look()
        time.sleep(0.02)
    assert sorted(ends) == [0, 1], "a rank hangs"
    return [ends[0], ends[1]]


def nothing() -> None:
    """Nothing happens meanwhile."""


def test_both_pause_and_go_on() -> None:
    actions = [Actions(), Actions()]
    ends = run(Memory(2), actions, nothing)
    assert [end.end for end in ends] == [End.RESUMED, End.RESUMED]
    assert all(each.diary == ["release memory", "restore"] for each in actions)


def test_a_failed_release_brings_both_back() -> None:
    actions = [Actions(), Actions(release_error=PartError("no room"))]
    ends = run(Memory(2), actions, nothing, hold_s=60.0)
    assert all(isinstance(end, Step) for end in ends)
    assert "rank 1 could not release: no room" in ends[0].reason


def test_an_error_that_nobody_foresaw_is_a_failure_too() -> None:
    """A rank that ended by it would take the job along, which would have gone on unpaused."""
    actions = [Actions(), Actions(release_error=KeyError("a program's own state_dict"))]
    ends = run(Memory(2), actions, nothing, hold_s=60.0)
    assert all(isinstance(end, Step) for end in ends)
    assert "rank 1 could not release: KeyError" in ends[0].reason
    actions = [Actions(), Actions(restore_error=ValueError("x"))]
    assert [end.end for end in run(Memory(2), actions, nothing)] == [End.ABANDONED, End.ABANDONED]


@dataclass
class Slow:
    """A save, or a release, that takes longer than anybody has allowed for."""

    release_s: float
    gave_up: list[str] = field(default_factory=list)

    def release(self, rung: Rung, limit_s: float) -> None:
        time.sleep(self.release_s)

    def restore(self, limit_s: float) -> None:
        """Nothing is away."""


@pytest.mark.parametrize("rung", [Rung.JOB, Rung.MEMORY])
def test_a_long_save_is_waited_for_and_a_hanging_release_is_not(rung: Rung) -> None:
    store = Memory(1)
    actions = Slow(LIMITS.release_s + LIMITS.restore_s + 0.5)
    with store.lock:
        store.conductor.ask(rung, wait_s=5.0, hold_s=0.2, by="test")
    participant = Participant(
        *(0, 1, LIMITS, lambda: store, actions),
        heard=lambda epoch: None,
        give_up=actions.gave_up.append,
    )
    ends: list[Step | Exit] = []
    thread = threading.Thread(target=lambda: ends.append(participant.pause(1)))
    thread.start()
    end_s = time.monotonic() + 15.0
    while thread.is_alive() and time.monotonic() < end_s:
        store.look()
        time.sleep(0.02)
    assert [type(end) for end in ends] == [Step]
    assert ends[0].end is End.RESUMED
    assert "did not release in time" in ends[0].reason
    # The real one would have ended the process.
    assert bool(actions.gave_up) is (rung is Rung.MEMORY)


def test_a_store_that_comes_late_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper starts beside the program and may take longer than the first steps."""
    store = Memory(2)
    waits: list[float] = []
    stopped = threading.Event()

    class Patience(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            if len(waits) == 12:
                stopped.set()
            return super().wait(0.0)

    participant = Participant(0, 2, LIMITS, lambda: None, Actions(), heard=lambda epoch: None)
    patience = Patience()
    monkeypatch.setattr(participant, "_stopped", patience)
    participant.start()
    assert stopped.wait(5.0)
    patience.set()
    assert max(waits[:12]) <= 3.0
    assert store.table.newest() == 0


def test_a_failed_restore_ends_both() -> None:
    actions = [Actions(), Actions(restore_error=PartError("gone"))]
    ends = run(Memory(2), actions, nothing)
    assert [end.end for end in ends] == [End.ABANDONED, End.ABANDONED]
    assert all(isinstance(end, Exit) for end in ends)


def test_a_state_lost_in_the_roll_back_ends_both() -> None:
    """Its restore would succeed with nothing to restore: it must not be asked."""
    actions = [Actions(), Actions(release_error=LostStateError("lost"))]
    ends = run(Memory(2), actions, nothing)
    assert [end.end for end in ends] == [End.ABANDONED, End.ABANDONED]


def test_a_store_that_vanishes_under_bound_ranks_ends_both() -> None:
    store = Memory(2)
    actions = [Actions(), Actions()]

    def vanish() -> None:
        end_s = time.monotonic() + 5.0
        while store.table.read(1).paused != 3 and time.monotonic() < end_s:
            time.sleep(0.01)
        store.down = True

    ends = run(store, actions, vanish, hold_s=60.0)
    assert [end.end for end in ends] == [End.UNDECIDED, End.UNDECIDED]


def test_a_finished_rank_does_not_let_the_asker_wait() -> None:
    store = Memory(2)
    heard: list[int] = []
    participant = Participant(0, 2, LIMITS, lambda: store, Actions(), heard=heard.append)
    participant.start()
    with store.news:
        outcome = store.conductor.ask(Rung.HOLD, wait_s=60.0, hold_s=1.0, by="test")
        store.news.notify_all()
    end_s = time.monotonic() + 5.0
    while not heard and time.monotonic() < end_s:
        time.sleep(0.01)
    participant.stop()
    store.look()
    found = store.conductor.outcomes()[-1]
    assert found.id == outcome.id
    assert found.end is End.ABORTED
    assert "rank 0 has finished" in found.reason


def test_a_session_that_begins_after_a_pause_does_not_join_it() -> None:
    store = Memory(2)
    run(store, [Actions(), Actions()], nothing)
    heard: list[int] = []
    participant = Participant(0, 2, LIMITS, lambda: store, Actions(), heard=heard.append)
    participant.start()
    time.sleep(0.3)
    participant.stop()
    assert heard == []

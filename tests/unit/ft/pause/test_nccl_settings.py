"""NCCL's settings as a pause sees them."""

from __future__ import annotations

import pytest

from slurm_ft.pause.ladder import Ladder, LostStateError, PartError
from slurm_ft.pause.nccl import (
    ASYNC_ERRORS,
    BLOCKING,
    HEARTBEAT,
    MONITORING,
    NVLS,
    NcclBuffers,
    Verdict,
    Wish,
    judge,
)

WISH = Wish(collective_timeout_s=600.0)


def found(environment: dict[str, str], wish: Wish = WISH) -> dict[str, Verdict]:
    return {finding.name: finding.verdict for finding in judge(environment, wish)}


def test_torchs_own_defaults_do_not_fit_a_long_timeout() -> None:
    """watchdog: eight minutes of heartbeat under ten minutes of collective time-out."""
    assert found({}) == {HEARTBEAT: Verdict.REFUSE}
    assert found({HEARTBEAT: "720"}) == {}
    assert found({MONITORING: "0"}) == {}
    assert found({HEARTBEAT: "600"}) == {HEARTBEAT: Verdict.REFUSE}
    assert found({HEARTBEAT: "soon"}) == {HEARTBEAT: Verdict.REFUSE}


def test_a_suspend_longer_than_the_heartbeat() -> None:
    wish = Wish(collective_timeout_s=600.0, suspended_s=1000.0)
    assert found({HEARTBEAT: "720"}, wish) == {
        HEARTBEAT: Verdict.WARN,
        ASYNC_ERRORS: Verdict.WARN,
    }
    assert found({HEARTBEAT: "1200", ASYNC_ERRORS: "0"}, wish) == {}
    assert found({MONITORING: "0", "NCCL_ASYNC_ERROR_HANDLING": "2"}, wish) == {}


@pytest.mark.parametrize(("mode", "warned"), [("0", False), ("1", True), ("2", False), ("3", True)])
def test_modes_that_end_the_process(mode: str, warned: bool) -> None:
    """pg-abort-kills: with tear-down no roll-back gets its chance."""
    wish = Wish(collective_timeout_s=600.0, suspended_s=700.0)
    names = found({HEARTBEAT: "1200", ASYNC_ERRORS: mode}, wish)
    assert (ASYNC_ERRORS in names) is warned


def test_blocking_wait() -> None:
    assert found({HEARTBEAT: "720", BLOCKING: "1"}) == {BLOCKING: Verdict.WARN}
    assert found({HEARTBEAT: "720", "NCCL_BLOCKING_WAIT": "1"}) == {BLOCKING: Verdict.WARN}


def test_nvls_forbids_dumping_device_state() -> None:
    """pause-nvls: the dump works, the restore fails."""
    wish = Wish(collective_timeout_s=600.0, checkpointed=True)
    assert found({HEARTBEAT: "720"}, wish) == {NVLS: Verdict.REFUSE}
    assert found({HEARTBEAT: "720", NVLS: "0"}, wish) == {}


# --- the ladder ---------------------------------------------------------------------------------


class Part:
    """A part with a diary."""

    def __init__(
        self, name: str, diary: list[str], *, fails: str = "", missing: str = "", moved: int = 10
    ) -> None:
        self.name = name
        self._diary = diary
        self._fails = fails
        self._missing = missing
        self._moved = moved

    def missing(self) -> str:
        return self._missing

    def release(self, deadline_s: float) -> int:
        if self._fails == "release":
            raise PartError(f"{self.name} refuses")
        self._diary.append(f"-{self.name}")
        return self._moved

    def restore(self, deadline_s: float) -> None:
        if self._fails == "restore":
            raise PartError(f"{self.name} is lost")
        self._diary.append(f"+{self.name}")


def test_released_in_order_and_restored_backwards() -> None:
    diary: list[str] = []
    ladder = Ladder([Part("a", diary), Part("b", diary), Part("c", diary, missing="not here")])
    ladder.release(10.0)
    assert ladder.figures.released_bytes == 20
    ladder.restore(10.0)
    assert diary == ["-a", "-b", "+b", "+a"]
    ladder.restore(10.0)
    assert len(diary) == 4


def test_a_part_that_fails_brings_the_others_back() -> None:
    """pause-lock-peers: the first failure rolls back all."""
    diary: list[str] = []
    ladder = Ladder([Part("a", diary), Part("b", diary), Part("c", diary, fails="release")])
    with pytest.raises(PartError, match="c refuses"):
        ladder.release(10.0)
    assert diary == ["-a", "-b", "+b", "+a"]
    ladder.restore(10.0)
    assert len(diary) == 4


def test_a_required_part_that_is_missing_fails_before_anything_is_touched() -> None:
    diary: list[str] = []
    ladder = Ladder(
        [Part("a", diary), Part("b", diary, missing="not here")], required=frozenset({"b"})
    )
    with pytest.raises(PartError, match="not here"):
        ladder.release(10.0)
    assert diary == []


def test_a_lost_roll_back_is_no_failure_to_go_on_after() -> None:
    diary: list[str] = []
    ladder = Ladder([Part("a", diary, fails="restore"), Part("b", diary, fails="release")])
    with pytest.raises(LostStateError):
        ladder.release(10.0)


def test_no_time_left_is_a_failure() -> None:
    now = iter([0.0, 0.0, 5.0, 5.0])
    diary: list[str] = []
    ladder = Ladder([Part("a", diary), Part("b", diary)], clock=lambda: next(now))
    with pytest.raises(PartError, match="no time left"):
        ladder.release(1.0)
    assert diary == ["-a", "+a"]


class Backend:
    """A communicator of NCCL."""

    def __init__(self, diary: list[str], name: str, refuses: bool = False) -> None:
        self._diary = diary
        self._name = name
        self._refuses = refuses

    def suspend(self) -> None:
        if self._refuses:
            raise RuntimeError("NCCL error")
        self._diary.append(f"-{self._name}")

    def resume(self) -> None:
        self._diary.append(f"+{self._name}")


def test_a_communicator_that_refuses_brings_the_others_back() -> None:
    diary: list[str] = []
    part = NcclBuffers([Backend(diary, "a"), Backend(diary, "b"), Backend(diary, "c", True)])
    with pytest.raises(PartError, match="NCCL error"):
        part.release(1.0)
    assert diary == ["-a", "-b", "+b", "+a"]


def test_a_release_of_torch_without_suspend_is_left_out() -> None:
    assert "cannot suspend" in NcclBuffers([object()]).missing()

"""The pause on real ranks over gloo: longer than the time-out, late, dead, killed, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurm_ft import exits, variables
from slurm_ft.pause.address import Address, address_path, write_address
from slurm_ft.pause.asking import new_ask
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.protocol import Rung
from slurm_ft.pause.requests import answer_path, ask_path, read_answer, write_private
from slurm_ft.pause.table import StoreLostError
from tests.wrappers.pause_ranks import (
    address,
    at_step,
    ended,
    nothing,
    paused,
    served,
    shorten_timeout,
    train,
    until,
    wait_outcome,
)
from tests.wrappers.ranks import Outcome, run_ranks, values

COLLECTIVE_S = 4.0
STEPS = 60
Meanwhile = Callable[[NetStore, list[int], Path], None]


def run(
    place: Path,
    meanwhile: Meanwhile | None,
    *,
    size: int = 3,
    hook: Callable[[int, int], None] = nothing,
    steps: int = STEPS,
    limit_s: float = 40.0,
    more: dict[str, str] | None = None,
    late: tuple[int, float] | None = None,
) -> list[Outcome]:
    """The job, and what happens to it."""
    place.mkdir(exist_ok=True, mode=0o700)
    with served(place, COLLECTIVE_S):
        store = NetStore(address(place))
        failed: list[BaseException] = []

        def beside(pids: list[int]) -> None:
            if meanwhile is None:
                return
            try:
                until(lambda: at_step(place, 0) >= 3, 20.0, "step 3")
                meanwhile(store, pids, place)
            except BaseException as exc:
                failed.append(exc)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                    os.kill(pid, signal.SIGKILL)

        outcomes = run_ranks(
            size,
            train,
            place,
            steps,
            COLLECTIVE_S,
            hook,
            0.02,
            more or {},
            late,
            limit_s=limit_s,
            meanwhile=beside,
        )
        store.close()
    if failed:
        raise failed[0]
    return outcomes


@pytest.fixture(scope="module")
def unpaused(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters of the same job without a pause."""
    found = values(run(tmp_path_factory.mktemp("unpaused") / "job", None))
    assert len({value["digest"] for value in found}) == 1
    return str(found[0]["digest"])


def test_a_pause_longer_than_the_collective_timeout(tmp_path: Path, unpaused: str) -> None:
    """watchdog: longer than the time-out of a collective; same bits as the unpaused job."""
    rows: list[dict[str, Any]] = []

    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        row = store.pause("memory", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
        held = wait_outcome(store, "a", paused, 10.0)
        assert held["stage"] == "held", held
        before = [at_step(place, rank) for rank in range(3)]
        assert len(set(before)) == 1
        time.sleep(COLLECTIVE_S * 1.5)
        assert [at_step(place, rank) for rank in range(3)] == before
        # Another one is refused while this one lasts.
        assert store.pause("memory", wait_s=1.0, hold_s=1.0, by="b")["end"] == "refused"
        store.resume("asked by the test")
        rows.extend([row, held, wait_outcome(store, "a", ended, 10.0)])

    found = values(run(tmp_path / "job", meanwhile, more={variables.PAUSE_SPILL: str(tmp_path)}))
    assert {value["digest"] for value in found} == {unpaused}
    assert rows[-1]["end"] == "resumed"
    assert rows[-1]["reason"] == "asked by the test"
    assert rows[1]["paused_s"] < 3.0


def test_a_late_rank_rolls_the_pause_back_and_is_named(tmp_path: Path, unpaused: str) -> None:
    """One rank hangs between the agreement and its safe point; the next pause goes through."""
    rows: list[dict[str, Any]] = []

    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        store.pause("nothing", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
        rows.append(wait_outcome(store, "a", ended, 10.0))
        until(lambda: at_step(place, 1) == at_step(place, 0), 10.0, "rank 1")
        # A busy machine is late by itself: what counts is that a pause is possible again.
        for number in range(5):
            store.pause("nothing", wait_s=10.0, hold_s=0.2, by="test", request_id=f"b{number}")
            rows.append(wait_outcome(store, f"b{number}", ended, 10.0))
            if rows[-1]["end"] == "resumed":
                break

    # Longer than the time to acknowledge (1.6 s), but what the others wait beyond it counts as a
    # long step: one of 0.8 s would make the next pauses impossible within these time-outs.
    found = values(run(tmp_path / "job", meanwhile, late=(1, 2.0)))
    assert {value["digest"] for value in found} == {unpaused}
    assert rows[0]["end"] == "aborted"
    assert rows[0]["ranks"] == "rank 1"
    assert "rank 1" in rows[0]["reason"]
    assert rows[-1]["end"] == "resumed", "; ".join(f"{r['end']}: {r['reason']}" for r in rows)


def test_a_rank_that_dies_while_paused_sends_all_back_to_the_queue(tmp_path: Path) -> None:
    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        store.pause("nothing", wait_s=10.0, hold_s=3.0, by="test", request_id="a")
        assert wait_outcome(store, "a", paused, 10.0)["stage"] == "held"
        os.kill(pids[1], signal.SIGKILL)
        # What the ft-run of that rank does when its program ends.
        store.write(1, "gone", 1 << 1)  # type: ignore[arg-type]
        row = wait_outcome(store, "a", ended, 10.0)
        assert row["end"] == "abandoned", row
        assert "rank 1 ended" in row["reason"]

    outcomes = run(tmp_path / "job", meanwhile)
    assert outcomes[1].code == -signal.SIGKILL
    assert {outcomes[0].code, outcomes[2].code} == {exits.ABANDONED}


def test_a_dead_store_makes_bound_ranks_exit_for_requeue(tmp_path: Path) -> None:
    """Paused ranks that can learn nothing any more never take another step."""

    place = tmp_path / "job"
    place.mkdir(mode=0o700)
    steps: list[int] = []
    with served(place, COLLECTIVE_S) as server:
        store = NetStore(address(place))

        def beside(pids: list[int]) -> None:
            until(lambda: at_step(place, 0) >= 3, 20.0, "step 3")
            store.pause("nothing", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
            wait_outcome(store, "a", paused, 10.0)
            steps.append(at_step(place, 0))
            server.kill()

        outcomes = run_ranks(2, train, place, 10_000, COLLECTIVE_S, limit_s=40.0, meanwhile=beside)
    assert [outcome.code for outcome in outcomes] == [exits.UNDECIDED, exits.UNDECIDED]
    assert at_step(place, 0) == steps[0]


def test_signals_that_slurm_sends_to_the_whole_step_leave_the_store(tmp_path: Path) -> None:
    """Preemption, time limit and --signal reach the helper too: the ranks still come back by it."""
    place = tmp_path / "job"
    place.mkdir(mode=0o700)
    ends: list[Any] = []
    with served(place, COLLECTIVE_S) as server:
        store = NetStore(address(place))

        def beside(pids: list[int]) -> None:
            until(lambda: at_step(place, 0) >= 3, 20.0, "step 3")
            store.pause("nothing", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
            assert wait_outcome(store, "a", paused, 10.0)["stage"] == "held"
            for name in ("TERM", "USR2", "INT", "HUP"):
                # By somebody else than the process that it ends with.
                subprocess.run(["/bin/sh", "-c", f"kill -{name} {server.pid}"], check=True)
            for pid in pids:
                os.kill(pid, signal.SIGUSR2)
            ends.append(wait_outcome(store, "a", ended, 10.0)["end"])

        outcomes = run_ranks(2, train, place, 10_000, COLLECTIVE_S, limit_s=40.0, meanwhile=beside)
    assert ends == ["resumed"]
    assert [outcome.code for outcome in outcomes] == [exits.REQUEUE, exits.REQUEUE]


def test_steps_side_by_side_are_not_paused_by_halves(tmp_path: Path) -> None:
    """A request is a file that only one of two helpers can take."""
    tmp_path.chmod(0o700)
    ask = new_ask("7", "pause", rung=Rung.HOLD)
    with served(tmp_path, COLLECTIVE_S, more={"SLURM_STEP_ID": "0"}):
        with served(tmp_path, COLLECTIVE_S, more={"SLURM_STEP_ID": "1"}):
            write_private(ask_path(tmp_path, ask), ask)
            until(lambda: read_answer(answer_path(tmp_path, ask.id)), 10.0, "an answer")
            answer = read_answer(answer_path(tmp_path, ask.id))
            assert answer is not None
            assert answer.end == "refused"
            assert "several steps" in answer.reason
        # The other one has ended; of a killed one the file would be left.
        left = Address("127.0.0.1", 9, 0, b"k" * 32)
        write_address(address_path(tmp_path, "7", 0, "1"), left)
        again = new_ask("7", "pause", rung=Rung.HOLD)
        write_private(ask_path(tmp_path, again), again)
        until(lambda: read_answer(answer_path(tmp_path, again.id)), 10.0, "an answer")
        answer = read_answer(answer_path(tmp_path, again.id))
        assert answer is not None
        assert "no rank of this attempt listens" in answer.reason


def test_a_controller_that_hangs_does_not_keep_the_store_from_its_ranks(tmp_path: Path) -> None:
    """Paused ranks leave when their store is silent: a second request must not make it so."""
    tmp_path.chmod(0o700)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep 4\n")
    (tmp_path / "scontrol").chmod(0o755)
    more = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    with served(tmp_path, COLLECTIVE_S, more=more):
        store = NetStore(address(tmp_path), 1.0)
        ask = new_ask("7", "pause", rung=Rung.JOB)
        write_private(ask_path(tmp_path, ask), ask)
        until((tmp_path / "asked").exists, 10.0, "the question to Slurm")
        while read_answer(answer_path(tmp_path, ask.id)) is None:
            store.newest()
            time.sleep(0.05)
        store.close()


def test_without_a_store_a_job_trains_on(tmp_path: Path, unpaused: str) -> None:
    """The store dies before anybody asks: nothing is lost but the ability to pause."""

    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        (place / "pause-7-0.key").unlink()

    found = values(run(tmp_path / "job", meanwhile))
    assert {value["digest"] for value in found} == {unpaused}


def test_a_signal_while_paused_saves_and_leaves(tmp_path: Path) -> None:
    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        store.pause("nothing", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
        wait_outcome(store, "a", paused, 10.0)
        os.kill(pids[2], signal.SIGUSR2)
        row = wait_outcome(store, "a", ended, 10.0)
        assert row["end"] == "resumed"
        assert "rank 2 was asked to leave" in row["reason"]

    outcomes = run(tmp_path / "job", meanwhile, steps=10_000)
    assert {outcome.code for outcome in outcomes} == {exits.REQUEUE}


def test_the_last_rung_saves_and_gives_the_job_back(tmp_path: Path) -> None:
    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        store.pause("job", wait_s=10.0, hold_s=60.0, by="test", request_id="a")
        # The store may go with the ranks before it can be asked.
        try:
            row = wait_outcome(store, "a", ended, 10.0)
        except StoreLostError:
            return
        assert row["end"] == "saved"

    outcomes = run(tmp_path / "job", meanwhile, steps=10_000)
    assert {outcome.code for outcome in outcomes} == {exits.REQUEUE}
    assert (tmp_path / "job" / "ck" / "LATEST").exists()


def test_all_ranks_stopped_while_paused_and_woken_one_after_the_other(
    tmp_path: Path, unpaused: str
) -> None:
    """scontrol suspend during a pause: SIGSTOP for longer than the time-out, a staggered wake."""

    def meanwhile(store: NetStore, pids: list[int], place: Path) -> None:
        store.pause("nothing", wait_s=10.0, hold_s=2.0, by="test", request_id="a")
        assert wait_outcome(store, "a", paused, 10.0)["stage"] == "held"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(COLLECTIVE_S * 1.5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        assert wait_outcome(store, "a", ended, 20.0)["end"] == "resumed"

    found = values(run(tmp_path / "job", meanwhile))
    assert {value["digest"] for value in found} == {unpaused}


def test_slurms_suspend_finds_all_ranks_at_a_safe_point(tmp_path: Path) -> None:
    """SIGTSTP, two seconds, SIGSTOP for longer than the time-out, SIGCONT rank by rank."""
    place = tmp_path / "job"
    place.mkdir(mode=0o700)
    with served(place, COLLECTIVE_S) as server:

        def beside(pids: list[int]) -> None:
            until(lambda: at_step(place, 0) >= 3, 20.0, "step 3")
            everybody = [*pids, server.pid]
            for pid in everybody:
                os.kill(pid, signal.SIGTSTP)
            time.sleep(2.0)
            for pid in everybody:
                os.kill(pid, signal.SIGSTOP)
            before = at_step(place, 0)
            time.sleep(COLLECTIVE_S * 1.5)
            assert at_step(place, 0) == before
            for pid in reversed(everybody):
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.3)

        outcomes = run_ranks(3, train, place, 150, COLLECTIVE_S, limit_s=50.0, meanwhile=beside)
    found = values(outcomes)
    assert {value["steps"] for value in found} == {150}
    assert len({value["digest"] for value in found}) == 1


# --- what the protocol prevents ---------------------------------------------------------------


def _naive(rank: int, place: Path) -> str:
    """Pausing by a signal and a sleep, each rank for itself."""
    sleeping: list[bool] = []
    signal.signal(signal.SIGUSR1, lambda *_: sleeping.append(True))
    shorten_timeout(COLLECTIVE_S)
    value = torch.ones(4)
    try:
        for step in range(10_000):
            if sleeping:
                time.sleep(COLLECTIVE_S * 1.5)
                sleeping.clear()
            dist.all_reduce(value)
            time.sleep(0.02)
            (place / f"step-{rank}").write_text(str(step))
            if step >= 300:
                return "survived"
    except RuntimeError as exc:
        return f"failed: {str(exc)[:200]}"
    return "survived"


def test_the_naive_pause_kills_the_job(tmp_path: Path) -> None:
    """SIGUSR1 and sleep, heard by two of three ranks: the third waits in a collective and dies.

    pause-lock-peers: one rank that goes on alone blocks, and takes the others with it.
    """

    def beside(pids: list[int]) -> None:
        until(lambda: at_step(tmp_path, 2) >= 3, 20.0, "step 3")
        for pid in pids[:2]:
            os.kill(pid, signal.SIGUSR1)

    found = values(run_ranks(3, _naive, tmp_path, limit_s=40.0, meanwhile=beside))
    assert any(value.startswith("failed") for value in found), found

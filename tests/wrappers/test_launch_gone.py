"""ft-runs that die, and ranks that cannot start: nobody is left behind, and nobody acts twice.

Followers wait some seconds here instead of half a minute; everything else is the product's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from slurm_ext.domain.attempt import Attempt, Cause, parse_attempts
from slurm_ft import exits
from tests.wrappers.launched import Slurm, await_true, finish, program, ready

_HASTY = """
import sys
from slurm_ft.launch import joining, lead, main, pulse
lead.PEERS_S = 0.5
pulse.SILENCE_S, pulse.STAGGER_S, pulse.BEAT_S = 2.0, 1.0, 0.2
joining.BEAT_S = 0.2
sys.exit(main.main())
"""
LOST = "--leaving=lost peer"


def start(slurm: Slurm, rank: int, size: int, *argv: str, **more: str) -> subprocess.Popen[str]:
    """The ft-run of one rank of a step."""
    variables = {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_PROCID": str(rank), **more}
    return subprocess.Popen(
        [sys.executable, "-c", _HASTY, *argv],
        env={**slurm.variables, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ledger(slurm: Slurm) -> tuple[Attempt, ...]:
    path = slurm.state / "attempts-77.json"
    return parse_attempts(path.read_text(), str(path)).attempts


def lose_leader(slurm: Slurm) -> list[tuple[int, str, str]]:
    """Three ranks, of which rank 0's ft-run is killed; then the others see that a peer is lost."""
    marks = [slurm.root / f"ready{rank}" for rank in range(3)]
    ranks = [
        start(slurm, rank, 3, *program(f"--ready={mark}", LOST)) for rank, mark in enumerate(marks)
    ]
    pids = [ready(mark) for mark in marks]
    await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger of rank 0")
    ranks[0].kill()
    for pid in pids[1:]:
        # To the program alone: nobody has asked the job to leave.
        os.kill(pid, signal.SIGUSR2)
    return [finish(rank) for rank in ranks]


def words(ended: list[tuple[int, str, str]]) -> str:
    """What they told; on a busy machine any of them may be the first."""
    return "".join(err for _, _, err in ended)


# -- the leader is gone ---------------------------------------------------------------------------


def test_another_rank_takes_the_place_of_rank_0_and_requeues_once(slurm: Slurm):
    ended = lose_leader(slurm)
    assert [code for code, _, _ in ended] == [-signal.SIGKILL, exits.ABANDONED, exits.ABANDONED]
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    (attempt,) = ledger(slurm)
    assert (attempt.cause, attempt.requeued, attempt.saved_step) == (Cause.LOST_PEER, True, 10)
    assert attempt.ranks == 3
    assert words(ended).count("takes its place; job 77 comes back") == 1


def test_what_somebody_requeued_already_is_not_requeued_again(slurm: Slurm):
    """Slurm's record is the arbiter, whoever was faster."""
    slurm.record(state="PENDING", restarts="1")
    ended = lose_leader(slurm)
    assert slurm.calls("requeue") == []
    assert "job 77 comes back" in words(ended)


def test_without_slurms_record_nobody_acts_in_rank_0_s_place(slurm: Slurm):
    slurm.record(raw="78")
    ended = lose_leader(slurm)
    assert slurm.calls("requeue") == []
    assert "job 77 is not requeued" in words(ended)


def test_an_error_of_the_program_is_none_of_the_killed_leader(slurm: Slurm):
    """Rank 2 fails by itself; then rank 0's ft-run dies, for whatever reason."""
    mark = slurm.root / "ready0"
    zero = start(slurm, 0, 3, *program(f"--ready={mark}"))
    ready(mark)
    two = start(slurm, 2, 3, *program("--after=0", "--exit=1"))
    assert finish(two)[0] == 1
    await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger of rank 0")
    zero.kill()
    one = start(slurm, 1, 3, *program("--after=0", LOST))
    assert finish(one)[0] == exits.ABANDONED
    finish(zero)
    assert slurm.calls("requeue") == []
    assert ledger(slurm)[0].cause is Cause.USER_ERROR


def test_the_bounds_hold_for_whoever_decides(slurm: Slurm):
    """A node that kills ft-run in every attempt must not bring the job back for ever."""
    past = [
        Attempt(n, 10.0 * n, 4, ended_s=10.0 * n + 5, cause=Cause.LOST_PEER, requeued=True)
        for n in range(5)
    ]
    slurm.state.mkdir(parents=True)
    (slurm.state / "attempts-77.json").write_text(
        json.dumps(
            {"job_id": "77", "version": 1, "attempts": [_plain(attempt) for attempt in past]}
        )
    )
    slurm.variables["SLURM_RESTART_COUNT"] = "5"
    slurm.record(restarts="5")
    ended = lose_leader(slurm)
    assert slurm.calls("requeue") == []
    assert "requeued 5 of 5 times for this already" in words(ended)


def _plain(attempt: Attempt) -> dict[str, object]:
    return {
        "number": attempt.number,
        "started_s": attempt.started_s,
        "gpus": attempt.gpus,
        "ended_s": attempt.ended_s,
        "cause": attempt.cause,
        "requeued": attempt.requeued,
    }


def test_a_leader_that_waits_for_the_controller_is_not_replaced(slurm: Slurm):
    """It takes longer than the others would wait for a leader that is gone."""
    (slurm.root / "away").write_text("3")  # asked again after 1, 2 and 4 seconds
    marks = [slurm.root / f"ready{rank}" for rank in (0, 1)]
    ranks = [
        start(slurm, rank, 2, *program(f"--ready={mark}", "--after=1", LOST))
        for rank, mark in enumerate(marks)
    ]
    begun = time.monotonic()
    ended = [finish(rank) for rank in ranks]
    assert time.monotonic() - begun > 6
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "takes its place" not in ended[1][2]


def test_a_leader_whose_program_goes_on_is_not_replaced(slurm: Slurm):
    """Rank 1 has lost its peer; rank 0 trains on and may be about to save."""
    zero = start(slurm, 0, 2, *program("--after=6", LOST))
    await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger of rank 0")
    one = start(slurm, 1, 2, *program("--after=0", LOST))
    ended = [finish(zero), finish(one)]
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "takes its place" not in ended[1][2]


# -- a rank that cannot start ---------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["missing", "on-resume"])
def test_a_rank_that_cannot_start_ends_the_others_within_seconds(
    slurm: Slurm, failing: int, kind: str
):
    slurm.variables["SLURM_RESTART_COUNT"] = "1"
    slurm.record(restarts="1")
    option = f'--on-resume=[ "$RANK" != {failing} ] || exit 5' if kind == "on-resume" else ""
    options = [option] if option else []
    mark = slurm.root / "ready"
    # Without a status: the program still waits for the other rank.
    waiting = start(slurm, 1 - failing, 2, *options, *program("--bare", f"--ready={mark}"))
    ready(mark)
    command = ("--", "/no/such") if kind == "missing" else program("--bare")
    failed = start(slurm, failing, 2, *options, *command, SLURMD_NODENAME="n08")
    code = 127 if kind == "missing" else 5
    begun = time.monotonic()
    results = [finish(failed), finish(waiting)]
    assert time.monotonic() - begun < 15
    assert [result[0] for result in results] == [code, code]
    why = f"rank {failing} on n08 could not start: "
    why += "/no/such: No such file" if kind == "missing" else "the command of --on-resume ended"
    assert f"ft-run: {why}" in results[0][2]
    assert "the other ranks are ended" in results[0][2]
    last = ledger(slurm)[-1]
    assert (last.number, last.cause, last.exit_code) == (1, Cause.USER_ERROR, code)
    assert last.reason.startswith(why)
    assert slurm.calls("requeue") == []


def test_ranks_that_have_met_are_not_ended_by_a_late_one(slurm: Slurm):
    """A session is open: a mark of this attempt that appears now is no reason to lose work."""
    mark = slurm.root / "ready"
    zero = start(slurm, 0, 2, *program(f"--ready={mark}", "--after=3"))
    ready(mark)
    failed = start(slurm, 1, 2, "--", "/no/such")
    assert finish(failed)[0] == 127
    assert finish(zero)[0] == 0


# -- the batch script -----------------------------------------------------------------------------


def batch(slurm: Slurm, code: int, *options: str) -> tuple[int, str, str]:
    """What the last line of the script does."""
    for name in [n for n in slurm.variables if n.startswith("SLURM_STEP")]:
        del slurm.variables[name]
    return slurm.run(*options, f"--after={code}")


def kill_step(slurm: Slurm, *options: str) -> None:
    """A step whose ft-run leaves nothing but its ledger and the status of a rank."""
    mark = slurm.root / "ready"
    process = slurm.start(*options, *program(f"--ready={mark}"), SLURM_STEP_ID="3")
    ready(mark)
    await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger")
    process.kill()
    finish(process)


def test_the_batch_script_requeues_a_step_that_was_killed_whole(slurm: Slurm):
    kill_step(slurm)
    code, _, err = batch(slurm, 137)
    assert code == 137
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "no ft-run of its step is left; job 77 comes back" in err
    (attempt,) = ledger(slurm)
    assert (attempt.cause, attempt.requeued) == (Cause.LOST_PEER, True)
    # Once more, should the script ask twice.
    assert batch(slurm, 137)[0] == 137
    assert len(slurm.calls("requeue")) == 1


@pytest.mark.parametrize("code", [0, 3])
def test_the_batch_script_has_nothing_to_decide(slurm: Slurm, code: int):
    assert slurm.run(*program("--after=0", f"--exit={code}"))[0] == code
    assert batch(slurm, code)[0] == code
    assert slurm.calls("requeue") == []


def test_the_batch_script_of_a_cancelled_job_requeues_nothing(slurm: Slurm):
    kill_step(slurm)
    slurm.record(state="CANCELLED")
    assert batch(slurm, 137)[0] == 137
    assert slurm.calls("requeue") == []


def test_the_batch_script_knows_nothing_of_a_program_that_saved_nothing(slurm: Slurm):
    mark = slurm.root / "ready"
    process = slurm.start(*program("--bare", f"--ready={mark}"))
    ready(mark)
    await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger")
    process.kill()
    finish(process)
    assert batch(slurm, 137)[0] == 137
    assert slurm.calls("requeue") == []


@pytest.mark.parametrize("opened", [True, False])
def test_a_step_that_slurm_could_not_launch_everywhere_comes_back(slurm: Slurm, opened: bool):
    """A slurmd that is gone when srun begins: no program of the step has done anything wrong.

    ``opened``: rank 0's ft-run had begun when Slurm killed what was there of the step.
    """
    if opened:
        mark = slurm.root / "ready"
        process = slurm.start(*program("--bare", f"--ready={mark}"), SLURM_STEP_ID="0")
        ready(mark)
        await_true(lambda: (slurm.state / "attempts-77.json").exists(), "ledger")
        process.kill()
        finish(process)
    code, _, err = batch(slurm, 233)
    assert code == 233
    assert slurm.calls("requeue") == ["scontrol requeue 77"]
    assert "Slurm could not start the step: a node did not answer" in err
    (attempt,) = ledger(slurm)
    assert (attempt.cause, attempt.requeued) == (Cause.LOST_PEER, True)


def test_a_program_s_own_code_is_no_launch_that_failed(slurm: Slurm):
    assert slurm.run(*program("--after=0", "--exit=233"))[0] == 233
    assert batch(slurm, 233)[0] == 233
    assert slurm.calls("requeue") == []


@pytest.mark.parametrize("code", [1, 140])
def test_an_srun_that_fails_by_its_own_options_is_not_tried_again(slurm: Slurm, code: int):
    assert batch(slurm, code)[0] == code
    assert slurm.calls("requeue") == []


@pytest.mark.parametrize("word", ["", "x", "256", "-1"])
def test_no_code_is_an_error(slurm: Slurm, word: str):
    code, _, err = slurm.run(f"--after={word}")
    assert code == 2
    assert "--after" in err


def test_the_other_ranks_of_one_node_are_not_waited_for_without_a_state_directory(slurm: Slurm):
    """Nobody can be told: srun's own --kill-on-bad-exit is what is left."""
    blocked = slurm.root / "file"
    blocked.write_text("")
    code, _, err = slurm.run(
        f"--state-dir={blocked}/x", "--", "/no/such", SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1"
    )
    assert code == 127
    assert "No such file" in err
    assert not os.path.exists(f"{blocked}/x")

"""`slurm_ft.comm.Comm` on real ranks: what every implementation must do alike."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import slurm_ft
from slurm_ft import status, variables
from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.comms import choose
from slurm_ft.session.errors import SessionError
from tests.wrappers.comm_exercise import exercise, expected
from tests.wrappers.mpi_launcher import MpiLauncher
from tests.wrappers.ranks import run_ranks, values


def test_alone() -> None:
    assert exercise(choose(1.0)) == expected(0, 1)


def test_torch_ranks() -> None:
    replies = values(run_ranks(3, lambda rank: exercise(choose(5.0))))
    assert replies == [expected(rank, 3) for rank in range(3)]


def _in_two_groups(rank: int) -> Any:
    mine = None
    for members in ([0, 2], [1, 3]):
        group = dist.new_group(members)
        if rank in members:
            mine = group
    return exercise(choose(5.0, mine))


def test_a_session_may_take_part_of_the_world() -> None:
    replies = values(run_ranks(4, _in_two_groups))
    assert replies == [expected(rank // 2, 2) for rank in range(4)]


def test_a_group_without_torch_distributed_is_an_error() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        choose(1.0, object())


def _late_peer(rank: int) -> Any:
    comm = choose(5.0)
    if rank == 1:
        time.sleep(1.5)
        return None
    began = time.monotonic()
    with pytest.raises(ExchangeLostError, match=r"barrier between 2 ranks did not end within 0.3"):
        comm.barrier(limit_s=0.3)
    waited_s = time.monotonic() - began
    with pytest.raises(ExchangeLostError, match="not used again, because barrier"):
        comm.gather(1)
    began = time.monotonic()
    comm.close()
    return {"waited_s": waited_s, "close_s": time.monotonic() - began}


def test_a_late_peer_is_not_waited_for_beyond_the_limit() -> None:
    reply = values(run_ranks(2, _late_peer))[0]
    assert 0.3 <= reply["waited_s"] < 1.0
    assert reply["close_s"] < 0.2


def _dying_peer(rank: int) -> Any:
    comm = choose(20.0)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ExchangeLostError, match="a peer is"):
        comm.start_max(1).result()
    return time.monotonic() - began


def test_a_dead_peer_is_noticed_at_once() -> None:
    outcomes = run_ranks(2, _dying_peer)
    assert outcomes[1].code == -signal.SIGKILL
    assert outcomes[0].code == 0, outcomes[0].error
    assert outcomes[0].value < 5.0


MPI_PROGRAM = """
import json, time
from mpi4py import MPI
from slurm_ft.comm import ExchangeLostError
from slurm_ft.session.comms import choose
from slurm_ft.session.comms.mpi import MpiComm
from tests.wrappers.comm_exercise import exercise

comm = choose(10.0)
assert isinstance(comm, MpiComm), comm
reply = exercise(comm)
late = choose(10.0)
if late.rank == 0:
    began = time.monotonic()
    try:
        late.barrier(limit_s=0.3)
    except ExchangeLostError as exc:
        reply["late"] = str(exc)
    reply["waited_s"] = time.monotonic() - began
    try:
        late.start_max(1)
    except ExchangeLostError as exc:
        reply["again"] = str(exc)
MPI.COMM_WORLD.Barrier()
if late.rank != 0:
    late.barrier()
replies = MPI.COMM_WORLD.gather(reply)
if replies is not None:
    print(json.dumps(replies), flush=True)
"""


def test_mpi_ranks(mpi: MpiLauncher) -> None:
    run = mpi.run(3, MPI_PROGRAM)
    assert run.returncode == 0, run.stderr
    replies = json.loads(run.stdout)
    first = replies[0]
    assert "barrier between 3 ranks did not end within 0.3 s" in first.pop("late")
    assert "not used again, because barrier" in first.pop("again")
    assert 0.3 <= first.pop("waited_s") < 2.0
    assert replies == [expected(rank, 3) for rank in range(3)]


def _forks(rank: int, place: Path, how: str) -> list[Any]:
    """Rank 1 forks at step 5; how its child ended, and what its status says of an error."""
    os.environ.update(
        {
            variables.JOB: "7",
            variables.STATUS: str(place / f"status-{rank}.json"),
            variables.CHECKPOINT_DIR: str(place / "ck"),
            variables.COLLECTIVE_TIMEOUT_S: "10",
        }
    )
    state = {"w": torch.ones(3)}
    parent, ended = os.getpid(), 0
    code = 9
    try:
        with slurm_ft.session(state=state, checkpoint="sync") as ft:
            for step in range(1, 21):
                dist.all_reduce(torch.ones(1))
                if step == 5 and rank == 1:
                    child = os.fork()
                    if child == 0 and how == "raises":
                        raise ZeroDivisionError("the child's own")
                    if child == 0 and how == "leaves":
                        break
                    if child == 0:
                        ft.step(step) if how == "steps" else ft.save(step)
                    ended = _wait(child)
                    between = status.read(place / "status-1.json")
                    assert between is not None
                    assert (between.done, between.failed) == (False, None)
                ft.step(step)
                if step == 12:
                    ft.save(step)
        code = 0
    except ZeroDivisionError:
        code = 3
    except SessionError as exc:
        code = 4 if "was forked by rank 1" in str(exc) else 5
    finally:
        if os.getpid() != parent:
            os._exit(code)
    said = status.read(place / f"status-{rank}.json")
    assert said is not None
    assert (said.done, said.step, said.saved_step) == (True, 20, 12)
    return [ended, said.failed]


def _wait(child: int) -> int:
    """How it ended; it waits for nobody, so a second is long."""
    end_s = time.monotonic() + 8.0
    while time.monotonic() < end_s:
        pid, word = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(word)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


@pytest.mark.parametrize(
    ("how", "code"), [("leaves", 0), ("raises", 3), ("steps", 4), ("saves", 4)]
)
def test_a_forked_child_has_no_part_in_the_session(tmp_path: Path, how: str, code: int) -> None:
    """It would speak with its rank's voice to the others, and end what its rank still needs."""
    found = values(run_ranks(2, lambda rank: _forks(rank, tmp_path, how)))
    assert found[1] == [code, None]

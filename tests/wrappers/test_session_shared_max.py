"""Maxima of ranks that share a node, on real ranks: right, limited, and never in half of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slurm_ft
from slurm_ft import variables
from slurm_ft.comm import ExchangeLostError
from slurm_ft.session import comms
from slurm_ft.session.agreement import MAX_PAYLOAD, Kind, pack
from slurm_ft.session.comms import choose, for_agreement, shared_max
from slurm_ft.session.comms.board import AHEAD, LARGEST, ROW_BYTES, SMALLEST
from slurm_ft.session.comms.segment import Offer, Segment, SegmentError, create, join
from slurm_ft.session.comms.shared_max import SharedMax, share
from tests.wrappers.mpi_launcher import MpiLauncher
from tests.wrappers.ranks import Outcome, run_ranks, values

ROUNDS = 3000


def shared(limit_s: float = 10.0) -> SharedMax:
    maxima = share(choose(10.0), limit_s)
    assert maxima is not None
    return maxima


def leftovers(temporary: Path) -> list[str]:
    """What a crash might leave where such memory could have a name.

    Of /dev/shm what is ours: tests of other programs may run on this machine.
    """
    return [str(path) for path in (*temporary.iterdir(), *Path("/dev/shm").glob("*slurm*ft*"))]


def _said(rank: int, number: int) -> int:
    """What a rank says in a round: known to all, so that each can check every result."""
    return random.Random(rank * 1_000_003 + number).choice(
        (0, 0, rank, pack(Kind.LEAVE, MAX_PAYLOAD - number), SMALLEST + number, LARGEST - rank)
    )


def _rounds(rank: int, size: int) -> int:
    maxima = shared()
    rng = random.Random(rank)
    under_way: deque[tuple[int, Any]] = deque()
    for number in range(ROUNDS):
        if rng.random() < 0.01:
            time.sleep(rng.random() * 0.01)
        under_way.append((number, maxima.start_max(_said(rank, number))))
        # Now read at once, now as late as possible, and now left to start_max itself.
        while under_way and rng.random() < 0.4:
            at, pending = under_way.popleft()
            if rng.random() < 0.1 and pending.done():
                assert pending.done()
            assert pending.result() == max(_said(r, at) for r in range(size)), f"round {at}"
    for at, pending in under_way:
        assert pending.result() == max(_said(r, at) for r in range(size)), f"round {at}"
    maxima.close()
    return len(under_way)


def test_all_ranks_read_the_same_in_thousands_of_rounds() -> None:
    left = values(run_ranks(4, lambda rank: _rounds(rank, 4), limit_s=50))
    # The rows are far shorter than what was under way: what was overwritten had been read.
    assert max(left) > 2 * AHEAD


def _watch_one_end(rank: int) -> dict[str, Any] | None:
    maxima = shared(limit_s=30.0)
    maxima.start_max(1).result()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ExchangeLostError) as caught:
        maxima.start_max(1).result()
    waited_s = time.monotonic() - began
    with pytest.raises(ExchangeLostError, match="not used again, because maximum failed"):
        maxima.start_max(1)
    return {"waited_s": waited_s, "words": str(caught.value)}


def test_a_killed_peer_is_named_within_a_second(tmp_path: Path) -> None:
    before = leftovers(tmp_path)
    outcomes = run_ranks(3, _watch_one_end, env={"TMPDIR": str(tmp_path)})
    assert outcomes[1].code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.code == 0, outcome.error
        assert "rank 1 ended: a peer is gone" in outcome.value["words"]
        assert outcome.value["waited_s"] < 1.5
    assert leftovers(tmp_path) == before


def _last_words_count(rank: int) -> int:
    maxima = shared()
    pending = maxima.start_max(5 + rank)
    if rank == 1:
        os._exit(0)  # begun, and gone before the others read
    time.sleep(0.5)
    return pending.result()


def test_what_a_rank_said_before_it_ended_is_still_read() -> None:
    outcomes = run_ranks(3, _last_words_count)
    assert [outcomes[0].value, outcomes[2].value] == [7, 7]


def _one_does_not_come(rank: int) -> Any:
    comm = choose(10.0)
    maxima = share(comm, 10.0)
    assert maxima is not None
    if rank == 2:
        comm.barrier()
        return None
    began = time.monotonic()
    with pytest.raises(ExchangeLostError, match=r"did not end within 0\.6 s, rank 2 did not come"):
        maxima.start_max(1).result(limit_s=0.6)
    waited_s = time.monotonic() - began
    comm.barrier()
    return waited_s


def test_a_rank_that_does_not_come_is_named_at_the_limit() -> None:
    waited = values(run_ranks(3, _one_does_not_come))
    assert 0.6 <= waited[0] < 1.6
    assert 0.6 <= waited[1] < 1.6


def _stopped(rank: int) -> int:
    maxima = shared()
    maxima.start_max(0).result()
    if rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        time.sleep(0.5)
    return maxima.start_max(rank).result()


def test_a_stopped_peer_is_waited_for() -> None:
    """A rank that Slurm suspends is no dead one."""

    def wake(pids: list[int]) -> None:
        # After several of the looks that a waiting rank takes at its peers.
        end = time.monotonic() + 20
        stat = Path(f"/proc/{pids[1]}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGCONT)

    assert values(run_ranks(2, _stopped, meanwhile=wake)) == [1, 1]


def _worker_ends(rank: int) -> int:
    """A data loader's worker shares neither the life nor the death of its rank."""
    maxima = shared()
    pid = os.fork()
    if pid == 0:
        maxima.close()
        os._exit(0)
    os.waitpid(pid, 0)
    if rank == 1:
        time.sleep(0.7)
    return maxima.start_max(rank).result()


def test_a_forked_child_that_ends_ends_nothing() -> None:
    assert values(run_ranks(2, _worker_ends)) == [1, 1]


def _closed(rank: int) -> str:
    maxima = shared()
    pending = maxima.start_max(rank)
    assert pending.result() == 1
    maxima.close()
    maxima.close()
    assert pending.result() == 1
    with pytest.raises(ExchangeLostError, match="because it was closed") as caught:
        maxima.start_max(1)
    return str(caught.value)


def test_closed_it_is_not_used_again_and_what_was_read_stays() -> None:
    assert values(run_ranks(2, _closed))[1].startswith("rank 1: ")


# --- whether it is used ---------------------------------------------------------------------------


def _refuse(*args: Any) -> Segment:
    raise SegmentError("this rank sees another /proc")


def _refuse_making(*args: Any) -> tuple[Segment, Offer]:
    raise SegmentError("no anonymous files here")


def _other_memory(offer: Offer, rank: int) -> Segment:
    """Memory that looks right, and that rank 0 does not see."""
    return create(offer.bytes_)[0]


def _own_copy(offer: Offer, rank: int) -> Segment:
    """The right locks beside memory that only this rank sees."""
    joined = join(offer, rank)
    joined.memory.release()
    joined.memory = memoryview(bytearray(offer.bytes_))
    return joined


FAULTS: dict[str, tuple[int, str, Callable[..., Any]]] = {
    "a rank in a container of its own": (2, "join", _refuse),
    "rank 0 cannot make it": (0, "create", _refuse_making),
    "the memory is not the same": (1, "join", _other_memory),
    "what is written is not seen": (1, "join", _own_copy),
    "locks are not seen": (1, "alive", lambda segment, rank: False),
}


def _with_a_fault(rank: int, where: int, name: str, fault: Callable[..., Any]) -> dict[str, Any]:
    if rank == where:
        setattr(Segment if name == "alive" else shared_max, name, fault)
    comm = choose(10.0)
    maxima = for_agreement(comm, 10.0)
    return {
        "inner": maxima is comm,
        "max": [maxima.start_max(rank).result() for _ in range(3)],
        "mapped": "slurm-ft" in Path("/proc/self/maps").read_text(),
        "held": [fd for fd in _descriptors() if "slurm-ft" in fd],
    }


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        # That of the listing itself is gone.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.mark.parametrize("kind", FAULTS)
def test_where_one_rank_cannot_all_agree_by_messages(kind: str) -> None:
    replies = values(run_ranks(3, _with_a_fault, *FAULTS[kind]))
    assert replies == [{"inner": True, "max": [2, 2, 2], "mapped": False, "held": []}] * 3


def _all_can(rank: int) -> list[bool]:
    maxima = for_agreement(choose(10.0), 10.0)
    mapped = "slurm-ft" in Path("/proc/self/maps").read_text()
    return [isinstance(maxima, SharedMax), mapped, any("slurm-ft" in fd for fd in _descriptors())]


def test_where_all_can_all_do() -> None:
    assert values(run_ranks(3, _all_can)) == [[True, True, True]] * 3


def _killed_in_the_handshake(rank: int, where: int, name: str) -> str:
    def die(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == where:
        setattr(shared_max, name, die)
    with pytest.raises(ExchangeLostError) as caught:
        share(choose(5.0), 5.0)
    return str(caught.value)


@pytest.mark.parametrize(("where", "name"), [(0, "_fault"), (0, "_unproved"), (1, "join")])
def test_killed_in_the_handshake_a_rank_leaves_no_file_and_no_peer_waiting(
    tmp_path: Path, where: int, name: str
) -> None:
    before = leftovers(tmp_path)
    outcomes: list[Outcome] = run_ranks(
        3, _killed_in_the_handshake, where, name, limit_s=40, env={"TMPDIR": str(tmp_path)}
    )
    assert outcomes[where].code == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != where:
            assert outcome.code == 0, outcome.error
            assert "a peer is" in outcome.value
    assert leftovers(tmp_path) == before


# --- in a session ---------------------------------------------------------------------------------


def _in_session(rank: int, place: str, shares: bool) -> dict[str, Any]:
    """Steps at which each rank did what was wanted: the same with and without shared memory."""
    os.environ[variables.CHECKPOINT_DIR] = place
    if not shares:
        comms.share = lambda comm, limit_s: None  # type: ignore[assignment]
    did: list[tuple[int, int]] = []
    with slurm_ft.session(checkpoint="none") as ft:
        step = 0
        ft.on_agreed[Kind.PAUSE] = lambda epoch: did.append((step, epoch))
        uses = isinstance(ft._agreement._maxima, SharedMax)
        for step in range(1, 111):
            time.sleep(0.001 * (1 + rank))
            if step == 20 + 30 * rank:
                ft.want(Kind.PAUSE, rank + 1)
            ft.step(step)
    return {"uses": uses, "did": did}


@pytest.mark.parametrize("shares", [True, False])
def test_a_session_does_the_same_at_the_same_steps(tmp_path: Path, shares: bool) -> None:
    replies = values(run_ranks(3, _in_session, str(tmp_path), shares))
    assert [reply["uses"] for reply in replies] == [shares] * 3
    assert replies[0]["did"] == replies[1]["did"] == replies[2]["did"]
    assert [epoch for _, epoch in replies[0]["did"]] == [1, 2, 3]
    # Steps as short as these are agreed on at every tenth safe point at most: two rounds later.
    for rank, (step, _) in enumerate(replies[0]["did"]):
        assert 20 + 30 * rank < step <= 40 + 30 * rank


MPI_PROGRAM = """
import json
from mpi4py import MPI
import slurm_ft
from slurm_ft.session.agreement import Kind
from slurm_ft.session.comms.shared_max import SharedMax

did = []
with slurm_ft.session(checkpoint="none") as ft:
    step = 0
    ft.on_agreed[Kind.PAUSE] = lambda epoch: did.append([step, epoch])
    uses = isinstance(ft._agreement._maxima, SharedMax)
    for step in range(1, 61):
        if step == 5 and ft.rank == 1:
            ft.want(Kind.PAUSE, 7)
        ft.step(step)
replies = MPI.COMM_WORLD.gather([uses, did])
if replies is not None:
    print(json.dumps(replies), flush=True)
"""


def test_mpi_ranks_share_too(mpi: MpiLauncher) -> None:
    run = mpi.run(2, MPI_PROGRAM)
    assert run.returncode == 0, run.stderr
    first, second = json.loads(run.stdout)
    assert first == second
    uses, did = first
    assert uses
    assert [epoch for _, epoch in did] == [7]


def test_a_row_is_what_a_rank_costs() -> None:
    """Of memory: one line, whatever the length of the job."""
    assert ROW_BYTES == 64

"""The store over TCP: what it keeps, whom it answers, and what a stranger can do (nothing)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.pause import wire
from slurm_ft.pause.address import (
    Address,
    address_path,
    address_paths,
    find_address,
    new_key,
    read_address,
    step_of,
    write_address,
)
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.protocol import COMMIT, Board, Key, Request, Rung, abort
from slurm_ft.pause.server import BoardServer
from slurm_ft.pause.table import KEPT_EPOCHS, StoreLostError, Table

LIMITS = Limits(ack_s=2, slack_s=0.5, lost_s=1, release_s=2, restore_s=2, up_s=5)


@pytest.fixture
def address() -> Iterator[Address]:
    """A served store that two ranks have joined."""
    key = new_key()
    loop = asyncio.new_event_loop()
    server = BoardServer(key, LIMITS, most_strangers=64)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1"), loop).result(5.0)
    address = Address("127.0.0.1", port, 0, key)
    store = NetStore(address)
    store.join(0, 2)
    store.close()
    yield address

    async def end() -> None:
        await server.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(5.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5.0)


def test_first_writer_wins(address: Address) -> None:
    one, two = NetStore(address), NetStore(address)
    assert one.pause("nothing", wait_s=5, hold_s=5, by="me", request_id="a")["end"] is None
    one.write(1, Key.DECISION, abort("one"))
    two.write(1, Key.DECISION, abort("two"))
    assert one.read(1).decision == two.read(1).decision == abort("one")
    two.write(1, Key.ACK, 2)
    one.write(1, Key.ACK, 1)
    assert two.read(1).acks == 3


def test_waiting_ends_with_the_news(address: Address) -> None:
    store, other = NetStore(address), NetStore(address)
    other.pause("nothing", wait_s=5, hold_s=5, by="me")
    seen = store.read(1)
    began_s = time.monotonic()
    assert store.wait(1, seen, 0.2).decision == ""
    assert time.monotonic() - began_s >= 0.15
    timer = threading.Timer(0.2, lambda: other.write(1, Key.DECISION, abort("x")))
    timer.start()
    began_s = time.monotonic()
    assert store.wait(1, seen, 10.0).decision == abort("x")
    assert time.monotonic() - began_s < 5.0


def test_an_epoch_wakes_who_listens(address: Address) -> None:
    store, other = NetStore(address), NetStore(address)
    assert store.newest_after(0, 0.05) == 0
    timer = threading.Timer(0.1, lambda: other.pause("memory", wait_s=5, hold_s=5, by="me"))
    timer.start()
    assert store.newest_after(0, 10.0) == 1


def test_two_pauses_at_once_are_one(address: Address) -> None:
    store = NetStore(address)
    assert store.pause("nothing", wait_s=5, hold_s=5, by="a", request_id="a")["end"] is None
    refused = store.pause("nothing", wait_s=5, hold_s=5, by="b", request_id="b")
    assert refused["end"] == "refused"
    assert "under way" in refused["reason"]
    # A resume means the one under way, not the refused one.
    resumed = store.resume("enough")
    assert resumed is not None
    assert resumed["id"] == "a"


def test_a_pause_nobody_listens_for_is_refused() -> None:
    async def ask() -> str:
        server = BoardServer(new_key(), LIMITS)
        await server.start("127.0.0.1")
        outcome = server.pause(Rung.HOLD, wait_s=1, hold_s=1, by="me")
        await server.stop()
        return outcome.reason

    assert "no rank of this attempt listens" in asyncio.run(ask())


# --- strangers ----------------------------------------------------------------------------------


def _greeting(address: Address) -> tuple[socket.socket, str]:
    stranger = socket.create_connection((address.host, address.port), 5.0)
    stranger.settimeout(5.0)
    nonce = json.loads(stranger.makefile("rb").readline())["nonce"]
    return stranger, nonce


def _left(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""


def test_a_stranger_learns_and_changes_nothing(address: Address) -> None:
    """Another user on the node connects to the port, asks for entries and forges values."""
    store = NetStore(address)
    store.pause("nothing", wait_s=5, hold_s=5, by="me")
    before = store.read(1)
    for op in ("read", "write", "pause", "resume", "status", "newest"):
        stranger, _ = _greeting(address)
        ask = {"op": op, "epoch": 1, "key": "decision", "value": "commit", "rung": "job"}
        stranger.sendall(json.dumps(ask).encode() + b"\n")
        assert _left(stranger) == b""
        stranger.close()
    with pytest.raises(StoreLostError, match="closed"):
        NetStore(Address(address.host, address.port, 0, new_key())).resume("forged")
    assert store.read(1) == before


def test_a_proof_of_another_connection_is_worth_nothing(address: Address) -> None:
    stranger, nonce = _greeting(address)
    mine = "00" * 16
    # What a listener could have recorded: right key, other nonce.
    recorded = wire.proof(address.key, "client", "ff" * 16, mine)
    assert recorded != wire.proof(address.key, "client", nonce, mine)
    stranger.sendall(json.dumps({"nonce": mine, "proof": recorded}).encode() + b"\n")
    assert _left(stranger) == b""


def test_a_forged_or_repeated_line_ends_the_connection(address: Address) -> None:
    for spoil in ("forged", "repeated"):
        stranger, nonce = _greeting(address)
        mine = wire.new_nonce()
        hello = {"nonce": mine, "proof": wire.proof(address.key, "client", nonce, mine)}
        stranger.sendall(json.dumps(hello).encode() + b"\n")
        assert b"proof" in stranger.recv(4096)
        seal = wire.Seal(address.key, "client", nonce, mine)
        line = seal.close({"op": "status"})
        if spoil == "forged":
            line = line.replace(b"status", b"resume")
            stranger.sendall(line)
        else:
            stranger.sendall(line)
            assert b"ok" in stranger.recv(4096)
            stranger.sendall(line)
        assert _left(stranger) == b""
        stranger.close()


def test_a_server_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as fake:
        port = fake.getsockname()[1]

        def pretend() -> None:
            connection, _ = fake.accept()
            connection.sendall(b'{"nonce":"00"}\n')
            connection.recv(4096)
            connection.sendall(b'{"proof":"00"}\n')
            connection.close()

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(StoreLostError, match="does not know the key"):
            NetStore(Address("127.0.0.1", port, 0, new_key())).read(1)
        thread.join(5.0)


@given(st.binary(max_size=200))
def test_no_bytes_pass_a_seal(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.Seal(b"k" * 32, "client", "a", "b").open(data + b"\n")


def test_boards_and_entries_survive_the_wire() -> None:
    request = Request(3, "abc", Rung.JOB, 1.5, 2.5, "me")
    board = Board(request, 5, "commit", 1 << 70, "why", 3, "go", 8)
    assert wire.to_board(json.loads(json.dumps(wire.from_board(board)))) == board
    assert wire.to_entry("request", wire.from_value(request)) == (Key.REQUEST, request)
    for key, value in (("decision", None), ("nothing", "x"), ("ack", True), ("request", {"a": 1})):
        with pytest.raises(ProtocolError):
            wire.to_entry(key, value)


def test_a_crowd_of_strangers_does_not_shut_the_ranks_out(address: Address) -> None:
    """Half-open connections: the oldest makes room, and whoever knows the key comes in."""
    crowd = [socket.create_connection((address.host, address.port), 5.0) for _ in range(100)]
    for stranger in crowd:
        stranger.settimeout(5.0)
    store = NetStore(address)
    assert store.newest() == 0
    store.close()
    # The first of them was sent away for it; one that were kept would let this wait in vain.
    while _left(crowd[0]):
        pass
    for stranger in crowd:
        stranger.close()


def test_strangers_do_not_fill_the_output(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        stranger, _ = _greeting(address)
        stranger.sendall(b'{"nonce":"00","proof":"00"}\n')
        assert _left(stranger) == b""
        stranger.close()
    told = [row for row in caplog.records if "does not know the key" in row.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize(
    "said",
    [
        b'{"nonce":"\\ud800"}\n{"proof":"\\ud800"}\n',
        b'{"nonce":' + b"9" * 5000 + b"}\n",
        b'{"nonce":null}\n[]\n',
        b"[" * 60000 + b"\n",
        b"\xff\xfe\n",
        b"x" * 200_000,
    ],
)
def test_an_impostor_at_the_port_of_a_dead_store_is_only_no_answer(said: bytes) -> None:
    """Whatever it says, a rank must be told nothing else than that the store is lost."""
    with socket.create_server(("127.0.0.1", 0)) as fake:
        port = fake.getsockname()[1]

        def pretend() -> None:
            connection, _ = fake.accept()
            # The rank may hang up before it has heard all of it.
            with connection, suppress(OSError):
                connection.sendall(said)
                connection.settimeout(2.0)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(StoreLostError):
            NetStore(Address("127.0.0.1", port, 0, new_key()), 1.0).read(1)
        fake.close()
        thread.join(5.0)


def test_an_impostor_cannot_keep_a_rank_waiting_byte_by_byte() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as fake:
        port = fake.getsockname()[1]

        def dribble() -> None:
            connection, _ = fake.accept()
            with connection:
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=dribble, daemon=True)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(StoreLostError, match="time"):
            NetStore(Address("127.0.0.1", port, 0, new_key()), 0.5).read(1)
        assert time.monotonic() - began_s < 3.0
        stop.set()
        thread.join(5.0)


def _join(address: Address, rank: int, who: str) -> tuple[socket.socket, wire.Seal]:
    """Join as another process would; the connection stays open."""
    other, nonce = _greeting(address)
    mine = wire.new_nonce()
    hello = {"nonce": mine, "proof": wire.proof(address.key, "client", nonce, mine)}
    other.sendall(json.dumps(hello).encode() + b"\n")
    assert b"proof" in other.recv(4096)
    seal = wire.Seal(address.key, "client", nonce, mine)
    other.sendall(seal.close({"op": "join", "rank": rank, "size": 2, "who": who}))
    assert b"ok" in other.recv(4096)
    return other, seal


def test_ranks_of_two_sessions_are_not_counted_for_each_other(address: Address) -> None:
    """Two groups with a session each: a commit by one rank of either would split both."""
    store = NetStore(address)
    first, _ = _join(address, 0, "process 7 on a")
    second, _ = _join(address, 0, "process 8 on b")
    row = store.pause("nothing", wait_s=5, hold_s=5, by="me")
    assert row["end"] == "refused"
    assert "both call themselves rank 0" in row["reason"]
    # The same process once more is a rank that has connected again.
    second.close()
    third, _ = _join(address, 0, "process 7 on a")
    end_s = time.monotonic() + 5.0
    while store.pause("nothing", wait_s=5, hold_s=5, by="me")["end"] == "refused":
        assert time.monotonic() < end_s, "the closed connection still counts"
        time.sleep(0.02)
    for other in (first, third):
        other.close()


def _committed(address: Address) -> tuple[NetStore, NetStore, NetStore]:
    """Two ranks in a pause, each with a connection, and somebody who looks on."""
    one, two, other = NetStore(address), NetStore(address), NetStore(address)
    assert other.pause("nothing", wait_s=5, hold_s=60, by="me")["end"] is None
    one.write(1, Key.ACK, 1)
    two.write(1, Key.ACK, 2)
    assert other.read(1).decision == COMMIT
    return one, two, other


def test_a_paused_rank_whose_connections_are_gone_has_ended(address: Address) -> None:
    """Its ft-run may have been killed with it: nobody else would tell before the resume."""
    one, two, other = _committed(address)
    # The thread that listens waits for an answer that is not due for long.
    listens, seal = _join(address, 1, "process 7 on a")
    listens.sendall(seal.close({"op": "newest", "after": 1, "limit_s": 60.0}))
    listens.close()
    two.close()
    began_s = time.monotonic()
    board = other.wait(1, other.read(1), 10.0)
    assert board.gone == 2
    assert LIMITS.lost_s * 0.5 < time.monotonic() - began_s < 5.0
    for store in (one, other):
        store.close()


def test_a_paused_rank_that_connects_again_has_not(address: Address) -> None:
    one, two, other = _committed(address)
    two.close()
    two.write(1, Key.PAUSED, 2)
    assert other.wait(1, other.read(1), LIMITS.lost_s * 2).gone == 0
    # Nor one of which the thread that listens still has its connection.
    two.join(1, 2)
    one.close()
    one.join(0, 2)
    assert other.wait(1, other.read(1), LIMITS.lost_s * 2).gone == 0
    for store in (one, two, other):
        store.close()


def test_more_ranks_than_a_line_can_tell_of_are_refused_at_once(address: Address) -> None:
    with pytest.raises(ProtocolError, match="rank 0 of 20000"):
        NetStore(address).join(0, 20000)
    most = 1 << 13
    everybody = (1 << most) - 1
    board = Board(Request(1, "a", by="x" * 100), everybody, "commit", everybody, "y" * 300)
    full = replace(board, ups=everybody, gone=everybody, go="z" * 300)
    message = {"op": "wait", "epoch": 1, "seen": wire.from_board(full), "limit_s": 1.0}
    assert len(wire.Seal(b"k", "client", "a", "b").close(message)) < wire.MOST_LINE_BYTES


# --- the table and the private file -------------------------------------------------------------


def test_only_a_request_opens_the_next_epoch() -> None:
    table = Table()
    assert not table.write(1, Key.DECISION, "commit")
    assert not table.write(2, Key.REQUEST, Request(2, "a"))
    assert table.write(1, Key.REQUEST, Request(1, "a"))
    assert table.newest() == 1
    assert table.write(1, Key.DECISION, "commit")
    assert not table.write(1, Key.DECISION, abort("late"))
    assert table.read(1).decision == "commit"


def test_old_boards_go_and_the_dead_stay_dead() -> None:
    table = Table()
    assert table.write(7, Key.GONE, 4)
    for epoch in range(1, KEPT_EPOCHS + 3):
        assert table.write(epoch, Key.REQUEST, Request(epoch, str(epoch)))
    assert table.read(1).request is None
    assert table.read(KEPT_EPOCHS + 2).request is not None
    assert table.read(KEPT_EPOCHS + 2).gone == 4


def test_the_key_is_private(tmp_path: Path) -> None:
    path = address_path(tmp_path, "7", 3)
    assert read_address(path) is None
    address = Address("node1", 4711, 3, new_key())
    write_address(path, address)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_address(path) == address
    assert address.key.hex() not in repr(address)
    path.chmod(0o640)
    with pytest.raises(ProtocolError, match="0640"):
        read_address(path)


def test_steps_that_run_side_by_side_have_stores_of_their_own(tmp_path: Path) -> None:
    """And ranks that mpirun has started by a step of its own find the one of rank 0."""
    steps = {step: Address("node1", 4711 + n, 0, new_key()) for n, step in enumerate(("0", "1"))}
    for step, address in steps.items():
        write_address(address_path(tmp_path, "7", 0, step), address)
    assert {step: find_address(tmp_path, "7", 0, step) for step in steps} == steps
    assert find_address(tmp_path, "7", 0, "2") is None
    assert find_address(tmp_path, "7", 1, "0") is None
    assert find_address(tmp_path, "77", 0, "0") is None
    assert address_paths(tmp_path, "7", 0) == [
        address_path(tmp_path, "7", 0, step) for step in ("0", "1")
    ]
    batch = Address("node1", 4700, 0, new_key())
    write_address(address_path(tmp_path, "7", 0), batch)
    assert find_address(tmp_path, "7", 0, "") == find_address(tmp_path, "7", 0, "2") == batch
    assert find_address(tmp_path, "7", 0, "1") == steps["1"]
    assert step_of({"SLURM_STEP_ID": "4"}) == "4"
    assert step_of({}) == step_of({"SLURM_STEP_ID": "../x"}) == ""


def test_a_link_is_not_followed_to_a_key(tmp_path: Path) -> None:
    write_address(tmp_path / "real", Address("node1", 4711, 0, new_key()))
    os.symlink(tmp_path / "real", address_path(tmp_path, "7", 0))
    with pytest.raises(ProtocolError):
        read_address(address_path(tmp_path, "7", 0))

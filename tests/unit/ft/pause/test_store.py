"""The store over TCP: what it keeps, whom it answers, and what a stranger can do (nothing)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.pause import wire
from slurm_ft.pause.address import Address, address_path, new_key, read_address, write_address
from slurm_ft.pause.client import NetStore
from slurm_ft.pause.limits import Limits
from slurm_ft.pause.protocol import Board, Key, Request, Rung, abort
from slurm_ft.pause.server import BoardServer
from slurm_ft.pause.table import KEPT_EPOCHS, StoreLostError, Table

LIMITS = Limits(ack_s=2, slack_s=0.5, lost_s=1, release_s=2, restore_s=2, up_s=5)


@pytest.fixture
def address() -> Iterator[Address]:
    """A served store that two ranks have joined."""
    key = new_key()
    loop = asyncio.new_event_loop()
    server = BoardServer(key, LIMITS)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1"), loop).result(5.0)
    address = Address("127.0.0.1", port, 0, key)
    store = NetStore(address)
    store.join(0, 2)
    store.close()
    yield address
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(5.0)
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
    path = address_path(tmp_path, 3)
    assert read_address(path) is None
    address = Address("node1", 4711, 3, new_key())
    write_address(path, address)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_address(path) == address
    assert address.key.hex() not in repr(address)
    path.chmod(0o640)
    with pytest.raises(ProtocolError, match="0640"):
        read_address(path)


def test_a_link_is_not_followed_to_a_key(tmp_path: Path) -> None:
    write_address(tmp_path / "real", Address("node1", 4711, 0, new_key()))
    os.symlink(tmp_path / "real", address_path(tmp_path, 0))
    with pytest.raises(ProtocolError):
        read_address(address_path(tmp_path, 0))

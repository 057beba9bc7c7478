"""Messages between a rank and the store: lines of JSON, each sealed.

Both sides prove that they know the key before anything else is said, without sending it; then
every line carries a MAC over the connection's own key, its direction and its number, so that a
line can neither be forged, nor replayed, nor moved to another connection. Nothing is encrypted:
what is said is no secret, only who says it matters.

    server  {"nonce": S}                     client  {"nonce": C, "proof": mac(key, C|S|"client")}
    server  {"proof": mac(key, ...)}         client  SEAL {"op": ...}      server  SEAL {"ok": ...}
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any

from slurm_ext.domain.codec import loads, plain
from slurm_ext.domain.errors import ProtocolError
from slurm_ft.pause.protocol import Board, Key, Request

MOST_LINE_BYTES = 65536
_NONCE_BYTES = 16
_SEAL = 64
_OP_PLACE = "pause store"


def new_nonce() -> str:
    """What makes this connection unlike any other."""
    return secrets.token_hex(_NONCE_BYTES)


def proof(key: bytes, side: str, server_nonce: str, client_nonce: str) -> str:
    """That ``side`` knows the key."""
    text = _bytes(f"{side}|{server_nonce}|{client_nonce}")
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def proves(key: bytes, side: str, server_nonce: str, client_nonce: str, said: object) -> bool:
    """Whether the other side knows the key."""
    wanted = proof(key, side, server_nonce, client_nonce)
    return isinstance(said, str) and hmac.compare_digest(wanted.encode(), _bytes(said))


def _bytes(text: str) -> bytes:
    """JSON can say what UTF-8 cannot, and whoever says it need not know the key."""
    return text.encode(errors="surrogatepass")


class Seal:
    """One direction of one connection; the sender and the receiver each have one."""

    def __init__(self, key: bytes, side: str, server_nonce: str, client_nonce: str) -> None:
        text = _bytes(f"seal|{side}|{server_nonce}|{client_nonce}")
        self._key = hmac.new(key, text, hashlib.sha256).digest()
        self._count = 0

    def close(self, message: dict[str, Any]) -> bytes:
        """The message as a line."""
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        return self._mac(body).encode() + b" " + body + b"\n"

    def open(self, line: bytes) -> dict[str, Any]:
        """The message of a line. Raises ProtocolError where the seal is broken."""
        seal, body = line[:_SEAL], line[_SEAL + 1 :].rstrip(b"\n")
        if not hmac.compare_digest(self._mac(body).encode(), seal):
            raise ProtocolError(f"{_OP_PLACE}: a message is not by whom it should be")
        return open_plain(body)

    def _mac(self, body: bytes) -> str:
        self._count += 1
        text = str(self._count).encode() + b"|" + body
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()


def open_plain(line: bytes) -> dict[str, Any]:
    """A line of the greeting, or ProtocolError."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{_OP_PLACE}: a line is not JSON") from exc
    if not isinstance(message, dict):
        raise ProtocolError(f"{_OP_PLACE}: a line is not a JSON object")
    return message


def from_board(board: Board) -> Any:
    """A board as JSON types."""
    return plain(board)


def to_board(raw: Any) -> Board:
    """The other way, or ProtocolError."""
    return loads(Board, json.dumps(raw), _OP_PLACE)


def from_value(value: str | int | Request) -> Any:
    """What is written, as JSON types."""
    return plain(value)


def to_entry(raw_key: Any, raw: Any) -> tuple[Key, str | int | Request]:
    """A key and its value, or ProtocolError."""
    try:
        key = Key(raw_key)
    except ValueError as exc:
        raise ProtocolError(f"{_OP_PLACE}: {raw_key!r:.40} is no entry") from exc
    if key is Key.REQUEST:
        return key, loads(Request, json.dumps(raw), _OP_PLACE)
    if isinstance(raw, bool) or not isinstance(raw, str | int):
        raise ProtocolError(f"{_OP_PLACE}: {key}={raw!r:.40} is no value")
    return key, raw

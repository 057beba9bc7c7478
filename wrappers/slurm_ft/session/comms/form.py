"""Values as bytes: JSON, because what crosses between ranks is never unpickled.

A frame is eight bytes of length, the data, and padding: collectives want equal lengths from all.
"""

from __future__ import annotations

import json
from typing import Any


def encode(value: Any) -> bytes:
    """UTF-8 JSON. Raises TypeError or ValueError where the value has no such form.

    Floats that JSON does not know (inf, nan) cross as Python writes them: both ends are ours.
    """
    return json.dumps(value, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The value again; tuples have become lists."""
    return json.loads(data)


def frame(data: bytes, longest: int) -> bytearray:
    """The data with its length in front, padded to the longest of all ranks."""
    framed = bytearray(8 + longest)
    framed[:8] = len(data).to_bytes(8, "big")
    framed[8 : 8 + len(data)] = data
    return framed


def unframe(framed: bytes | bytearray) -> Any:
    """The value inside a frame."""
    return decode(bytes(framed[8 : 8 + int.from_bytes(framed[:8], "big")]))

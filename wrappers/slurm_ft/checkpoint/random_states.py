"""Random states of one rank, and its place in the data: a small JSON file beside the checkpoint.

A file for each rank, because a key that several ranks share would keep one rank's state only.
Torch and numpy are looked at only where the program has imported them; no state is pickled.
On another number of ranks, rank ``r`` takes the states of the old rank ``r`` where there was one,
and keeps what the program seeded otherwise: no two ranks ever get the same states.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.hashing import write_new

VERSION = 1


def file_name(rank: int) -> str:
    """Name of a rank's file inside the checkpoint."""
    return f"rank-{rank:05d}.json"


def capture() -> dict[str, Any]:
    """The states of this process, as JSON values."""
    kind, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [kind, _pack(words), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = [name, _pack(keys.tolist()), position, has_gauss, cached]
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = _text(torch.get_rng_state())
        # Asking for the states of a device that is not in use yet would make it so.
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = [_text(state) for state in torch.cuda.get_rng_state_all()]
    return states


def apply(states: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """Set the states of this process; returns which ones were set."""
    done: list[str] = []
    try:
        kind, words, gauss = states["python"]
        random.setstate((kind, _unpack(words), gauss))
        done.append("python")
        if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
            name, words, position, has_gauss, cached = states["numpy"]
            keys = numpy.array(_unpack(words), dtype=numpy.uint32)
            numpy.random.set_state((name, keys, position, has_gauss, cached))
            done.append("numpy")
        if (torch := sys.modules.get("torch")) is not None:
            if "torch" in states:
                torch.set_rng_state(_tensor(torch, states["torch"]))
                done.append("torch")
            if "cuda" in states and torch.cuda.is_available():
                count = torch.cuda.device_count()
                for device, text in enumerate(states["cuda"][:count]):
                    torch.cuda.set_rng_state(_tensor(torch, text), device)
                done.append("cuda")
    except (KeyError, TypeError, ValueError, RuntimeError) as exc:
        raise CheckpointError(f"{place}: its random states cannot be used ({exc})") from exc
    return tuple(done)


def write(directory: Path, rank: int, states: Mapping[str, Any], position: Any) -> None:
    """Write a rank's file; on disk when this returns."""
    document = {"version": VERSION, "states": states, "position": position}
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    write_new(directory / file_name(rank), text.encode())


def read(directory: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """States and position from a rank's file, whose digest the caller has checked."""
    place = directory / name
    try:
        document = json.loads(place.read_bytes())
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']!r}, this side knows {VERSION}")
        states, position = document["states"], document["position"]
        if not isinstance(states, dict) or not isinstance(position, dict):
            raise ValueError("states or position is not an object")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{place}: cannot be read: {exc}") from exc
    return states, position


def _pack(words: Any) -> str:
    packed = array("I", words)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


def _unpack(text: str) -> tuple[int, ...]:
    packed = array("I", base64.b64decode(text, validate=True))
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def _text(state: Any) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _tensor(torch: Any, text: str) -> Any:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)

"""The manifest: what a complete checkpoint consists of. No I/O here, standard library only.

A directory is a checkpoint when it holds a manifest that verifies, and nothing otherwise. The
manifest is written last, before the rename, and carries a digest of itself, so that a manifest cut
off by a failing disk is not taken for a short one.

The newest checkpoint is the one with the highest ``serial``, not with the highest step: somebody
who goes back to an earlier step and trains on from there must not be thrown forward again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_ext.domain.codec import plain
from slurm_ext.domain.errors import ProtocolError

MANIFEST = "MANIFEST.json"
MANIFEST_VERSION = 1
# 140 GB of frozen weights in blocks of 16 MiB are 9,000 keys, or 600 kB.
MAX_MANIFEST_BYTES = 64 << 20

# Who wrote the data: torch.distributed.checkpoint's own files, those with shared blocks beside
# them, or a function of the user.
DCP = "dcp"
BLOCKS = "blocks"
FILES = "files"
LAYOUTS = (DCP, BLOCKS, FILES)

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_WHOLE = ("version", "step", "serial", "world_size", "attempt")


@dataclass(frozen=True, slots=True)
class Meta:
    """What the program says about a checkpoint; each mapping must have a JSON form.

    ``plan`` is the configuration that the attempt ran with. ``position`` is the place in the data,
    kept for each rank by itself. ``extra`` is for the program's own use.
    """

    attempt: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file, named relative to the checkpoint's directory."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One block in the shared store, named by its sha256."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that must be known before a checkpoint is read.

    ``rng`` names, for each rank in order, the file with its random states and its position.
    ``torch`` is the version that wrote it, empty where torch had no part in it. ``block_store`` is
    where the blocks lie, empty where there are none.
    """

    step: int
    serial: int
    world_size: int
    made_s: float
    layout: str
    attempt: int = 0
    torch: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    position: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    rng: tuple[str, ...] = ()
    files: tuple[FileEntry, ...] = ()
    blocks: tuple[BlockEntry, ...] = ()
    block_store: str = ""
    version: int = MANIFEST_VERSION

    @property
    def own_bytes(self) -> int:
        """Bytes of the files in the checkpoint's own directory."""
        return sum(entry.size for entry in self.files)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks that it uses, which other checkpoints may use too."""
        return sum(entry.size for entry in self.blocks)

    def to_json(self) -> str:
        """The manifest with its digest, as one line."""
        body = plain(self)
        return _line({**body, "digest": _digest(body)}) + "\n"


def parse_manifest(text: str, place: str) -> Manifest:
    """Read a manifest, or raise ProtocolError that names ``place`` and what is wrong."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise ProtocolError(f"{place}: longer than {MAX_MANIFEST_BYTES} bytes; not read")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"{place}: not JSON ({exc}); not read") from exc
    if not isinstance(raw, dict):
        raise ProtocolError(f"{place}: not a JSON object; not read")
    said = raw.pop("digest", None)
    if raw.get("version") != MANIFEST_VERSION:
        raise ProtocolError(
            f"{place}: version {raw.get('version')!r}, this side knows {MANIFEST_VERSION}"
        )
    if said != _digest(raw):
        raise ProtocolError(f"{place}: its own digest does not fit it: it was damaged or changed")
    names = {item.name for item in dataclasses.fields(Manifest)}
    if set(raw) != names:
        raise ProtocolError(f"{place}: keys {sorted(set(raw) ^ names)} are missing or unknown")
    return _checked(raw, place)


def _checked(raw: dict[str, Any], place: str) -> Manifest:
    def wrong(what: str) -> ProtocolError:
        return ProtocolError(f"{place}: {what}; not read")

    for key in _WHOLE:
        if type(raw[key]) is not int or raw[key] < 0:
            raise wrong(f"{key}={raw[key]!r} is not a whole number from 0")
    if raw["world_size"] < 1:
        raise wrong("world_size=0")
    if type(raw["made_s"]) not in (int, float):
        raise wrong(f"made_s={raw['made_s']!r} is not a number")
    if raw["layout"] not in LAYOUTS:
        raise wrong(f"layout={raw['layout']!r} is not one of {', '.join(LAYOUTS)}")
    for key in ("torch", "block_store"):
        if not isinstance(raw[key], str):
            raise wrong(f"{key} is not a string")
    for key in ("plan", "position", "extra"):
        if not isinstance(raw[key], dict):
            raise wrong(f"{key} is not an object")
    if not isinstance(raw["rng"], list) or not all(isinstance(item, str) for item in raw["rng"]):
        raise wrong("rng is not a list of names")
    files = tuple(_entry(FileEntry, item, "name", "sha256", wrong) for item in _list(raw, "files"))
    blocks = tuple(_entry(BlockEntry, item, "key", "key", wrong) for item in _list(raw, "blocks"))
    for entry in files:
        if not is_inside(entry.name):
            raise wrong(f"the file {entry.name!r} would lie outside the checkpoint")
    if len({entry.name for entry in files}) != len(files):
        raise wrong("a file is listed twice")
    if not set(raw["rng"]) <= {entry.name for entry in files}:
        raise wrong("rng names files that are not listed")
    return Manifest(**{**raw, "rng": tuple(raw["rng"]), "files": files, "blocks": blocks})


def is_inside(name: str) -> bool:
    """Whether a relative name stays inside the directory that it is relative to."""
    parts = name.split("/")
    return bool(name) and not name.startswith("/") and not {"", ".", ".."} & set(parts)


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw[key]
    return value if isinstance(value, list) else [value]


def _entry(kind: type[Any], item: Any, name: str, digest: str, wrong: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(item, dict) or set(item) != names:
        raise wrong(f"{item!r:.80} is not an object with {', '.join(sorted(names))}")
    if not isinstance(item[name], str) or type(item["size"]) is not int or item["size"] < 0:
        raise wrong(f"{item!r:.80} has a name or size of the wrong kind")
    if not isinstance(item[digest], str) or not _SHA256.match(item[digest]):
        raise wrong(f"{item!r:.80} has no sha256")
    return kind(**item)


def _line(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_line(body).encode()).hexdigest()

"""The manifest: what is written is what is read, and nothing else is read at all."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ProtocolError
from slurm_ft.checkpoint.manifest import (
    LAYOUTS,
    BlockEntry,
    FileEntry,
    Manifest,
    _digest,
    is_inside,
    parse_manifest,
)

SHA = "ab" * 32
words = st.text(max_size=12)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | words
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(words, values, max_size=3)
counts = st.integers(0, 10**15)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
names = st.lists(
    st.text("abc.-_0", min_size=1, max_size=6).filter(lambda n: n not in (".", "..")),
    min_size=1,
    max_size=3,
).map("/".join)
files = st.lists(
    st.builds(FileEntry, names, counts, digests), max_size=4, unique_by=lambda f: f.name
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    listed = tuple(draw(files))
    return Manifest(
        step=draw(counts),
        serial=draw(counts),
        world_size=draw(st.integers(1, 10**6)),
        made_s=draw(st.floats(0, 1e11)),
        layout=draw(st.sampled_from(LAYOUTS)),
        attempt=draw(counts),
        torch=draw(words),
        plan=draw(mappings),
        position=draw(mappings),
        extra=draw(mappings),
        rng=tuple(entry.name for entry in listed[:2]),
        files=listed,
        blocks=tuple(draw(st.lists(st.builds(BlockEntry, digests, counts), max_size=3))),
        block_store=draw(words),
    )


def forged(**changes: Any) -> str:
    """A manifest with a right digest and something else wrong."""
    raw = json.loads(sample().to_json())
    del raw["digest"]
    raw |= changes
    return json.dumps({**raw, "digest": _digest(raw)})


def sample() -> Manifest:
    return Manifest(
        1,
        2,
        3,
        4.5,
        "dcp",
        rng=("a",),
        files=(FileEntry("a", 1, SHA),),
        blocks=(BlockEntry(SHA, 1),),
    )


@given(manifests())
def test_reads_what_it_wrote(manifest: Manifest) -> None:
    assert parse_manifest(manifest.to_json(), "here") == manifest


@given(manifests(), st.data())
def test_a_manifest_that_was_cut_off_is_never_read(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_json()
    cut = data.draw(st.integers(0, len(text) - 2))  # without the line's end it is whole
    with pytest.raises(ProtocolError):
        parse_manifest(text[:cut], "here")


@given(st.integers(0, len(sample().to_json()) - 2), st.integers(1, 127))
def test_a_manifest_with_a_changed_character_is_never_taken_for_another(at: int, flip: int) -> None:
    text = sample().to_json()
    changed = text[:at] + chr(ord(text[at]) ^ flip) + text[at + 1 :]
    with contextlib.suppress(ProtocolError):
        assert parse_manifest(changed, "here") == sample()  # e.g. white space outside of strings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"files": [{"name": "../etc/passwd", "size": 1, "sha256": SHA}]}, "outside"),
        ({"files": [{"name": "/etc/passwd", "size": 1, "sha256": SHA}]}, "outside"),
        ({"files": [{"name": "a", "size": 1, "sha256": SHA}] * 2}, "twice"),
        ({"files": [{"name": "a", "size": -1, "sha256": SHA}]}, "wrong kind"),
        ({"files": [{"name": "a", "size": True, "sha256": SHA}]}, "wrong kind"),
        ({"files": [{"name": "a", "size": 1, "sha256": "xyz"}]}, "sha256"),
        ({"files": "a"}, "not an object"),
        ({"files": []}, "rng names files"),
        ({"blocks": [{"key": "../../x", "size": 1}]}, "sha256"),
        ({"layout": "zip"}, "layout"),
        ({"world_size": 0}, "world_size"),
        ({"step": 1.5}, "step"),
        ({"plan": []}, "plan"),
        ({"surplus": 1}, "surplus"),
        ({"version": 2}, "version 2"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ProtocolError, match="here.*" + told):
        parse_manifest(forged(**changes), "here")


def test_is_inside() -> None:
    assert is_inside("a/b")
    assert not any(map(is_inside, ("", "/a", "a/../b", "..", "a//b", "./a", "a/")))

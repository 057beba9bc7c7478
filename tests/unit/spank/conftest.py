"""Builds the C side once for each worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.spank.peers import LUA_MODULE, Peer, build


@pytest.fixture(scope="session")
def spank_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``ft-grammar-check`` and the log of ``make check``."""
    if not shutil.which("make") or not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler on this machine")
    return build(tmp_path_factory.mktemp("spank"))


def _env() -> dict[str, str]:
    return {**os.environ, "TZ": "UTC", "LC_ALL": "C"}


@pytest.fixture(scope="session")
def c_peer(spank_build: Path) -> Iterator[Peer]:
    """The C grammar."""
    peer = Peer([str(spank_build / "ft-grammar-check")], _env())
    yield peer
    peer.close()


@pytest.fixture(scope="session", params=["lua5.1", "lua5.4"])
def lua_peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """The Lua grammar, in the releases that Slurm is built with."""
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed (package {request.param})")
    script = Path(__file__).parent / "grammar_check.lua"
    peer = Peer([request.param, str(script), str(LUA_MODULE)], _env())
    yield peer
    peer.close()

"""C, Lua and Python accept and refuse the same values and write the same document."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurm_ext.domain.directive import from_json, parse_options
from slurm_ext.domain.errors import DirectiveError
from tests.unit.spank.corpus import SEEDS, corpus
from tests.unit.spank.peers import Answer, Peer
from tests.unit.spank.values import NOW_S, longest, one_option

_SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True, scope="module")
def _utc() -> Iterator[None]:
    """The peers run in UTC; a zone with summer time has hours that libc may read either way."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def _python(given_options: Sequence[tuple[str, bytes]]) -> Answer:
    try:
        # As argv reaches Python; what is not UTF-8 arrives as surrogates.
        values = {name: value.decode("utf-8", "surrogateescape") for name, value in given_options}
        return Answer(True, "", parse_options(values, now_s=NOW_S).to_json())
    except DirectiveError as exc:
        return Answer(False, str(exc))


def _agree(peer: Peer, given_options: Sequence[tuple[str, bytes]]) -> None:
    theirs = peer.ask(NOW_S, given_options)
    ours = _python(given_options)
    assert (theirs.ok, theirs.json) == (ours.ok, ours.json), (given_options, theirs, ours)
    if not theirs.ok:
        return
    # Canonical text parses to itself, and the document reads back to the same document.
    again = [
        (name, value.encode()) for name, _, value in (w.partition("=") for w in theirs.text.split())
    ]
    assert peer.ask(NOW_S, again) == theirs
    assert from_json(theirs.json).to_json() == theirs.json


_BORDER = [
    ("epochs", b"1000000"),
    ("epochs", b"1000000.0001"),
    ("epochs", b"0.0001"),
    ("epochs", b"0.00010"),
    ("samples", b"1000000000000"),
    ("samples", b"1000000000001"),
    ("steps", b"1\n"),
    ("batch", b"16777216-16777216"),
    ("gpus", b"1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31"),
    ("gpus", b"1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31,33"),
    ("gpus", b"4096,1-2,3,2-8"),
    ("quality", b"a<=-0.000000"),
    ("quality", b"a>=-0.000001"),
    ("quality", b"a>=1000000000.1"),
    ("max-pause", b"30-00"),
    ("max-pause", b"30-00:00:01"),
    ("max-pause", b"0:01"),
    ("max-pause", b"0"),
    ("deadline", b"2096-02-29"),
    ("deadline", b"2100-02-29"),
    ("deadline", b"2199-12-31T23:59:59-14:59"),
    ("deadline", b"now+3650-00"),
    ("deadline", b"now+3650-00:00:01"),
    ("deadline", b"now+60"),
    ("deadline", b"now+521weeks"),
    ("model", b"m" * 96 + b"@" + b"r" * 64),
    ("model", b"m" * 97),
    ("model", b"m@"),
    ("dataset", b"d" * 255),
    ("dataset", b"~/card.yaml"),
    ("frozen", b"0"),
    ("input", b"1x2x3x4x5"),
    ("input", b"224x"),
]


@pytest.mark.parametrize("option", _BORDER, ids=lambda o: f"{o[0]}={o[1][:24].decode()!r}")
def test_c_agrees_at_the_borders(c_peer: Peer, option: tuple[str, bytes]) -> None:
    _agree(c_peer, [option])


@pytest.mark.parametrize("option", _BORDER, ids=lambda o: f"{o[0]}={o[1][:24].decode()!r}")
def test_lua_agrees_at_the_borders(lua_peer: Peer, option: tuple[str, bytes]) -> None:
    _agree(lua_peer, [option])


@_SETTINGS
@given(option=one_option())
@example(option=("gpus", b",1"))
def test_c_agrees_on_single_options(c_peer: Peer, option: tuple[str, bytes]) -> None:
    _agree(c_peer, [option])


@_SETTINGS
@given(option=one_option())
@example(option=("gpus", b",1"))
def test_lua_agrees_on_single_options(lua_peer: Peer, option: tuple[str, bytes]) -> None:
    _agree(lua_peer, [option])


_several = st.lists(one_option(), min_size=2, max_size=8, unique_by=lambda pair: pair[0])


@settings(_SETTINGS, max_examples=50)
@given(options=_several)
def test_c_agrees_on_several_options(c_peer: Peer, options: list[tuple[str, bytes]]) -> None:
    good = [pair for pair in options if _python([pair]).ok]
    _agree(c_peer, good)


@settings(_SETTINGS, max_examples=50)
@given(options=_several)
def test_lua_agrees_on_several_options(lua_peer: Peer, options: list[tuple[str, bytes]]) -> None:
    good = [pair for pair in options if _python([pair]).ok]
    _agree(lua_peer, good)


def _limit_agrees(peer: Peer) -> None:
    for size, fits in ((1024, True), (1025, False)):
        options = [(name, value.encode()) for name, value in longest(size).items()]
        answer = peer.ask(NOW_S, options)
        assert answer.ok == fits == _python(options).ok
        if fits:
            assert len(answer.json) == 1024
            _agree(peer, options)


def test_c_agrees_on_the_limit_of_the_document(c_peer: Peer) -> None:
    _limit_agrees(c_peer)


def test_lua_agrees_on_the_limit_of_the_document(lua_peer: Peer) -> None:
    _limit_agrees(lua_peer)


def test_c_agrees_on_the_corpus(c_peer: Peer) -> None:
    _corpus_agrees(c_peer)


def test_lua_agrees_on_the_corpus(lua_peer: Peer) -> None:
    _corpus_agrees(lua_peer)


def _corpus_agrees(peer: Peer) -> None:
    accepted: dict[str, int] = dict.fromkeys(SEEDS, 0)
    refused: dict[str, int] = dict.fromkeys(SEEDS, 0)
    for name, value in corpus(3000, seed=20):
        _agree(peer, [(name, value)])
        (accepted if _python([(name, value)]).ok else refused)[name] += 1
    # Agreement on nonsense alone would prove nothing.
    assert min(accepted.values()) >= 10, accepted
    assert min(refused.values()) >= 10, refused

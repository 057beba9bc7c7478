"""Operators' requests for pauses on their way through the daemon."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurm_ext.control.asks import KEPT_S, MAX_ASKS, AskDesk, Munge
from slurm_ext.control.spool import SpoolThread
from slurm_ext.domain.codec import dumps
from slurm_ext.domain.errors import ProtocolError
from slurm_ext.domain.pausing import PauseAsk, Rung, answer_name, parse_answer, parse_ask
from slurm_ext.domain.request import PLANS

NOW = 10_000.0
ME = os.getuid()
ASK = PauseAsk("0123456789abcdef", "pause", "7", NOW - 1, Rung.MEMORY, by="ann", credential="mine")


class Spool:
    """A spool whose thread is this one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = root / str(ME)
        self.plans = root / PLANS
        self.own.mkdir()
        self.plans.mkdir()

    def call(self, work: Callable[[Any], Any]) -> Any:
        return work(SimpleNamespace(root=self.root))

    def put(self, ask: PauseAsk) -> Path:
        path = self.own / ask.name
        path.write_text(dumps(ask) + "\n")
        os.utime(path, (ask.at_s, ask.at_s))
        return path


def vouched_by(credential: str, words: str) -> int:
    if credential != "mine":
        raise ProtocolError("credential: munge does not confirm it")
    return ME


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> AskDesk:
    monkeypatch.setattr("pwd.getpwnam", lambda name: SimpleNamespace(pw_uid=ME))
    return AskDesk(Munge(lambda words: "daemon", vouched_by), lambda: {"ann"})


def passed(desk: AskDesk, spool: Spool, now: float = NOW) -> list[tuple[str, str]]:
    found = desk.pass_on(cast(SpoolThread, spool), {"7"}, now)
    return [(one.ask.id, one.refusal) for one in found]


def test_an_operators_request_is_passed_on_once(desk: AskDesk, spool: Spool) -> None:
    spool.put(ASK)
    assert passed(desk, spool) == [(ASK.id, "")]
    given = parse_ask((spool.plans / ASK.name).read_text(), "plans")
    assert (given.credential, given.by) == ("daemon", "ann, an operator")
    assert passed(desk, spool, NOW + 5) == []


def test_a_withdrawn_request_goes_with_its_file(desk: AskDesk, spool: Spool) -> None:
    path = spool.put(ASK)
    passed(desk, spool)
    path.unlink()
    passed(desk, spool, NOW + 5)
    assert list(spool.plans.iterdir()) == []


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (replace(ASK, job_id="8"), "job 8 does not run"),
        (replace(ASK, credential="stolen"), "munge does not confirm it"),
    ],
)
def test_a_refusal_is_answered(desk: AskDesk, spool: Spool, ask: PauseAsk, why: str) -> None:
    spool.put(ask)
    assert why in passed(desk, spool)[0][1]
    answer = parse_answer((spool.plans / answer_name(ask.id)).read_text(), "plans")
    assert answer.end == "refused"
    assert why in answer.reason


def test_a_request_that_a_killed_command_left_is_dealt_with_once(
    desk: AskDesk, spool: Spool
) -> None:
    """Else it would be refused anew, and journaled, whenever the daemon has forgotten it."""
    spool.put(ASK)
    assert len(passed(desk, spool)) == 1
    for cycle in range(1, 5):
        assert passed(desk, spool, NOW + cycle * KEPT_S) == []
    # Nor by a daemon that never knew it.
    assert passed(AskDesk(desk._munge, lambda: {"ann"}), spool, NOW + 2 * KEPT_S) == []


def test_what_was_left_behind_hides_no_new_request(desk: AskDesk, spool: Spool) -> None:
    for number in range(MAX_ASKS + 6):
        spool.put(replace(ASK, id=f"{number:016x}", job_id="1", at_s=NOW - 10 * KEPT_S))
    spool.put(replace(ASK, id="f" * 16))
    assert passed(desk, spool) == [("f" * 16, "")]

"""Random schedules on a simulated transport, and the faults that they must notice."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

import tests.bench.pause_schedules as schedules
from slurm_ft.pause.member import Member, Phase, on_member
from slurm_ft.pause.protocol import End as Outcome
from slurm_ft.pause.protocol import Event, Key, Lost, Step, Turn, Write


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_random_schedules_never_split_or_hang() -> None:
    ends: Counter[str] = Counter()
    for seed in range(400):
        story = schedules.run_schedule(seed)
        assert not story.wrong, f"python -m tests.bench.pause --seed {seed}\n" + "\n".join(
            story.log
        )
        ends.update(set(story.ends))
    assert set(ends) >= {"resumed", "aborted", "saved", "abandoned", "undecided"}


def test_same_seed_same_story() -> None:
    assert schedules.run_schedule(17).log == schedules.run_schedule(17).log
    assert schedules.run_schedule(17).log != schedules.run_schedule(18).log


def _lost_means_abort(member: Member, event: Event) -> Turn[Member]:
    if isinstance(event, Lost) and member.phase is not Phase.IDLE:
        return Turn(Member(member.rank, member.size, member.epoch), (Step(Outcome.ABORTED),))
    return on_member(member, event)


def _mute(member: Member, event: Event) -> Turn[Member]:
    """Never decides in place of a dead controller."""
    turn = on_member(member, event)
    if member.phase is Phase.BOUND:
        return Turn(
            turn.state,
            tuple(e for e in turn.effects if not (isinstance(e, Write) and e.key is Key.DECISION)),
        )
    return turn


@pytest.mark.parametrize("rule", [_lost_means_abort, _mute])
def test_schedules_notice_a_broken_protocol(rule: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "on_member", rule)
    assert any(schedules.run_schedule(seed).wrong for seed in range(1500))

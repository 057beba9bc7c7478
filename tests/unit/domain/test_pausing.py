"""The reason of a pause is for people, and read again by the daemon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.attempt import Attempt
from slurm_ext.domain.pausing import LONGEST_HOLD_S, Paused, last_pause, read_paused

who = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=100)


@given(who, st.integers(1, int(LONGEST_HOLD_S)), st.sampled_from(["", "; last save failed: x"]))
def test_what_was_written_is_read(name: str, hold_s: int, rest: str) -> None:
    found = read_paused(Paused(name, hold_s).words + rest)
    assert found is not None
    assert found.words == Paused(name, hold_s).words


@pytest.mark.parametrize(
    "reason", ["", "the time limit was reached", "paused by alice", "it was paused by a for 3 s"]
)
def test_other_reasons_are_no_pause(reason: str) -> None:
    assert read_paused(reason) is None


def test_the_last_pause_is_that_of_the_last_attempt() -> None:
    paused = Attempt(0, 1.0, 1, ended_s=100.0, reason=Paused("alice", 60.0).words)
    left = last_pause((paused,))
    assert left is not None
    assert (left.paused.who, left.until_s(None), left.until_s(170.0)) == ("alice", 160.0, 170.0)
    assert last_pause(()) is None
    assert last_pause((replace(paused, ended_s=None),)) is None
    assert last_pause((paused, Attempt(1, 200.0, 1, ended_s=300.0, reason="time limit"))) is None

"""What a chain's ranks tell each other and leave for people: never a reason to end training."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import ConfigError, ProtocolError
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.chain import ChainState
from slurm_ft.switch.following import Following
from slurm_ft.switch.gathering import Marks, gathering
from slurm_ft.switch.standing import End, Teller, read_standing
from slurm_ft.switch.timeline import Kind, Recorder, Span, busy_s, joined, parse_timeline
from slurm_ft.train.layout import Wish
from slurm_ft.train.task import Task


def test_a_time_line_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "chain").write_text("in the way")
    gather = gathering(
        SoloComm(),
        ChainState(tmp_path / "state", tmp_path / "ckpt"),
        Recorder(0),
        Marks(1.0, 2.0, 3.0),
        how="cold",
        model="",
        limit_s=1.0,
    )
    with caplog.at_level(logging.WARNING):
        gather()
    assert "time line of a switch is not written" in caplog.text


def test_a_switch_in_which_nobody_did_anything_has_a_time_line(tmp_path: Path) -> None:
    """Both tasks came with all their steps made, and the second one started cold."""
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    marks = Marks(1.0, 2.0, 3.0)
    recorder = Recorder(0)
    gathering(SoloComm(), chain, recorder, marks, how="cold", model="", limit_s=1.0)()
    path = chain.timeline_path(0)
    assert parse_timeline(path.read_text(), str(path)).stages == 1


SPANS = st.lists(
    st.builds(
        lambda stage, kind, start, length, nbytes: Span(stage, kind, start, start + length, nbytes),
        st.integers(0, 2),
        st.sampled_from(list(Kind)),
        st.floats(0, 100),
        st.floats(0, 5),
        st.integers(0, 1 << 40),
    ),
    max_size=60,
)


@given(SPANS, st.integers(1, 20))
def test_too_many_spans_are_joined_and_no_byte_is_lost(spans: list[Span], most: int) -> None:
    found = joined(spans, most)
    sorts = len({(span.stage, span.kind) for span in spans})
    assert len(found) <= most + sorts
    for stage in range(3):
        for kind in Kind:
            mine = [s for s in spans if (s.stage, s.kind) == (stage, kind)]
            now = [s for s in found if (s.stage, s.kind) == (stage, kind)]
            assert sum(s.nbytes for s in mine) == sum(s.nbytes for s in now)
            assert busy_s(now, 0, 200) >= busy_s(mine, 0, 200) - 1e-9
    assert joined(spans, 60) == spans


def test_whatever_rank_0_meets_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for its answer: an error of a kind that nobody thought of must reach them."""
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    following = Following(chain, [Task(name="a")], SoloComm(), lambda task: "")
    monkeypatch.setattr(chain, "look", lambda given: {}["no such key"])
    with pytest.raises(ConfigError, match="no such key"):
        following.after(None)


# --- where the chain stands -----------------------------------------------------------------------


def teller(folder: Path, *, writes: bool = True) -> Teller:
    plan = {"FT_STAGES": "2", "FT_LOCAL_BATCH": "", "HOME": "/root"}
    return Teller(folder, writes=writes, attempt=3, ranks=4, wish=Wish(), environ=plan)


def test_what_is_told_is_read_as_it_was_told(tmp_path: Path) -> None:
    assert read_standing(tmp_path) is None
    told = teller(tmp_path / "d")
    told.begins("birds")
    told.outcomes({"deep": "too deep"}, {"cars": "disk full"})
    told.ends(End.LEFT, "preempted")
    now = read_standing(tmp_path / "d")
    assert now is not None
    assert (now.attempt, now.ranks, now.plan, now.task) == (3, 4, {"FT_STAGES": "2"}, "birds")
    assert (now.end, now.why, now.left_out) == (End.LEFT, "preempted", {"deep": "too deep"})
    assert now.failed == {"cars": "disk full"}
    assert now.unfit(Task(global_batch=8)) == ""
    assert "4 ranks cannot share it evenly" in now.unfit(Task(global_batch=30))
    assert "1 blocks cannot be cut" in now.unfit(Task(global_batch=8, depth=1))


def test_other_ranks_tell_nothing_and_a_full_disk_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    teller(tmp_path / "d", writes=False).begins("birds")
    assert not (tmp_path / "d").exists()
    (tmp_path / "d").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        teller(tmp_path / "d").ends(End.OVER)
    assert "where the chain stands is not told" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', "[" * 100_000, "TOLD-VERSION", "\0" * 100]
)
def test_a_broken_or_newer_standing_is_an_error_with_its_place(tmp_path: Path, text: str) -> None:
    teller(tmp_path)
    path = tmp_path / "standing.json"
    if text == "TOLD-VERSION":
        text = path.read_text().replace('"version":1', '"version":9')
    path.write_text(text)
    with pytest.raises(ProtocolError, match=r"standing\.json"):
        read_standing(tmp_path)

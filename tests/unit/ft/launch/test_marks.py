"""Word between the ranks' ft-runs: of this attempt and step, and bounded."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_ft.launch.marks import Marks


def test_ends_of_this_attempt_and_step_only(tmp_path: Path):
    marks = Marks(str(tmp_path), "77", 2, 0)
    marks.end(3, 1)
    marks.end(10, 137)
    Marks(str(tmp_path), "77", 1, 0).end(4, 1)
    Marks(str(tmp_path), "77", 2, 1).end(5, 1)
    (tmp_path / "end-77-2-0-x").write_text("1")
    (tmp_path / "end-77-2-0-6").write_text("")
    assert marks.ends() == {3: 1, 10: 137}


def test_the_decision(tmp_path: Path):
    marks = Marks(str(tmp_path), "77", 0, 0)
    assert not marks.decided()
    Marks(str(tmp_path), "77", 0, 1).decide(True)
    assert not marks.decided()
    marks.decide(False)
    assert marks.decided()


def test_old_attempts_are_forgotten_and_nothing_else(tmp_path: Path):
    for attempt in range(4):
        Marks(str(tmp_path), "77", attempt, 0).decide(True)
        Marks(str(tmp_path), "77", attempt, 0).end(1, 1)
        Path(Marks(str(tmp_path), "77", attempt, 0).status(1)).write_text("{}")
    (tmp_path / "attempts-77.json").write_text("{}")
    (tmp_path / "notes-77-0-1").write_text("the user's")
    Marks(str(tmp_path), "78", 0, 0).done()
    Marks(str(tmp_path), "77", 3, 0).forget_old()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "attempts-77.json",
        "notes-77-0-1",
        "done-78-0-0",
        *(
            f"{kind}-77-{n}-0{rest}"
            for n in (2, 3)
            for kind, rest in (("decision", ""), ("end", "-1"), ("status", "-1.json"))
        ),
    }


def test_without_a_directory_nothing_is_told_and_nobody_waits():
    marks = Marks("", "77", 0, 0)
    marks.end(1, 1)
    marks.decide(True)
    marks.forget_old()
    assert marks.ends() == {}
    assert not marks.decided()
    assert (marks.hook, marks.status(0)) == ("", "")


def test_a_directory_that_is_gone_is_no_error(tmp_path: Path):
    marks = Marks(str(tmp_path / "gone"), "77", 0, 0)
    marks.end(1, 1)
    assert marks.ends() == {}


def test_jobs_that_share_a_directory_believe_their_own_marks_only(tmp_path: Path):
    """A done mark of task 1 made task 2 skip its work, and an error of one kept the other away."""
    other = Marks(str(tmp_path), "1234_1", 0, 0)
    other.done()
    other.end(1, 1)
    other.decide(True)
    assert not Marks(str(tmp_path), "1234_2", 1, 0).done_before()
    mine = Marks(str(tmp_path), "1234_2", 0, 0)
    assert mine.ends() == {}
    assert not mine.decided()
    assert mine.status(0) != other.status(0)


def test_whoever_leads_gives_signs_of_life(tmp_path: Path):
    marks = Marks(str(tmp_path), "77", 1, 0)
    assert marks.last_beat() == (0, None)
    marks.beat(0)
    path = tmp_path / "lead-77-1-0-0"
    os.utime(path, ns=(5, 5))
    assert marks.last_beat() == (0, 5)
    marks.beat(0)
    term, beat = marks.last_beat()
    assert (term, beat != 5) == (0, True)
    # A sign of life needs no room: a full disk is no death.
    assert path.stat().st_size == 0


def test_one_of_several_ranks_begins_to_lead(tmp_path: Path):
    marks = [Marks(str(tmp_path), "77", 1, 0) for _ in range(3)]
    marks[0].beat(0)
    assert [m.claim(1) for m in marks] == [True, False, False]
    assert marks[0].last_beat()[0] == 1
    # Another step and another attempt have leaders of their own.
    assert Marks(str(tmp_path), "77", 1, 1).claim(1)
    assert Marks(str(tmp_path), "77", 2, 0).claim(1)
    assert not Marks("", "77", 2, 0).claim(1)


def test_the_first_rank_that_could_not_start_speaks(tmp_path: Path):
    marks = Marks(str(tmp_path), "77", 1, 0)
    assert marks.stopped() is None
    assert marks.stop(3, 127, "no\nsuch  file")
    assert not marks.stop(4, 126, "other")
    assert marks.stopped() == (3, 127, "no such file")
    assert Marks(str(tmp_path), "77", 2, 0).stopped() is None
    # Being written, or nonsense.
    for text in ("", "3", "3 127", "x 127 why"):
        (tmp_path / "stop-77-1-0").write_text(text)
        assert marks.stopped() is None

"""What is shown while a replay runs."""

from __future__ import annotations

import io

from ci.replay.options import Variant
from ci.replay.progress import Display
from ci.replay.stage import Progress

STATE = Progress("replays", total=40, submitted=30, running=6, done=20, begun_s=1000.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_line_counts_every_job_once() -> None:
    line = Display(40, 300, 400, io.StringIO()).line(Variant.PLAIN, STATE, 1100.0)
    assert "20/40 done,  6 running,   4 pending,  10 to come" in line
    assert "[############            ]" in line
    assert "about 5.0 min left" in line


def test_after_the_last_arrival_the_pace_decides() -> None:
    line = Display(40, 300, 400, io.StringIO()).line(Variant.PLAIN, STATE, 1600.0)
    assert "about 5.0 min left" in line  # half of the jobs took ten minutes


def test_phases_before_the_replay_are_told() -> None:
    line = Display(40, 300, 400, io.StringIO()).line(Variant.ORDER, Progress("is set up"), 1.0)
    assert line.split() == ["order", "is", "set", "up"]


def test_a_terminal_is_redrawn_and_a_file_is_not() -> None:
    shown = {Variant.PLAIN: STATE, Variant.FULL: STATE}
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        display = Display(40, 300, 400, out)
        display.show(shown, 1100.0)
        display.show(shown, 1101.0)
    assert "\x1b[2F" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()
    assert len(file.getvalue().splitlines()) == 2

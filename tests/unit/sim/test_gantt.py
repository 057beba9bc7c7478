"""Bars and waiting curve by hand, and a picture that is really written."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.domain.errors import DataError
from slurm_ext.sim.engine import Run
from slurm_ext.sim.gantt import Bar, bars, draw, waiting

NODES = {"n1": 4, "n2": 4}


def run(job_id: str, start: float, end: float, seats: dict[str, int], submit: float = 0.0) -> Run:
    return Run(job_id, submit, start, end, sum(seats.values()), seats, 1.0)


def test_bars_stack_within_their_node() -> None:
    drawn = bars(
        [run("a", 0, 10, {"n1": 2}), run("b", 0, 5, {"n1": 2, "n2": 4}), run("c", 5, 9, {"n1": 1})],
        NODES,
    )
    assert drawn == [
        Bar("a", "n1", 0, 2, 0, 10, 2),
        Bar("b", "n1", 2, 2, 0, 5, 6),
        Bar("b", "n2", 4, 4, 0, 5, 6),
        Bar("c", "n1", 2, 1, 5, 9, 1),
    ]


def test_bar_is_split_around_lines_in_use() -> None:
    drawn = bars(
        [run("a", 0, 5, {"n1": 1}), run("b", 0, 9, {"n1": 1}), run("c", 5, 9, {"n1": 3})], NODES
    )
    assert [(bar.row, bar.height) for bar in drawn if bar.job_id == "c"] == [(0, 1), (2, 2)]


def test_double_booking_is_refused() -> None:
    with pytest.raises(DataError, match="job b wants 1 GPUs, 0 are free"):
        bars([run("a", 0, 10, {"n1": 4}), run("b", 1, 2, {"n1": 1})], NODES)


def test_unknown_node_is_refused() -> None:
    with pytest.raises(DataError, match="unknown node n9"):
        bars([run("a", 0, 10, {"n9": 1})], NODES)


def test_waiting_counts_jobs_between_submission_and_start() -> None:
    runs = [run("a", 0, 5, {"n1": 4}), run("b", 5, 9, {"n1": 4}), run("c", 9, 12, {"n1": 4}, 2)]
    assert waiting(runs) == [(0, 1), (2, 2), (5, 1), (9, 0)]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_draws_a_picture(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / "pictures" / f"g{suffix}"
    draw({"plain": [run("a", 0, 3600, {"n1": 4, "n2": 4})], "ours": []}, NODES, path, "title")
    data = path.read_bytes()
    assert data.startswith(magic)
    assert len(data) > 5000


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="picture format"):
        draw({}, NODES, tmp_path / "g.docx")


def test_a_large_machine_names_every_so_many_nodes(tmp_path: Path) -> None:
    nodes = {f"node{n:02d}": 1 for n in range(60)}
    path = tmp_path / "g.svg"
    labels = {name: f"{name} A100" for name in nodes}
    draw({"x": [run("a", 0, 3600, {"node00": 1})]}, nodes, path, labels=labels)
    text = path.read_text()
    named = [name for name in nodes if f"<!-- {name} A100 -->" in text]
    assert named == [f"node{n:02d}" for n in range(0, 60, 3)]

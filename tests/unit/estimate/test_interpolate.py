"""Between, at and beyond measured points of one curve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.estimate import Source
from slurm_ext.estimate.interpolate import Curve, Point, Reading


def point(local: int, throughput: float, memory: float | None = None) -> Point:
    return Point(local, throughput, throughput * 0.9, throughput * 1.1, 0.0, memory)


def curve(*points: Point, walls: tuple[int, ...] = ()) -> Curve:
    return Curve(1, points, walls)


HAND = curve(point(128, 900.0), point(256, 1300.0))


def test_hand_case() -> None:
    reading = HAND.read(192)
    assert isinstance(reading, Reading)
    assert reading.throughput == pytest.approx(1100.0)
    assert reading.source is Source.INTERPOLATED
    assert reading.note == "between local batch 128 and 256"
    assert not reading.outside


def test_measured_point_is_itself() -> None:
    reading = HAND.read(256)
    assert isinstance(reading, Reading)
    assert (reading.throughput, reading.source) == (1300.0, Source.MEASURED)


def test_upper_bound_holds_the_line_in_step_time() -> None:
    # Steps of 0.1422 s and 0.1969 s: straight in the step time, 192 samples take 0.1696 s.
    reading = HAND.read(192)
    assert isinstance(reading, Reading)
    assert reading.high >= 192 / ((128 / 900 + 256 / 1300) / 2) > 1100


@pytest.mark.parametrize("wall", [129, 192, 200, 255])
def test_never_across_a_hole(wall: int) -> None:
    reading = curve(point(128, 900.0), point(256, 1300.0), walls=(wall,)).read(192)
    assert isinstance(reading, str)
    assert "memory or has a hole" in reading


def test_a_wall_elsewhere_does_not_matter() -> None:
    c = curve(point(64, 500.0), point(128, 900.0), point(256, 1300.0), walls=(100,))
    assert isinstance(c.read(192), Reading)
    assert isinstance(c.read(96), str)


def test_never_between_points_whose_memory_falls() -> None:
    reading = curve(point(96, 160.0, 26.1), point(128, 165.0, 7.5)).read(112)
    assert isinstance(reading, str)
    assert "less memory" in reading
    # Both ends stand: they were measured.
    assert isinstance(curve(point(96, 160.0, 26.1), point(128, 165.0, 7.5)).read(128), Reading)


def test_outside_says_so_and_is_wider() -> None:
    reading = HAND.read(384)
    assert isinstance(reading, Reading)
    assert reading.outside
    assert reading.above
    assert reading.note == "local batch 384 is outside the measured 128..256"
    assert reading.throughput == pytest.approx(384 / (256 / 1300 + (256 / 1300 - 128 / 900)))
    inside = HAND.read(256)
    assert isinstance(inside, Reading)
    assert reading.high / reading.low > inside.high / inside.low


def test_outside_stops_at_a_factor_of_two() -> None:
    assert isinstance(HAND.read(512), Reading)
    assert isinstance(HAND.read(513), str)
    assert isinstance(HAND.read(64), Reading)
    assert isinstance(HAND.read(63), str)
    assert isinstance(curve(point(128, 900.0)).read(129), str)


def test_outside_stops_at_out_of_memory() -> None:
    c = curve(point(128, 900.0), point(256, 1300.0), walls=(300,))
    assert isinstance(c.read(299), Reading)
    assert isinstance(c.read(300), str)
    assert isinstance(c.read(310), str)


def test_no_negative_step_time() -> None:
    # The line through (128, 1 s) and (256, 3 s) reaches zero at 64.
    c = curve(point(128, 128.0), point(256, 256 / 3))
    answer = c.read(64)
    assert isinstance(answer, str)
    assert "no step time" in answer


def test_only_out_of_memory() -> None:
    assert isinstance(curve(walls=(8,)).read(8), str)
    assert isinstance(curve(walls=(8,)).read(4), str)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    batches = draw(st.lists(st.integers(1, 500), min_size=2, max_size=8, unique=True))
    points = []
    for batch in sorted(batches):
        throughput = draw(st.floats(1.0, 1e4))
        points.append(point(batch, throughput, draw(st.none() | st.floats(1.0, 80.0))))
    walls = draw(st.lists(st.integers(1, 1000).filter(lambda w: w not in batches), max_size=3))
    return Curve(draw(st.integers(1, 64)), tuple(points), tuple(sorted(walls)))


@given(curves(), st.integers(1, 1200))
def test_value_lies_between_its_neighbours_and_in_its_bounds(c: Curve, batch: int) -> None:
    reading = c.read(batch)
    if isinstance(reading, str):
        return
    assert 0 < reading.low <= reading.throughput <= reading.high
    below = [p for p in c.points if p.local_batch <= batch]
    above = [p for p in c.points if p.local_batch >= batch]
    if below and above:
        a, b = below[-1].throughput, above[0].throughput
        slack = 1e-9 * max(a, b)
        assert min(a, b) - slack <= reading.throughput <= max(a, b) + slack
        assert not any(below[-1].local_batch < w < above[0].local_batch for w in c.walls) or (
            below[-1] is above[0]
        )
    else:
        assert reading.outside
        assert reading.note


@given(curves(), st.integers(1, 1200))
def test_nothing_is_read_beyond_a_wall(c: Curve, batch: int) -> None:
    beyond = [w for w in c.walls if w > c.points[-1].local_batch]
    if any(w <= batch for w in beyond) or batch in c.walls:
        assert isinstance(c.read(batch), str)

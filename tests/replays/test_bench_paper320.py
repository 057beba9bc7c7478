"""The sample of 320 jobs, and what is said about its signs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_ext.sim.engine import replay
from slurm_ext.sim.summary import summarise
from tests.bench.paper320 import (
    DAY_S,
    HARDWARE,
    JOBS,
    LONGEST_S,
    PAPER,
    SHORTEST_S,
    Row,
    costs,
    jobs_of,
    misses,
    sample,
    settings,
    signs,
)


def test_a_sample_has_the_jobs_that_are_described() -> None:
    rows, jobs = sample(0), jobs_of(0, 1.0)
    assert len(rows) == len(jobs) == JOBS
    assert rows == sample(0) != sample(1)
    times = [job.error_free_s for job in jobs]
    assert min(times) == pytest.approx(SHORTEST_S, rel=0.05)
    assert SHORTEST_S <= min(times) < max(times) <= LONGEST_S * 1.0001
    assert max(times) > LONGEST_S / 2
    assert rows[0].submit_s == 0 < rows[-1].submit_s < DAY_S
    assert {row.gpus for row in rows} >= {1, 2, 4, 8}


def test_twice_the_density_halves_the_day() -> None:
    assert jobs_of(0, 2.0)[-1].submit_s == pytest.approx(jobs_of(0, 1.0)[-1].submit_s / 2)


def test_the_switch_takes_the_place_of_the_cold_start_only() -> None:
    on, off = costs(True), costs(False)
    assert on.start_s("vit") == off.start_s("vit") == 59
    assert (on.warm_s("vit"), off.warm_s("vit")) == (5, None)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """The first forty jobs: enough to tell the settings apart."""
    jobs = jobs_of(0, 3.0)[:40]
    found = []
    for setting in settings()[:4]:
        schedule = replay(
            jobs, HARDWARE, setting.policy, costs(setting.switch), merging=setting.merging
        )
        found.append(Row(setting.name, (summarise(schedule, schedule),), 0))
    return found


def test_settings_bear_the_published_names(rows: list[Row]) -> None:
    assert [row.name for row in rows] == list(PAPER)
    assert rows[1].jct_h < rows[0].jct_h


MORE = {"no switch": (1.1, 29.0), "full, all saved": (0.9, 28.0)}


def _with(row: Row, **numbers: float) -> Row:
    return replace(row, found=tuple(replace(each, **numbers) for each in row.found))


def test_signs_and_harm_are_told() -> None:
    base = summarise(replay(jobs_of(0, 1.0)[:5], HARDWARE, settings()[0].policy))
    hours = {"srtf": (1.68, 33.1), "full": (1.0, 29.0), "no merging": (1.2, 33.1)}
    made = [
        Row(
            name,
            (replace(base, avg_jct_s=3600 * jct, makespan_s=3600 * span),),
            0,
        )
        for name, (jct, span) in {**hours, **MORE}.items()
    ]
    assert [sign.verdict for sign in signs(made)] == ["yes"] * 8
    assert misses(made) == []

    def no(rows: list[Row]) -> list[str]:
        return [sign.words for sign in signs(rows) if sign.verdict == "no"]

    harmful = [
        _with(row, avg_jct_s=3600 * 0.95) if row.name == "no merging" else row for row in made
    ]
    assert no(harmful) == ["merging shortens the average JCT"]
    assert len(misses(harmful)) == 1
    longer = [_with(row, makespan_s=3600 * 31) if row.name == "no switch" else row for row in made]
    assert no(longer) == ["the switch leaves the makespan as it is"]


def test_a_change_that_samples_do_not_agree_on_is_unclear() -> None:
    base = summarise(replay(jobs_of(0, 1.0)[:5], HARDWARE, settings()[0].policy))
    names = ("srtf", "full", "no merging", "no switch", "full, all saved")
    made = [Row(name, (base, base, base), 0) for name in names]
    noisy = tuple(replace(base, avg_jct_s=base.avg_jct_s * f) for f in (0.8, 1.3, 0.95))
    made[1] = Row("full", noisy, 0)
    assert signs(made)[1].verdict == "unclear"
    assert misses(made) == []

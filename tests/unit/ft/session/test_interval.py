"""Young's and Daly's interval, the user's bounds, and what a job's own failures tell."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ext.domain.errors import ConfigError
from slurm_ft.session.interval import (
    AUTO_HIGH_S,
    AUTO_LOW_S,
    PRIOR_NODE_MTBF_S,
    Bounds,
    estimate_mtbf_s,
    interval_s,
    optimum_s,
    parse_bounds,
)

DAY = 86400.0


def expected_loss(tau_s: float, cost_s: float, mtbf_s: float) -> float:
    """Exact cost of an hour's work with exponential failures and free restarts, per unit of work.

    Time to get through a segment of tau + cost: mtbf * (exp((tau + cost) / mtbf) - 1).
    """
    return mtbf_s * math.expm1((tau_s + cost_s) / mtbf_s) / tau_s


@given(st.floats(0.5, 600), st.floats(3600, 30 * DAY))
def test_the_optimum_is_where_the_exact_loss_is_least(cost_s: float, mtbf_s: float) -> None:
    tau_s = optimum_s(cost_s, mtbf_s)
    least = expected_loss(tau_s, cost_s, mtbf_s)
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert least <= expected_loss(tau_s * factor, cost_s, mtbf_s) * (1 + 1e-9)


@given(st.floats(0.01, 5), st.floats(10 * DAY, 100 * DAY))
def test_daly_tends_to_young(cost_s: float, mtbf_s: float) -> None:
    assert optimum_s(cost_s, mtbf_s) == pytest.approx(math.sqrt(2 * cost_s * mtbf_s), rel=0.01)


@pytest.mark.parametrize(("cost_s", "mtbf_s", "tau_s"), [(0.0, DAY, 0.0), (100.0, 40.0, 40.0)])
def test_edges(cost_s: float, mtbf_s: float, tau_s: float) -> None:
    assert optimum_s(cost_s, mtbf_s) == tau_s


def test_a_worked_example() -> None:
    # Daly 2006, eq. 37: cost 5 min, mean time 24 h.
    ratio = 300 / (2 * DAY)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    assert optimum_s(300, DAY) == pytest.approx(math.sqrt(2 * 300 * DAY) * series - 300)
    assert 6900 < optimum_s(300, DAY) < 7100


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("auto", Bounds(AUTO_LOW_S, AUTO_HIGH_S)),
        (" AUTO ", Bounds(AUTO_LOW_S, AUTO_HIGH_S)),
        ("600", Bounds(600, 600)),
        ("0.5", Bounds(0.5, 0.5)),
        ("120-1800", Bounds(120, 1800)),
    ],
)
def test_bounds(text: str, bounds: Bounds) -> None:
    assert parse_bounds(text) == bounds


@pytest.mark.parametrize("text", ["", "0", "-5", "10-5", "x", "nan", "inf", "1-inf", "5-", "1-2-3"])
def test_bad_bounds_name_value_and_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="FT_CHECKPOINT_INTERVAL") as told:
        parse_bounds(text)
    assert repr(text) in str(told.value)


@given(
    st.floats(1, 1000),
    st.floats(0, 5000),
    st.floats(0.001, 1000),
    st.floats(0.001, 1000),
    st.floats(100, 30 * DAY),
)
def test_the_bounds_hold(
    low: float, more: float, cost_s: float, save_s: float, mtbf: float
) -> None:
    bounds = Bounds(low, low + more)
    chosen = interval_s(bounds, mtbf, cost_s, save_s)
    # Beyond the user's upper bound only where the disk would otherwise never rest.
    assert bounds.low_s <= chosen <= max(bounds.high_s, 2 * save_s)
    assert chosen >= 2 * save_s or bounds.fixed


def test_the_first_save_comes_early_and_a_fixed_interval_is_kept() -> None:
    assert interval_s(Bounds(60, 3600), DAY) == 60
    assert interval_s(Bounds(600, 600), DAY, cost_s=0.1, save_s=0.2) == 600


def ended(cause: Cause, hours: float, **more: int) -> Attempt:
    return Attempt(0, started_s=0, gpus=1, ended_s=hours * 3600, cause=cause, **more)


def test_the_prior_is_shared_by_the_nodes() -> None:
    assert estimate_mtbf_s(1) == PRIOR_NODE_MTBF_S
    assert estimate_mtbf_s(8) == PRIOR_NODE_MTBF_S / 8


def test_failures_shorten_and_quiet_days_lengthen_the_estimate() -> None:
    quiet = estimate_mtbf_s(8, (ended(Cause.TIME_LIMIT, 72),))
    failing = estimate_mtbf_s(8, (ended(Cause.NODE_FAIL, 1), ended(Cause.LOST_PEER, 1)))
    assert failing < estimate_mtbf_s(8) < quiet
    assert failing == (PRIOR_NODE_MTBF_S / 8 + 7200) / 3


def test_announced_ends_are_no_failures_unless_work_was_lost() -> None:
    saved = ended(Cause.PREEMPTED, 1, last_step=100, saved_step=100)
    lost = ended(Cause.PREEMPTED, 1, last_step=100, saved_step=40)
    assert estimate_mtbf_s(1, (lost,)) < estimate_mtbf_s(1, (saved,))
    assert estimate_mtbf_s(1, (saved,)) == PRIOR_NODE_MTBF_S + 3600
    running = Attempt(1, started_s=0, gpus=1)
    assert estimate_mtbf_s(1, (running,)) == PRIOR_NODE_MTBF_S

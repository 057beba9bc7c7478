"""timeout-order: a shorter time-out must not fire before a longer one is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.launch.errors import UsageError
from slurm_ft.launch.timeouts import AGENT_SHUTDOWN, HEARTBEAT, for_launcher, order_timeouts


@given(
    st.none() | st.floats(1, 86_400),
    st.none() | st.floats(30, 1e5),
    st.none() | st.floats(30, 1e5),
)
def test_timeout_order_whatever_was_given(collective, heartbeat, join):
    env = {}
    if heartbeat is not None:
        env[HEARTBEAT] = f"{heartbeat:.3f}"
    if join is not None:
        env["FT_INIT_TIMEOUT_S"] = f"{join:.3f}"
    try:
        found = order_timeouts(collective, env)
    except UsageError:
        # Only what the user said on both sides can contradict itself.
        assert collective is not None
        assert heartbeat is not None or join is not None
        return
    assert found.collective_s < found.heartbeat_s
    assert found.collective_s <= found.join_s
    assert collective is None or found.collective_s == collective
    told = found.variables()
    assert int(told[HEARTBEAT]) >= found.heartbeat_s


def test_timeout_order_contradictions_name_both_values_and_the_fix():
    with pytest.raises(UsageError, match=r"SEC=300 is not above --collective-timeout=600.*720"):
        order_timeouts(600.0, {HEARTBEAT: "300"})
    with pytest.raises(UsageError, match=r"FT_INIT_TIMEOUT_S=60 is below --collective-timeout=90"):
        order_timeouts(90.0, {"FT_INIT_TIMEOUT_S": "60"})


def test_timeout_order_without_the_monitor_the_heartbeat_does_not_matter():
    env = {HEARTBEAT: "300", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    assert order_timeouts(600.0, env).collective_s == 600.0


def test_timeout_order_huge_values_are_told():
    assert "2.0 hours" in order_timeouts(7200.0, {}).warnings[0]
    assert order_timeouts(600.0, {}).warnings == ()


def test_sig_30s_the_agent_is_given_the_time_that_slurm_gives():
    """sig-30s: torchrun kills its ranks 30 s after TERM, however long the grace is."""
    assert for_launcher(600.0, {}) == {AGENT_SHUTDOWN: "600"}
    assert int(for_launcher(None, {})[AGENT_SHUTDOWN]) > 3600
    assert for_launcher(600.0, {AGENT_SHUTDOWN: "20"}) == {}

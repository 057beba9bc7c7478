"""States of jobs and nodes over the releases."""

from __future__ import annotations

import pytest

from slurm_ext.domain.job import JobState
from slurm_ext.slurm.state import ended, job_state, node_available, node_flags


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("PENDING", JobState.PENDING),
        ("RUNNING", JobState.RUNNING),
        (["RUNNING"], JobState.RUNNING),
        (["RUNNING", "CONFIGURING"], JobState.CONFIGURING),
        (["RUNNING", "COMPLETING"], JobState.COMPLETING),
        (["CANCELLED", "COMPLETING"], JobState.COMPLETING),
        (["PENDING", "REQUEUED"], JobState.PENDING),
        (["PENDING", "REQUEUE_HOLD"], JobState.REQUEUE_HOLD),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ([], JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_json_list_state(value: str | list[str], state: JobState) -> None:
    """A word and a list are the same; the first entry is the base state."""
    assert job_state(value) is state


def test_a_job_that_completes_still_holds_its_nodes() -> None:
    state = job_state(["COMPLETED", "COMPLETING"])
    assert state.holds_resources
    assert not ended(state)
    assert ended(JobState.COMPLETED)
    assert not ended(JobState.UNKNOWN)


@pytest.mark.parametrize(
    "text",
    [
        *("IDLE", "MIXED", "ALLOCATED", "MIXED+PLANNED", "IDLE+PLANNED", "idle-", "IDLE+CLOUD"),
        *("IDLE~", "IDLE+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", "IDLE#", "MIXED+POWERING_UP"),
    ],
)
def test_available(text: str) -> None:
    """Also nodes that Slurm has switched off to save power: it switches them on for a job."""
    assert node_available(text)


@pytest.mark.parametrize(
    "text",
    [
        *("DOWN", "DOWN*", "IDLE*", "IDLE+DRAIN", "MIXED+DRAIN+PLANNED", "DRAINED", "DRAINING"),
        *("IDLE+MAINTENANCE+RESERVED", "IDLE+RESERVED", "IDLE%", "IDLE+POWERING_DOWN", "IDLE!"),
        *("MIXED+CLOUD+POWERED_DOWN", "DOWN+POWERED_DOWN", "DOWN+POWERING_UP"),
        *("IDLE+NOT_RESPONDING", "FAIL", "UNKNOWN", "FUTURE", "INVAL", "IDLE+INVALID_REG", "maint"),
        *("IDLE+REBOOT_REQUESTED", "IDLE$", "", "A_STATE_OF_THE_FUTURE", "IDLE+NEW_FLAG"),
    ],
)
def test_not_available(text: str) -> None:
    """Also what we do not know: better an idle GPU than a job sent to a broken node."""
    assert not node_available(text)


def test_flags() -> None:
    assert node_flags("DOWN*+DRAIN") == ("DOWN", frozenset({"NOT_RESPONDING", "DRAIN"}))
    assert node_flags("mixed+planned") == ("MIXED", frozenset({"PLANNED"}))

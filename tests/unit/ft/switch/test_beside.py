"""The thread beside training: outcomes, what is late, what a failure does to the jobs behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from slurm_ft.switch.beside import Beside, LateError


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside("test")
    yield made
    made.close()


def test_what_is_late_is_named_and_what_is_over_is_not(beside: Beside) -> None:
    go_on = threading.Event()
    assert beside.do(lambda: 7, "counting").result(5.0) == 7
    job = beside.do(go_on.wait, "making birds durable")
    beside.do(lambda: None, "making cars ready")
    with pytest.raises(LateError, match="making birds durable: not over within 0 s"):
        job.result(0.0)
    with pytest.raises(LateError) as caught:
        beside.finish(0.0)
    assert "making birds durable, making cars ready: not over" in str(caught.value)
    assert "counting" not in str(caught.value)
    go_on.set()
    beside.finish(5.0)
    assert job.well()


def test_jobs_behind_one_that_failed_fail_as_it_did(beside: Beside) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    first = beside.do(fail, "making birds durable")
    second = beside.do(lambda: ran.append("second"), "making cars ready")
    for job in (first, second):
        with pytest.raises(OSError, match="No space left"):
            job.result(5.0)
        assert job.done()
        assert not job.well()
    assert ran == []
    with pytest.raises(OSError, match="No space left"):
        beside.finish(5.0)

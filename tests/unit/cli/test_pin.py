"""``slurm-ext pin``: the request that is written, and what is refused at once."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control.spool import Spool
from slurm_ext.domain.document import ENDED
from slurm_ext.domain.job import JobState
from slurm_ext.domain.request import PinRequest
from tests.unit.cli.spooled import Site, document
from tests.unit.control.bench import Bench

NOBODY = 65_534


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.write(document())
    return site


def request(site: Site, job: int = 7) -> PinRequest | None:
    """What the daemon would read, with all its checks of the file."""
    return Spool(site.spool.root).read_inbox({os.getuid()}).request_about(os.getuid(), job)


@pytest.mark.parametrize(
    ("words", "pinned", "gpus", "told"),
    [
        ((), True, None, "job 7: keeps the submitted GPU count, from the next cycle on\n"),
        (("--gpus=1",), True, 1, "job 7: keeps 1 GPU, from the next cycle on\n"),
        (("--gpus", "2"), True, 2, "job 7: keeps 2 GPUs, from the next cycle on\n"),
        (("--release",), False, None, "job 7: its GPU count may be chosen again, from the"),
    ],
)
def test_the_owner_pins(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    pinned: bool,
    gpus: int | None,
    told: str,
) -> None:
    assert site.run("pin", "7", *words) == 0
    assert capsys.readouterr().out.startswith(told)
    found = request(site)
    assert found is not None
    assert (found.job_id, found.pinned, found.gpus) == (7, pinned, gpus)


def test_the_last_word_counts(site: Site) -> None:
    site.run("pin", "7", "--gpus=1")
    site.run("pin", "7_[1-4]", "--release")
    found = request(site)
    assert found is not None
    assert found.pinned is False


def test_somebody_else_is_refused_and_writes_nothing(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.write(document(uid=4711))
    monkeypatch.setattr("os.getuid", lambda: NOBODY)
    assert site.run("pin", "7") == 1
    assert "belongs to alice; only its owner or root can pin it" in capsys.readouterr().err
    assert not (site.spool.root / str(NOBODY)).exists()


def test_a_count_that_the_job_cannot_take(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("pin", "7", "--gpus=3") == 1
    err = capsys.readouterr().err
    assert "job 7 cannot run on that count; choose among 1, 2, 4; slurm-ext explain 7" in err
    assert request(site) is None


def test_a_pinned_job_can_be_pinned_to_another_count(site: Site) -> None:
    """Its document then lists no count but the pinned one."""
    made = document()
    assert made.ours is not None
    held = replace(made, candidates=made.candidates[:1], ours=replace(made.ours, veto=True))
    site.write(held)
    assert site.run("pin", "7", "--gpus=2") == 0
    found = request(site)
    assert found is not None
    assert found.gpus == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus=0",), "is not a GPU count"),
        (("--gpus=65537",), "is not a GPU count"),
        (("--gpus=2", "--release"), "contradict each other"),
    ],
)
def test_nonsense(
    site: Site, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert site.run("pin", "7", *words) == 1
    assert told in capsys.readouterr().err
    assert request(site) is None


def test_a_job_that_is_not_planned_yet(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.run("pin", "8", "--gpus=3") == 0
    assert "as soon as the daemon plans it, and if it is yours" in capsys.readouterr().out
    assert request(site, 8) is not None


def test_a_running_job(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write(document(state="RUNNING"))
    assert site.run("pin", "7") == 0
    assert "should it be requeued; a job that runs is never resized" in capsys.readouterr().out


def test_a_job_that_is_gone(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write(document(state=ENDED))
    assert site.run("pin", "7") == 1
    assert "job 7: has left the queue" in capsys.readouterr().err


def test_no_spool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, spool=str(tmp_path / "none"))
    assert site.run("pin", "7") == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "gpus"),
    [((), 4), (("--gpus=2",), 2), (("--release",), 16)],
)
def test_the_daemon_obeys_what_is_written(
    tmp_path: Path, words: tuple[str, ...], gpus: int
) -> None:
    """Through the real spool; without a pin the empty cluster's sixteen GPUs would be given."""
    bench = Bench(tmp_path)
    blocker = bench.fill()
    job = bench.submit(gpus=4, uid=os.getuid())
    bench.cycles()
    assert Site(tmp_path, spool=str(bench.config.spool)).run("pin", job, *words) == 0
    bench.cycles()
    bench.slurm.cancel(blocker)
    bench.cycles(2)
    found = bench.slurm.find(job)
    assert (found.state, found.gpus) == (JobState.RUNNING, gpus)

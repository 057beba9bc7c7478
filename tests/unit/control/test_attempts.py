"""What jobs tell about themselves, through whole cycles: attempts, truth, calibration, metrics."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.control import documents
from slurm_ext.control.delays import COOLING
from slurm_ext.control.journal import Journal
from slurm_ext.control.spool import Spool, read_cluster, read_plan
from slurm_ext.control.tally import lost_gpu_s, recovery_s
from slurm_ext.control.truth import TRUTH_EVERY_S
from slurm_ext.domain.attempt import MAX_ATTEMPTS_BYTES, Attempt, Attempts, Cause
from slurm_ext.domain.document import ENDED
from slurm_ext.domain.estimate import Source
from slurm_ext.domain.job import JobState
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.progress import Progress
from slurm_ext.domain.request import attempts_path, progress_path, user_dir
from tests.unit.control.bench import BATCH, RATE, Bench

UID = os.getuid()


class Site(Bench):
    """A bench whose jobs belong to this user and report."""

    def submit(self, gpus: int = 4, samples: int = 36_000, **fields: object) -> str:
        """A job of this user's."""
        return super().submit(gpus, samples, uid=UID, **fields)

    def report(self, job: str, **values: object) -> None:
        """Write a progress file as the job's session would."""
        found = self.slurm.find(job)
        made = Progress(
            job_id=job,
            attempt=found.restarts,
            at_s=self.now,
            step=20,
            samples=20 * BATCH,
            samples_per_s=RATE[found.gpus],
            gpus=found.gpus,
            first_step_s=self.now - 1,
        )
        self._write(progress_path(self.config.spool, UID, job), replace(made, **values).to_json())

    def record(self, job: str, *attempts: Attempt) -> None:
        """Write an attempts file as rank 0's ft-run would."""
        path = attempts_path(self.config.spool, UID, job)
        self._write(path, Attempts(job, attempts).to_json())

    def _write(self, path: object, text: str) -> None:
        Path(str(user_dir(self.config.spool, UID))).mkdir(exist_ok=True)
        part = Path(f"{path}.part")
        part.write_text(text)
        part.replace(str(path))

    def fill_rest(self) -> None:
        """Give every GPU that is free now to a job that is not ours and does not end."""
        for node in list(self.slurm.nodes.values()):
            free = node.gpus - node.gpus_alloc
            if free:
                other = self.slurm.submit(gpus=free, run_s=1e9, time_limit_s=None)
                self.slurm.start(other)

    def value(self, name: str, **labels: str) -> float:
        """A metric, 0 where it was never touched."""
        found = self.engine.metrics.registry.get_sample_value(f"slurm_ext_{name}", labels)
        return found or 0.0

    def came_back(self, job: str, cause: Cause | None = None, **values: object) -> None:
        """The job's attempt ends and Slurm has it in the queue again."""
        number = self.slurm.find(job).restarts
        started = self.slurm.find(job).start_s or self.now
        if cause is not None:
            ended = Attempt(
                number, started, self.slurm.find(job).gpus, ended_s=self.now, cause=cause, **values
            )
            self.record(job, ended)
        self.slurm.requeue(job)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def running(site: Site, gpus: int = 4, **fields: object) -> str:
    job = site.submit(gpus, 10**8, auto=False, time_limit_s=10 * 86400.0, **fields)
    site.cycles(2)
    assert site.slurm.find(job).state is JobState.RUNNING
    return job


# -- the spool -----------------------------------------------------------------------------------


def test_attempts_come_in_like_progress(tmp_path: Path):
    spool = Spool(tmp_path / "spool")
    spool.prepare()
    mine = Path(str(user_dir(spool.root, UID)))
    mine.mkdir()
    told = Attempts("7", (Attempt(0, 1.0, 4),))
    (mine / "attempts-7.json").write_text(told.to_json())
    (mine / "attempts-8_3.json").write_text(replace(told, job_id="8_3").to_json())
    assert spool.read_inbox([UID]).attempts == {
        (UID, "7"): told,
        (UID, "8_3"): replace(told, job_id="8_3"),
    }


@pytest.mark.parametrize("kind", ["other job", "long", "link", "hard link", "garbage", "version"])
def test_attempts_that_do_not_count(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture):
    spool = Spool(tmp_path / "spool")
    spool.prepare()
    mine = Path(str(user_dir(spool.root, UID)))
    mine.mkdir()
    path, good = mine / "attempts-7.json", Attempts("7", (Attempt(0, 1.0, 4),))
    match kind:
        case "other job":
            path.write_text(replace(good, job_id="8").to_json())
        case "long":
            path.write_text(good.to_json() + " " * MAX_ATTEMPTS_BYTES)
        case "link":
            (tmp_path / "real").write_text(good.to_json())
            path.symlink_to(tmp_path / "real")
        case "hard link":
            (tmp_path / "real").write_text(good.to_json())
            os.link(tmp_path / "real", path)
        case "version":
            path.write_text(replace(good, version=9).to_json())
        case _:
            path.write_text("[")
    assert spool.read_inbox([UID]).attempts == {}
    assert "attempts-7.json" in caplog.text


# -- documents -----------------------------------------------------------------------------------


def test_a_running_jobs_document_follows_its_reports(site):
    job = running(site)
    site.report(job, total_steps=2000, last_checkpoint_step=10, last_checkpoint_s=site.now - 2)
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    assert (found.truth.step, found.truth.samples_per_s) == (20, RATE[4])
    assert (found.truth.checkpoint_step, found.truth.attempt) == (10, 0)
    assert found.truth.ends_s.source is Source.PROGRESS
    left = (2000 - 20) * BATCH / RATE[4]
    assert found.truth.ends_s.value == pytest.approx(found.truth.at_s + left)


def test_a_report_is_written_on_only_every_so_often_but_a_checkpoint_at_once(site, monkeypatch):
    monkeypatch.setattr(documents, "truth_every_s", lambda running: TRUTH_EVERY_S)
    job = running(site)
    site.report(job, step=20)
    site.cycles()
    site.report(job, step=30)
    site.cycles()
    assert read_plan(site.config.spool, int(job)).truth.step == 20
    site.report(job, step=40, last_checkpoint_step=40)
    site.cycles()
    assert read_plan(site.config.spool, int(job)).truth.step == 40
    site.cycles(int(TRUTH_EVERY_S / site.config.cycle_s))
    site.report(job, step=50, last_checkpoint_step=40)
    site.cycles()
    assert read_plan(site.config.spool, int(job)).truth.step == 50


def test_attempts_stay_in_the_document_of_a_job_that_waits_and_of_one_that_is_gone(site):
    job = running(site)
    site.fill_rest()
    site.came_back(job, Cause.NODE_FAIL, last_step=10, saved_step=5)
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    assert [a.cause for a in found.attempts] == [Cause.NODE_FAIL]
    site.slurm.cancel(job)
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    assert (found.state, len(found.attempts)) == (ENDED, 1)


def test_somebody_elses_record_about_a_job_counts_nothing(site):
    job = Bench.submit(site, 4, 10**8, auto=False, uid=UID + 1)
    site.cycles(2)
    site.record(job, Attempt(0, 1.0, 4, ended_s=2.0, cause=Cause.PREEMPTED))
    site.report(job)
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    assert (found.truth, found.attempts) == (None, ())


# -- requeues ------------------------------------------------------------------------------------


def test_a_requeued_job_is_noted_with_its_cause_counted_and_let_go_at_once(site):
    job = running(site)
    site.came_back(job, Cause.PREEMPTED)
    site.cycles(2)
    assert site.slurm.find(job).state is JobState.RUNNING  # not after 121 s
    entry = site.engine.memory.ledger[job]
    assert [r.cause for r in entry.requeues] == [Cause.PREEMPTED]
    assert entry.first_submit_s < entry.requeues[0].at_s
    assert site.value("restarts_total", cause="preempted") == 1
    assert site.value("resumes_lifted_total") == 1
    site.engine.close()
    site.start()
    site.cycles()
    assert site.engine.memory.ledger[job].requeues == entry.requeues
    assert site.value("restarts_total", cause="preempted") == 0  # counted by its predecessor


def test_a_job_that_fails_at_every_start_cools_down_and_its_gpus_go_to_others(tmp_path):
    site = Site(tmp_path, nodes=1, resume_free_failures=1, resume_cooldown_s=200)
    job = running(site, 4)
    for _ in range(2):
        site.came_back(job, Cause.USER_ERROR)
        site.cycles()
    assert site.slurm.find(job).state is JobState.PENDING
    found = read_plan(site.config.spool, int(job))
    assert found.decision.verdict is Verdict.WAIT
    assert found.decision.waits_for == COOLING
    assert "2 requeues" in found.decision.reason
    assert "cause: user error" in found.decision.reason
    # It may not be leased, so what keeps it back is Slurm's own delay, and that is foretold.
    assert found.decision.expected_start_s == site.slurm.find(job).begin_s
    assert found.candidates
    assert site.value("cooling_jobs") == 1
    other = site.submit(4, 10_000)
    site.cycles()
    assert site.slurm.find(other).state is JobState.RUNNING


def test_a_requeued_jobs_work_is_what_lies_behind_its_checkpoint(site):
    job = site.submit(4, 36_000)
    site.cycles(2)
    site.fill_rest()
    gpus = site.slurm.find(job).gpus
    site.report(job, step=100, samples=20_000, last_checkpoint_step=60, samples_per_s=RATE[gpus])
    site.came_back(job, Cause.PREEMPTED)
    site.fill_rest()
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    at_one = next(c for c in found.candidates if c.gpus == 1)
    assert at_one.remaining_s.value == pytest.approx((36_000 - 12_000) / RATE[1])
    assert found.waiting_since_s < site.slurm.find(job).submit_s


def test_a_job_that_never_started_has_nothing_to_tell(site):
    """A file left by an earlier job of the same number, or made up to look nearly done."""
    site.fill()
    job = site.submit(4, 36_000)
    honest = site.submit(4, 36_000)
    site.report(job, step=100, samples=35_900, last_checkpoint_step=100, samples_per_s=1e6)
    site.record(job, Attempt(0, site.now - 50, 4))
    site.cycles()
    found, other = (read_plan(site.config.spool, int(i)) for i in (job, honest))
    assert [c.remaining_s.value for c in found.candidates] == [
        c.remaining_s.value for c in other.candidates
    ]
    assert not found.attempts


def test_the_requeue_delay_of_the_site_is_lifted(tmp_path):
    site = Site(tmp_path)
    site.slurm.config["authinfo"] = "cred_expire=300"
    job = running(site)
    site.slurm.requeue(job)
    site.slurm.find(job).begin_s = site.now + 301
    site.cycles(2)
    assert site.slurm.find(job).state is JobState.RUNNING


def test_the_delay_that_nobody_may_lift_is_foretold(tmp_path):
    site = Site(tmp_path, act=["lease"])  # neither order nor resize: the job is left alone
    job = site.submit(4, 10**8, auto=False)
    site.slurm.start(job)
    site.cycles()
    site.slurm.requeue(job)
    site.cycles()
    found = read_plan(site.config.spool, int(job))
    assert found.decision.verdict is Verdict.LEAVE
    assert found.decision.expected_start_s == site.slurm.find(job).begin_s
    assert found.decision.expected_start_s > site.now + 100


# -- calibration ---------------------------------------------------------------------------------


def slow(site: Site, job: str, factor: float = 1 / 1.5) -> None:
    site.report(job, samples_per_s=RATE[site.slurm.find(job).gpus] * factor)


def test_a_model_that_runs_slower_than_its_table_is_corrected_kept_and_told(site):
    """The table is off by 1.5 for one model: after three jobs a waiting one is within a tenth."""
    jobs = [running(site, gpus) for gpus in (4, 2, 1)]
    site.fill_rest()
    waiting = site.submit(4, 36_000, auto=False)
    site.cycles()
    before = read_plan(site.config.spool, int(waiting)).decision.remaining_s
    assert before.value == pytest.approx(36_000 / RATE[4])
    for job in jobs:
        slow(site, job)
    site.cycles(2)
    after = read_plan(site.config.spool, int(waiting)).decision.remaining_s
    assert after.value == pytest.approx(1.5 * 36_000 / RATE[4], rel=0.1)
    assert "table corrected by 0.71 from 3 jobs" in after.note
    (told,) = read_cluster(site.config.spool).corrections
    assert (told.model, told.gpu_type, told.jobs) == ("vit", "v100", 3)
    assert site.value("calibration_factor", model="vit", gpu_type="v100") == told.factor
    with Journal(site.config.journal, 1000) as journal:
        assert {sample.job_id for sample in journal.samples()} == set(jobs)
    # A new daemon knows it at once, whether or not the jobs still run.
    site.engine.close()
    for job in jobs:
        site.slurm.cancel(job)
    site.start()
    site.cycles(2)
    assert read_cluster(site.config.spool).corrections == (told,)


def test_a_journal_from_before_is_opened_and_gets_the_new_table(site):
    site.engine.close()
    with Journal(site.config.journal, 1000) as journal:
        journal._db.execute("DROP TABLE sample")
    with Journal(site.config.journal, 1000) as journal:
        assert journal.samples() == []


def test_reports_that_stay_the_same_are_not_written_again(site, monkeypatch):
    job = running(site)
    slow(site, job)
    site.cycles()
    stored = []
    monkeypatch.setattr(
        Journal, "store_samples", lambda self, changed, gone: stored.extend([*changed, *gone])
    )
    for _ in range(3):
        slow(site, job)
        site.cycles()
    assert stored == []
    slow(site, job, 0.5)
    site.cycles()
    assert [sample.job_id for sample in stored] == [job]


# -- what attempts cost --------------------------------------------------------------------------

ENDED_ONE = Attempt(
    0,
    100.0,
    8,
    first_step_s=120.0,
    ended_s=320.0,
    cause=Cause.PREEMPTED,
    restored_step=0,
    last_step=100,
    saved_step=75,
    stall_s=10.0,
)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, 25 * 2.0 * 8),
        ({"saved_step": None}, 100 * 2.0 * 8),
        ({"restored_step": 50, "saved_step": None}, 50 * 4.0 * 8),
        ({"saved_step": 100}, 0.0),
        ({"last_step": None}, 0.0),
        ({"ended_s": None}, 0.0),
        ({"cause": Cause.COMPLETED}, 0.0),
        ({"restored_step": 100}, 0.0),
    ],
)
def test_work_that_no_checkpoint_held(changes, lost):
    assert lost_gpu_s(replace(ENDED_ONE, **changes)) == pytest.approx(lost)


def test_recovery_is_from_the_end_to_the_first_step():
    after = Attempt(1, 325.0, 8, first_step_s=333.0)
    assert recovery_s(ENDED_ONE, after) == 13.0
    assert recovery_s(ENDED_ONE, replace(after, first_step_s=None)) is None
    assert recovery_s(ENDED_ONE, replace(after, number=2)) is None


def test_costs_are_counted_once_and_not_those_of_before(site):
    job = running(site)
    site.record(job, ENDED_ONE)
    site.engine.close()
    site.start()
    site.cycles()
    assert site.value("lost_gpu_seconds_total", cause="preempted") == 0
    second = replace(ENDED_ONE, number=1, started_s=330.0, first_step_s=340.0, ended_s=540.0)
    site.record(job, ENDED_ONE, second)
    site.cycles(3)
    assert site.value("lost_gpu_seconds_total", cause="preempted") == pytest.approx(400.0)
    assert site.value("attempt_gpu_seconds_total") == pytest.approx(210.0 * 8)
    assert site.value("checkpoint_gpu_seconds_total") == pytest.approx(80.0)
    assert site.value("recovery_seconds_count") == 1
    assert site.value("recovery_seconds_sum") == pytest.approx(20.0)


def test_the_share_of_checkpoints_of_what_runs(site):
    job = running(site)
    begun = site.slurm.find(job).start_s
    site.report(job, stall_s=1.0)
    share = 1.0 / (site.now - begun)
    site.cycles()
    assert site.value("checkpoint_share") == pytest.approx(share)

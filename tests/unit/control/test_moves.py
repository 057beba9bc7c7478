"""Moving a running job out of the way of one that fragments keep from starting.

Two nodes of four GPUs; a job on two GPUs of each; a third job needs four GPUs of one node.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_ext.control.asks import Munge
from slurm_ext.control.journal import Journal
from slurm_ext.control.spool import read_plan
from slurm_ext.domain.attempt import Attempt, Cause
from slurm_ext.domain.codec import dumps
from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.errors import ProtocolError, SourceMissingError
from slurm_ext.domain.job import JobState, ShapeKind
from slurm_ext.domain.journal import JournalRow
from slurm_ext.domain.pausing import (
    PauseAnswer,
    PauseAsk,
    Rung,
    answer_name,
    parse_answer,
    parse_ask,
)
from slurm_ext.domain.request import PLANS, user_dir
from tests.fakes.slurm import EPOCH, Fault
from tests.unit.control.test_attempts import BATCH, UID, Site

ACTS = ["order", "lease", "move"]
HOUR = 3600.0


def vouched_by(credential: str, words: str) -> int:
    uid, _, said = credential.partition("|")
    if said != words:
        raise ProtocolError("credential: made for another request")
    return int(uid)


MUNGE = Munge(lambda words: f"{UID}|{words}", vouched_by)


class Fragments(Site):
    """The cluster of the module; ``keys`` are of the configuration."""

    def __init__(
        self, tmp_path: Path, *, act: list[str] | None = None, nodes: int = 2, **keys: object
    ) -> None:
        keys = {"move_margin": 0.5, "move_cooldown_s": HOUR, **keys}
        super().__init__(tmp_path, nodes=nodes, act=ACTS if act is None else act, **keys)
        self.start(munge=MUNGE)

    def job(self, gpus: int, *, max_pause_s: int | None = None, **fields: object) -> str:
        directive = Directive(
            model="vit",
            samples=int(fields.pop("samples", 3_600_000)),  # type: ignore[call-overload]
            batch_min=BATCH,
            batch_max=BATCH,
            gpus=GpuRequest(GpuRequestKind.REQUESTED),
            max_pause_s=max_pause_s,
            shape=ShapeKind.SINGLE_NODE,
            req=RequestedShape(gpus=gpus, ntasks=gpus, gpus_per_node=gpus, nodes_max=1),
        )
        return self.submit(
            gpus,
            auto=False,
            kind=ShapeKind.SINGLE_NODE,
            admin_comment=f"ft:{directive.to_json()}",
            run_s=5 * HOUR,
            time_limit_s=10 * HOUR,
            **fields,
        )

    def running(self, node: str, *, max_pause_s: int | None = None, **fields: object) -> str:
        """A job on two GPUs of this node that trains for hours."""
        job = self.job(2, max_pause_s=max_pause_s, **fields)
        self.slurm._start(self.slurm.find(job), {node: 2})
        return job

    def tells(self, job: str, *, save_s: float | None = 4.0, start_s: float | None = 20.0) -> None:
        """The job reports, as one under ft-run does, that it has trained for a while."""
        began = self.now - 600.0
        first = None if start_s is None else began + start_s
        self.slurm.find(job).start_s = began
        self.report(job, step=100, samples=100 * BATCH, save_s=save_s, first_step_s=first)
        self.record(job, Attempt(0, began, 2, ("n01",), 2))

    def asked(self) -> list[PauseAsk]:
        """What lies in the daemon's part of the spool."""
        paths = sorted(Path(self.config.spool, PLANS).glob("pause-ask-*"))
        return [parse_ask(path.read_text(), str(path)) for path in paths]

    def answers(self, ask: PauseAsk, end: str = "", stage: str = "done", reason: str = "") -> None:
        """What the job's helper writes."""
        folder = Path(str(user_dir(self.config.spool, UID)))
        answer = PauseAnswer(ask.id, stage, 1, end, reason)
        (folder / answer_name(ask.id)).write_text(dumps(answer))

    def rows(self, event: str = "move") -> list[JournalRow]:
        with Journal(self.config.journal, 1000) as journal:
            return [row for row in journal.history() if row.event == event]

    def notes(self, job: str) -> str:
        return "\n".join(read_plan(self.config.spool, int(job)).notes)


@pytest.fixture
def site(tmp_path: Path) -> Fragments:
    return Fragments(tmp_path)


def fragmented(site: Fragments, max_pause_s: int | None = 600) -> tuple[str, str, str]:
    """One who may move, one who may not, and the one who waits."""
    mover = site.running("n01", max_pause_s=max_pause_s)
    other = site.running("n02")
    site.tells(mover)
    site.tells(other)
    return mover, other, site.job(4)


def test_a_job_that_allows_it_moves_and_both_run(site: Fragments) -> None:
    """Asked by a file with the daemon's credential, journalled first, told, and worth it."""
    mover, _, waiting = fragmented(site)
    site.cycles()
    (ask,) = site.asked()
    assert (ask.job_id, ask.verb, ask.rung) == (mover, "pause", Rung.JOB)
    assert vouched_by(ask.credential, ask.words()) == UID
    (row,) = site.rows()
    assert (row.job_id, row.outcome) == (mover, "")
    assert f"job {waiting}" in row.reason
    assert f"job {mover} (2 GPUs) saves" in site.notes(waiting)
    # Not asked again while it is under way.
    site.cycles(2)
    assert site.asked() == [ask]
    site.answers(ask, "saved")
    site.slurm.requeue(mover)
    site.cycles(4)
    assert site.asked() == []
    assert [r.outcome for r in site.rows()] == ["", "ok"]
    found = site.slurm.find(waiting)
    assert (found.state, dict(found.placement)) == (JobState.RUNNING, {"n01": 4})
    moved = site.slurm.find(mover)
    assert (moved.state, dict(moved.placement)) == (JobState.RUNNING, {"n02": 2})
    assert site.slurm.shrunk == []


def test_nobody_moves_where_it_is_not_switched_on(tmp_path: Path) -> None:
    site = Fragments(tmp_path, act=["order", "lease"])
    fragmented(site)
    site.cycles(3)
    assert site.asked() == []
    assert site.rows() == []


def test_nobody_moves_under_an_observer(site: Fragments) -> None:
    site.start(munge=MUNGE, observe_only=True)
    fragmented(site)
    site.cycles(3)
    assert site.asked() == []


def test_without_consent_nobody_moves_and_explain_says_so(site: Fragments) -> None:
    _, _, waiting = fragmented(site, max_pause_s=None)
    site.cycles(3)
    assert site.asked() == []
    assert "its owner has not allowed it (--ft-max-pause)" in site.notes(waiting)


def test_a_pause_that_is_allowed_is_not_exceeded(site: Fragments) -> None:
    """Away for about 50 s: save, clean-up, three cycles, start."""
    _, _, waiting = fragmented(site, max_pause_s=40)
    site.cycles(3)
    assert site.asked() == []
    assert "longer than its owner allows" in site.notes(waiting)


@pytest.mark.parametrize(
    ("lacking", "words"),
    [({"save_s": None}, "how long it takes to save"), ({"start_s": None}, "takes to start")],
)
def test_without_measurements_nobody_moves(
    site: Fragments, lacking: dict[str, None], words: str
) -> None:
    """Nothing is guessed."""
    mover, _, waiting = fragmented(site)
    site.tells(mover, **lacking)
    site.cycles(3)
    assert site.asked() == []
    assert words in site.notes(waiting)


def test_a_start_of_an_earlier_attempt_counts(site: Fragments) -> None:
    """And the longest one does: away for more than the five minutes that are allowed."""
    mover, _, waiting = fragmented(site, max_pause_s=300)
    began = site.now - 5000.0
    site.record(mover, Attempt(0, began, 2, first_step_s=began + 290.0, ended_s=began + 4000.0))
    site.cycles(2)
    assert site.asked() == []
    assert "longer than its owner allows" in site.notes(waiting)


def test_reports_of_an_earlier_attempt_do_not_count(site: Fragments) -> None:
    mover, _, waiting = fragmented(site)
    site.slurm.find(mover).restarts = 1
    site.cycles(3)
    assert site.asked() == []
    assert "has not reported" in site.notes(waiting)


def test_a_move_that_costs_more_than_it_gains_is_left(site: Fragments) -> None:
    """A save of a quarter of an hour, for a job that has a few minutes to wait."""
    mover, other, waiting = fragmented(site, max_pause_s=2 * 3600)
    site.tells(mover, save_s=900.0)
    # The other one ends soon, and with it the waiting job finds its node.
    ends_in(site, other, 600.0)
    site.cycles(2)
    assert site.asked() == []
    assert "would cost more than it gains" in site.notes(waiting)


def ends_in(site: Fragments, job: str, seconds: float) -> None:
    """The job reports so much work that it ends then."""
    total = 100 * BATCH + int(190.0 * seconds)
    site.report(
        job, step=100, samples=100 * BATCH, save_s=4.0, total_samples=total, samples_per_s=190.0
    )


def test_gpus_do_not_stand_still_for_a_few_seconds_of_a_short_job(site: Fragments) -> None:
    """A job of ten seconds is worth much to the objective, but 40 s of two GPUs are more."""
    mover, other, _ = fragmented(site)
    site.slurm.cancel("3")
    waiting = site.job(4, samples=3600)
    ends_in(site, other, 60.0)
    assert mover
    site.cycles()
    assert site.asked() == []
    assert "would cost more than it gains" in site.notes(waiting)


def test_a_job_near_its_end_does_not_move_for_one_of_weeks(site: Fragments) -> None:
    """GPU-seconds alone would move it: the objective lets short work be done first."""
    mover = site.running("n01", max_pause_s=600)
    other = site.running("n02")
    for job in (mover, other):
        site.tells(job)
        ends_in(site, job, 600.0)
    waiting = site.job(4, samples=10**10)
    site.slurm.find(mover).start_s = site.now - 600.0
    site.report(
        mover,
        step=100,
        samples=100 * BATCH,
        save_s=4.0,
        total_samples=100 * BATCH + int(190.0 * 600),
        samples_per_s=190.0,
        first_step_s=site.now - 590.0,
    )
    site.cycles()
    assert site.asked() == []
    assert "would cost more than it gains" in site.notes(waiting)


def test_beside_a_job_that_may_end_at_any_moment_nobody_moves(site: Fragments) -> None:
    """Of which only the time limit is known; it is no job of ours."""
    mover = site.running("n01", max_pause_s=600)
    site.tells(mover)
    foreign = site.slurm.submit(
        gpus=2, kind=ShapeKind.SINGLE_NODE, run_s=HOUR, user="bob", uid=4711
    )
    site.slurm._start(site.slurm.find(foreign), {"n02": 2})
    waiting = site.job(4)
    site.cycles(2)
    assert site.asked() == []
    assert "would cost more than it gains" in site.notes(waiting)


def test_one_move_at_a_time(tmp_path: Path) -> None:
    """Two pairs of fragments and two who wait: the second move comes when the first has ended."""
    site = Fragments(tmp_path, nodes=4)
    movers = [site.running(node, max_pause_s=600) for node in ("n01", "n02", "n03", "n04")]
    for job in movers:
        site.tells(job)
    site.job(4)
    site.job(4)
    site.cycles(3)
    (ask,) = site.asked()
    site.answers(ask, "saved")
    site.slurm.requeue(ask.job_id)
    site.cycles(2)
    assert len([row for row in site.rows() if not row.outcome]) <= 2


def test_too_few_free_gpus_are_no_fragments(site: Fragments) -> None:
    _, _, waiting = fragmented(site)
    third = site.job(1)
    site.slurm._start(site.slurm.find(third), {"n02": 1})
    site.cycles()
    assert site.asked() == []
    assert "way" not in site.notes(waiting)


def test_nobody_moves_for_what_a_job_ahead_would_take(site: Fragments) -> None:
    """Six GPUs on two nodes: the room for four would be gone before the other one sees it."""
    _, _, waiting = fragmented(site)
    directive = Directive(
        model="vit",
        samples=1000,
        shape=ShapeKind.RANK_PER_GPU,
        req=RequestedShape(gpus=6, ntasks=6, gpus_per_task=1),
    )
    site.submit(
        6,
        auto=False,
        nodes=2,
        time_limit_s=60.0,
        run_s=60.0,
        admin_comment=f"ft:{directive.to_json()}",
    )
    site.cycles()
    assert site.asked() == []
    assert "which is ahead, would take the room" in site.notes(waiting)


def test_nobody_moves_for_a_job_that_does_not_want_to_start_yet(site: Fragments) -> None:
    fragmented(site)
    site.slurm.cancel("3")
    site.job(4, begin_s=site.now + HOUR)
    site.cycles(2)
    assert site.asked() == []


def test_the_margin_decides(tmp_path: Path) -> None:
    """The very move that is made at a margin of a half is not made at a hundred times."""
    site = Fragments(tmp_path, move_margin=100.0)
    mover, _, waiting = fragmented(site, max_pause_s=24 * 3600)
    site.tells(mover, save_s=600.0)
    site.cycles(2)
    assert site.asked() == []
    assert "would cost more than it gains" in site.notes(waiting)
    site.config = site.config.model_copy(update={"move_margin": 0.5})
    site.engine.reconfigure(site.config)
    site.cycles()
    assert len(site.asked()) == 1


def test_a_job_that_rolled_back_is_left_alone_for_the_cooldown(site: Fragments) -> None:
    mover, _, waiting = fragmented(site)
    site.cycles()
    (ask,) = site.asked()
    site.answers(ask, "aborted", reason="not rank 1 at a safe point in time")
    site.cycles()
    assert site.asked() == []
    assert site.rows()[-1].outcome == "aborted: not rank 1 at a safe point in time"
    site.cycles(5)
    assert site.asked() == []
    assert "not long ago" in site.notes(waiting)
    site.slurm.advance(HOUR)
    site.tells(mover)
    site.cycles()
    assert [a.job_id for a in site.asked()] == [mover]


def test_a_job_that_was_requeued_lately_is_left_alone(site: Fragments) -> None:
    """For whatever cause, and also after a restart of the daemon: requeues are in the ledger."""
    mover = site.running("n01", max_pause_s=600)
    other = site.running("n02")
    site.cycles()
    site.slurm.requeue(mover)
    site.cycles()
    site.slurm._start(site.slurm.find(mover), {"n01": 2})
    site.start(munge=MUNGE)
    site.tells(other)
    began = site.now - 100.0
    site.report(mover, step=100, samples=100 * BATCH, save_s=4.0, first_step_s=began)
    site.record(mover, Attempt(0, began, 2, first_step_s=began + 9, cause=Cause.OPERATOR))
    waiting = site.job(4)
    site.cycles(2)
    assert site.asked() == []
    assert "not long ago" in site.notes(waiting)


def test_a_job_that_nobody_answers_for_is_withdrawn(site: Fragments) -> None:
    fragmented(site)
    site.cycles(8)
    assert site.asked() == []
    assert [row.outcome for row in site.rows()] == ["", "nobody answered"]


def test_nobody_moves_for_a_job_that_would_fit(site: Fragments) -> None:
    fragmented(site)
    site.slurm.cancel("3")
    small = site.job(2)
    site.cycles(2)
    assert site.asked() == []
    assert site.slurm.find(small).state is JobState.RUNNING


def test_nobody_moves_who_would_find_no_place(tmp_path: Path) -> None:
    """Four GPUs are free on three nodes; with the first node emptied, two are left on none."""
    site = Fragments(tmp_path, nodes=3)
    mover = site.running("n01", max_pause_s=600)
    for node in ("n02", "n03"):
        filler = site.job(3)
        site.slurm._start(site.slurm.find(filler), {node: 3})
    site.tells(mover)
    waiting = site.job(4)
    site.cycles(3)
    assert site.asked() == []
    assert "no running job could give way" in site.notes(waiting)


def test_nobody_moves_for_what_a_foreign_job_would_take(site: Fragments) -> None:
    _, _, waiting = fragmented(site)
    site.slurm.submit(
        gpus=4, kind=ShapeKind.SINGLE_NODE, run_s=HOUR, base_priority=10**6, user="bob", uid=4711
    )
    site.cycles(2)
    assert site.asked() == []
    assert "which is not ours, would take the room" in site.notes(waiting)


def test_a_foreign_job_that_slurm_never_starts_takes_no_room(site: Fragments) -> None:
    _, _, waiting = fragmented(site)
    foreign = site.slurm.submit(
        gpus=4, kind=ShapeKind.SINGLE_NODE, run_s=HOUR, base_priority=10**6, user="bob", uid=4711
    )
    site.slurm.bar = lambda job: "PartitionTimeLimit" if str(job.raw_id) == foreign else ""
    site.cycles(3)
    assert "which is not ours, would take the room" not in site.notes(waiting)
    assert len(site.asked()) == 1


def test_munge_that_is_down_costs_nothing_but_the_move(tmp_path: Path) -> None:
    site = Fragments(tmp_path)

    def down(words: str) -> str:
        raise SourceMissingError("munge", "no socket")

    site.start(munge=replace(MUNGE, vouch=down))
    fragmented(site)
    (report,) = site.cycles()
    assert not report.skipped
    assert site.asked() == []


# -- operators' requests -------------------------------------------------------------------------

ASK = PauseAsk("0123456789abcdef", "pause", "1", EPOCH, Rung.MEMORY, by="me")


def leave(site: Fragments, ask: PauseAsk, credential: str | None = None) -> Path:
    """The file that an operator's command leaves in the own part of the spool."""
    folder = Path(str(user_dir(site.config.spool, UID)))
    folder.mkdir(exist_ok=True)
    path = folder / ask.name
    vouched = replace(ask, credential=credential or MUNGE.vouch(ask.words()))
    path.write_text(dumps(vouched))
    return path


@pytest.fixture
def operator(site: Fragments, monkeypatch: pytest.MonkeyPatch) -> Fragments:
    """A site on which this user is an operator, whatever its name."""
    me = SimpleNamespace(pw_uid=UID)
    monkeypatch.setattr("slurm_ext.control.asks.pwd.getpwnam", lambda name: {"me": me}[name])
    site.slurm.site_operators = frozenset({"me"})
    assert site.running("n01") == ASK.job_id
    return site


def answer(site: Fragments) -> PauseAnswer | None:
    """What the daemon itself answered."""
    path = Path(site.config.spool, PLANS, answer_name(ASK.id))
    return parse_answer(path.read_text(), str(path)) if path.exists() else None


def test_an_operators_request_is_passed_on_once_and_cleared_away(operator: Fragments) -> None:
    """Under the daemon's credential, and also where the daemon only observes."""
    operator.start(munge=MUNGE, observe_only=True)
    path = leave(operator, ASK)
    operator.cycles()
    (passed,) = operator.asked()
    assert passed.id == ASK.id
    assert "operator" in passed.by
    assert vouched_by(passed.credential, passed.words()) == UID
    assert [row.outcome for row in operator.rows("request")] == ["passed on"]
    operator.cycles(2)
    assert len(operator.rows("request")) == 1
    path.unlink()
    operator.cycles()
    assert operator.asked() == []


@pytest.mark.skipif(os.getuid() == 0, reason="root is always one")
def test_who_is_no_operator_is_not_even_read(operator: Fragments) -> None:
    operator.slurm.site_operators = frozenset()
    leave(operator, ASK)
    operator.cycles(2)
    assert operator.asked() == []
    assert answer(operator) is None


@pytest.mark.parametrize(
    ("ask", "credential", "words"),
    [
        (replace(ASK, job_id="77"), None, "does not run"),
        (ASK, f"4711|{ASK.words()}", "vouched for by user 4711"),
        (ASK, f"{UID}|{replace(ASK, verb='resume').words()}", "for another request"),
        (ASK, "nonsense", "for another request"),
    ],
)
def test_what_an_operator_did_not_say_is_refused_with_the_reason(
    operator: Fragments, ask: PauseAsk, credential: str | None, words: str
) -> None:
    leave(operator, ask, credential)
    operator.cycles()
    assert operator.asked() == []
    found = answer(operator)
    assert found is not None
    assert found.end == "refused"
    assert words in found.reason
    assert operator.rows("request")[0].outcome.startswith("refused")


@pytest.mark.skipif(os.getuid() != 0, reason="files of another user need root")
def test_a_file_of_somebody_else_in_an_operators_directory_is_not_read(
    operator: Fragments,
) -> None:
    os.chown(leave(operator, ASK), 4711, 4711)
    operator.cycles()
    assert operator.asked() == []


@pytest.mark.skipif(os.getuid() != 0, reason="directories of another user need root")
def test_a_directory_of_somebody_else_under_an_operators_name_is_not_read(
    operator: Fragments,
) -> None:
    os.chown(leave(operator, ASK).parent, 4711, 4711)
    operator.cycles()
    assert operator.asked() == []


def test_requests_of_an_earlier_daemon_are_swept_when_they_are_old(operator: Fragments) -> None:
    """Nobody knows any more what became of them."""
    old = Path(operator.config.spool, PLANS, replace(ASK, id="f" * 16).name)
    old.write_text(dumps(replace(ASK, id="f" * 16)))
    operator.start(munge=MUNGE)
    operator.cycles()
    assert old.exists()
    operator.slurm.advance(700.0)
    operator.cycles()
    assert not old.exists()


def test_operators_that_cannot_be_read_cost_no_cycle(operator: Fragments) -> None:
    operator.slurm.inject("operators", Fault.FAIL)
    leave(operator, ASK)
    (report,) = operator.cycles()
    assert not report.skipped
    assert operator.asked() == []
    operator.cycles()
    assert len(operator.asked()) == 1

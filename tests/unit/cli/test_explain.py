"""``slurm-ext explain JOBID``: what the daemon decided, retold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_ext.cli.explain import base_id_of, tell
from slurm_ext.domain.configuration import Configuration
from slurm_ext.domain.document import ENDED, Mode, PlanDocument, Truth
from slurm_ext.domain.errors import DataError
from slurm_ext.domain.estimate import Estimate, Source
from slurm_ext.domain.plan import SolveInfo, Term, Verdict
from slurm_ext.domain.policy import Permit
from slurm_ext.policy.roomless import term_name
from tests.unit.cli.spooled import MADE_S, Site, candidate, decision, document, estimate, whole


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def told(made: PlanDocument, now: float = MADE_S + 30, **daemon: object) -> str:
    return "\n".join(tell(made, whole(**daemon), now))  # type: ignore[arg-type]


def test_a_waiting_job(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    wait = decision(waits_for="at least 1 GPU; its pool has none left after this plan")
    wait = replace(wait, expected_start_s=MADE_S + 4800)
    site.write(document(made=wait, place=2, places=5, foreign_ahead=1))
    assert site.run("explain", "7") == 0
    out = capsys.readouterr().out
    for words in (
        "Job 7 of alice, partition main, QOS normal: pending (Slurm says: BeginTime)",
        "GPUs    not decided yet (4 submitted, 2 likely)",
        "counts it may get: 1, 2, 4",
        "Place   2 of 5 planned jobs in this partition and QOS; 1 other job has a higher priority",
        "Waits   for at least 1 GPU; its pool has none left",
        "Start   in about 1 h ",
        "Work    30 min (27 min to 33 min); measured for this very configuration",
        "   1 GPU   1 h",
        "   4 GPUs  17 min (15 min to 18 min)",
        "the daemon carries this out",
        "1 free GPU among 3 jobs: proven best",
    ):
        assert words in out
    # Refused counts in the order of counts, terms by weight.
    assert out.index("8 GPUs  no: QOS normal allows 4 GPUs") < out.index("16 GPUs  no:")
    assert out.index("tips the scales") < out.index("hardly matters")


def test_a_job_about_to_start_names_its_nodes_and_no_start_time(site: Site) -> None:
    start = decision(Verdict.START, nodes=("n01", "n02"), expected_start_s=MADE_S)
    text = told(document(made=start))
    assert "GPUs    2 planned on n[01-02] (4 submitted)" in text
    assert "Start  " not in text


def test_the_age_of_a_document_is_not_the_age_of_the_plan() -> None:
    """An unchanged document is not written again, so an old one of a live daemon holds."""
    text = told(document(), now=MADE_S + 7200, made_s=MADE_S + 7199)
    assert "unchanged since" in text
    assert "Beware" not in text
    assert "old" not in text


def test_a_silent_daemon_promises_nothing() -> None:
    text = told(document(), now=MADE_S + 1000)
    assert "the daemon has been silent for 17 min: this is what it planned last" in text
    assert "carries this out" not in text


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Mode.OBSERVE, "only observes here: nothing of this is carried out"),
        (Mode.RELEASED, "an administrator took everything back"),
    ],
)
def test_modes_in_which_nothing_happens(mode: Mode, words: str) -> None:
    text = told(document(mode=mode))
    assert words in text
    assert "the daemon carries" not in text


def test_a_job_that_is_left_alone_says_why() -> None:
    leave = decision(Verdict.LEAVE, reason="its owner holds it", terms=(), remaining_s=None)
    text = told(document(made=leave, candidates=(), refused={}, place=None, solve=None))
    assert "GPUs    4 as submitted; not planned: its owner holds it" in text
    assert "Place" not in text
    assert "Considered" not in text


def test_what_forbids_a_resize_is_told() -> None:
    permit = Permit(reasons=("its GPU count stays as submitted: no --ft-gpus allows another",))
    order = decision(Verdict.ORDER, reason="only its place in the queue is planned")
    text = told(document(made=order, permit=permit))
    assert "GPUs    4: only its place in the queue is planned" in text
    assert "its GPU count stays as submitted: no --ft-gpus allows another" in text


def test_a_count_without_room_says_so_beside_its_estimate() -> None:
    lacks = Term(term_name(4), 0.0, "there is no node with 4 GPUs free")
    text = told(document(made=decision(Verdict.START, terms=(lacks,))))
    row = next(line for line in text.splitlines() if line.startswith("       4 GPUs"))
    assert row.endswith("; no room now: there is no node with 4 GPUs free")
    assert text.count("no room now") == 1
    assert "Decided by" not in text


def test_how_sure_an_estimate_is() -> None:
    declared = decision(remaining_s=estimate(3600, Source.DECLARED, "time limit 3600 s; no model"))
    text = told(document(made=declared))
    assert "declared, not measured: taken from the time limit: time limit 3600 s; no model" in text


def test_a_plan_that_is_not_proven_says_how_good_it_is() -> None:
    solve = SolveInfo("main", "greedy", False, 0.034, 2.0, 900, 64, "time was up")
    text = told(document(solve=solve))
    assert "64 free GPUs among 900 jobs: within 3.4% of the best possible (time was up)" in text


def test_a_running_job_is_told_with_what_it_was_granted() -> None:
    text = told(document(made=decision(Verdict.START), state="RUNNING", present_gpus=8))
    assert ": running" in text
    assert "GPUs    8 granted (4 submitted)" in text
    assert "Place" not in text


def test_a_job_that_ended_is_told_as_past() -> None:
    text = told(document(made=decision(waits_for="a seat"), state=ENDED))
    assert ": has left the queue; sacct -j 7 may tell more; this is what was planned last" in text
    for words in ("Waits", "Place", "carries this out", "Lease"):
        assert words not in text


NEVER = Estimate(3e7, 0.0, 3e7, Source.DECLARED, "no time limit; no --ft-model", unlimited=True)


def test_a_stand_in_for_a_time_limit_is_not_told_as_a_time(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """365 days stood there for a job without --time."""
    endless = replace(candidate(2, 1800.0), remaining_s=NEVER, throughput=None)
    made = decision(remaining_s=NEVER, expected_start_s=MADE_S + 3e7)
    end = replace(NEVER, value=MADE_S, low=0.0, high=MADE_S)
    told_end = Truth(MADE_S, 0, 1, 1, 1.0, ends_s=end)
    waiting = document(7, made, candidates=(endless,))
    running = document(8, made, candidates=(endless,), state="RUNNING", truth=told_end)
    for one in (waiting, running):
        text = told(one)
        assert "Work    not known: no time limit; no --ft-model" in text
        assert "2 GPUs  no time limit\n" in text
        assert " d " not in text
    assert "Start   not known: a job that runs before it has no time limit" in told(waiting)
    assert "End     not known: no time limit" in told(running)
    site.write(waiting, running)
    assert site.run("explain", "7", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    for left in (found["decision"]["remaining_s"], found["candidates"][0]["remaining_s"]):
        assert (left["value"], left["low"], left["high"]) == (None, None, None)
        assert left["note"].startswith("no time limit")
    assert found["decision"]["expected_start_s"] is None
    site.run("queue", "-h", "-o", "%e|%S|%F")
    assert capsys.readouterr().out.splitlines() == [
        "no time limit|N/A|N/A",
        "no time limit|N/A|no time limit",
    ]


def test_a_job_without_gpus_is_told_what_that_means() -> None:
    none = replace(candidate(1, 300.0), configuration=Configuration(0, (0,)))
    made = document(
        made=decision(Verdict.LEAVE),
        requested_gpus=0,
        present_gpus=0,
        candidates=(none,),
        refused={},
    )
    text = told(made)
    assert "GPUs    none: it asks for no GPUs: there is nothing to plan, and Slurm orders" in text
    assert "Considered" not in text


def test_what_held_a_job_back_is_not_told_once_it_runs() -> None:
    held = document(permit=Permit(reasons=("its owner asked for a later --begin",)))
    assert "--begin" in told(held)
    assert "--begin" not in told(replace(held, state="RUNNING"))


def test_a_lease_that_runs_is_shown_and_one_that_ended_is_not() -> None:
    made = document()
    assert made.ours is not None
    leased = replace(made, ours=replace(made.ours, lease_until_s=MADE_S + 100))
    assert "Lease" in told(leased, now=MADE_S + 50)
    assert "Lease" not in told(leased, now=MADE_S + 150)


def test_json_is_the_document_itself(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    made = document()
    site.write(made)
    assert site.run("explain", "7_3", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(made.to_json())


def test_an_unknown_job(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.write()
    assert site.run("explain", "99") == 1
    assert "job 99: the daemon knows nothing of it; it may have ended" in capsys.readouterr().err


def test_no_spool_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path, spool=str(tmp_path / "elsewhere"))
    assert site.run("explain", "99") == 1
    assert f"there is no spool at {tmp_path / 'elsewhere'}" in capsys.readouterr().err


def test_a_damaged_document_is_not_called_absent(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write()
    (site.spool.root / "plans" / "7.json").write_text('{"job_id": 7}\n')
    assert site.run("explain", "7") == 1
    err = capsys.readouterr().err
    assert "7.json" in err
    assert "nothing is planned" not in err


def test_without_the_document_of_the_whole_the_rest_is_told(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.spool.write_plans([document()])
    assert site.run("explain", "7") == 0
    told_text = capsys.readouterr()
    assert "Job 7 of alice" in told_text.out
    assert "cluster.json" in told_text.err


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("12_3", 12), ("12_[1-4,9%2]", 12), ("12+1", 12)]
)
def test_ids(text: str, number: int) -> None:
    assert base_id_of(text) == number


@pytest.mark.parametrize("text", ["", "x", "12_", "12.3", "../7", "-1", "1e3"])
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(DataError, match="is not one"):
        base_id_of(text)

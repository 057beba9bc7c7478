"""``slurm-ext explain --script``: the forecast has to be what the daemon then does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slurm_ext.cli import foresee
from slurm_ext.cli.foresee import forecast
from slurm_ext.cli.foretold import Forecast, as_document, tell
from slurm_ext.cli.main import main
from slurm_ext.cli.trial import Trial, submitter, try_out
from slurm_ext.control.spool import read_plan
from slurm_ext.domain.document import Mode
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.domain.estimate import Source
from slurm_ext.domain.job import Job
from slurm_ext.domain.node import Limits
from slurm_ext.domain.plan import Verdict
from slurm_ext.domain.snapshot import Snapshot
from slurm_ext.slurm.process import Answer, CommandRunner
from tests.fakes.slurm import FakeSlurm, Fault
from tests.unit.control.bench import Bench

SCRIPT = """#!/bin/bash
#SBATCH --ft-model=vit --ft-samples=36000 --ft-batch=256 --ft-gpus=auto
#SBATCH -n4 --gpus-per-task=1 --time=120
srun train
"""
STARTS = "sbatch: Job 9 to start at 1700000060 using 4 processors on nodes n01 in partition main\n"


class Runner(CommandRunner):
    """sbatch and sacctmgr without a cluster."""

    def __init__(self, sbatch: Answer | None = None, account: str | None = "research") -> None:
        super().__init__()
        self.sbatch = sbatch or Answer("", STARTS, 0)
        self.account = account
        self.ran: list[Sequence[str]] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        check: bool = True,
    ) -> Answer:
        self.ran.append(argv)
        if "sbatch" in argv:
            return self.sbatch
        if self.account is None:
            raise SlurmCommandError(argv, 1, "slurmdbd is away")
        return Answer(
            f"{self.account}|other||\n{self.account}|{self.account}||high,normal\n", "", 0
        )


def ask(
    bench: Bench,
    text: str = SCRIPT,
    *,
    runner: CommandRunner | None = None,
    slurm: FakeSlurm | None = None,
) -> Forecast:
    """Ask as a user would, beside a daemon that has just finished a cycle."""
    path = bench.config.spool.parent / "job.sbatch"
    path.write_text(text)
    return forecast(path, bench.config, slurm or bench.slurm, runner or Runner(), bench.now)


def words(found: Forecast) -> str:
    return "\n".join(tell(found))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- the forecast is the daemon's decision -------------------------------------------------------


def _empty(bench: Bench) -> None:
    bench.cycles()


def _full(bench: Bench) -> None:
    bench.fill()
    bench.cycles()


def _some_wait(bench: Bench) -> None:
    bench.fill()
    for samples in (9_000, 20_000, 400_000):
        bench.submit(gpus=4, samples=samples)
    bench.submit(gpus=2, auto=False)
    bench.cycles(3)


def _half_full(bench: Bench) -> None:
    bench.slurm.start(bench.submit(8, 10**9, auto=False, nodes=2, time_limit_s=86400.0))
    bench.cycles()


def _foreign(bench: Bench) -> None:
    bench.fill()
    bench.slurm.submit(gpus=4, user="bob")
    bench.submit(gpus=4)
    bench.cycles(2)


def _one_pinned(bench: Bench) -> None:
    bench.fill()
    job = bench.submit(gpus=4)
    bench.cycles()
    entry = bench.engine.memory.ledger[job]
    bench.engine.memory.ledger.put(replace(entry, veto=True, veto_gpus=1))
    bench.cycles()


@pytest.mark.parametrize("setting", [_empty, _full, _some_wait, _half_full, _foreign, _one_pinned])
@pytest.mark.parametrize("act", [None, []], ids=["acting", "observing"])
def test_the_forecast_is_what_the_daemon_decides_next(tmp_path, setting, act):
    bench = Bench(tmp_path, act=act)
    setting(bench)
    found = ask(bench)
    assert found.document is not None
    job = bench.submit(gpus=4, samples=36_000)
    bench.cycles()
    truly = read_plan(bench.config.spool, int(job))
    foretold = found.document
    assert foretold.decision.verdict is truly.decision.verdict
    assert foretold.decision.configuration == truly.decision.configuration
    assert foretold.decision.nodes == truly.decision.nodes
    assert foretold.decision.rank == truly.decision.rank
    assert foretold.decision.waits_for == truly.decision.waits_for
    assert foretold.decision.expected_start_s == pytest.approx(
        truly.decision.expected_start_s, abs=10
    )
    assert [c.configuration for c in foretold.candidates] == [
        c.configuration for c in truly.candidates
    ]
    assert foretold.refused == truly.refused
    assert foretold.permit == truly.permit
    assert (foretold.place, foretold.places) == (truly.place, truly.places)
    assert found.acts == (act is None)


def test_nothing_is_written(bench):
    _some_wait(bench)
    before = {path: path.read_bytes() for path in bench.config.spool.rglob("*") if path.is_file()}
    writes, rows = list(bench.slurm.writes), set(bench.slurm.queue)
    ask(bench)
    assert bench.slurm.writes == writes
    assert set(bench.slurm.queue) == rows
    assert before == {
        path: path.read_bytes() for path in bench.config.spool.rglob("*") if path.is_file()
    }


def test_a_lease_renewed_since_its_document_is_still_ours(bench):
    _some_wait(bench)
    expected = ask(bench).document
    plans = bench.config.spool / "plans"
    for path in plans.glob("[0-9]*.json"):
        made = json.loads(path.read_text())
        if made["ours"] and made["ours"]["lease_until_s"]:
            made["ours"]["lease_until_s"] -= 120
            path.write_text(json.dumps(made))
    found = ask(bench).document
    assert found is not None
    assert found == expected


# -- what it says --------------------------------------------------------------------------------


def test_a_start_in_words(bench):
    _empty(bench)
    text = words(ask(bench))
    for line in (
        "job.sbatch: would be accepted",
        "Asks    4 GPUs on 1 node, one rank per GPU, in partition main, account research, QOS norm",
        "Start   within 10 s, with 16 GPUs on n[01-04] (4 submitted)",
        "counts it may get: 1, 2, 4, 8, 16",
        "  12 GPUs  no: global batch 256 does not divide by 12 GPUs\n      16 GPUs  30 s (25 s to",
        "Alone   Slurm by itself expects to start it in 55 s on n01 as submitted",
        "the daemon acts in partition main and would carry this out",
    ):
        assert line in text


def test_a_wait_in_words(bench):
    _some_wait(bench)
    text = words(ask(bench))
    assert "Start   in about" in text
    assert "Waits   for at least 1 GPU; its pool has none left after this plan; " in text
    assert "likely (4 submitted): its GPU count is decided when GPUs become free" in text
    assert "Place   " in text


def test_jobs_that_are_not_planned_are_counted(bench):
    _foreign(bench)
    assert "1 other waiting job is not planned by slurm-ext" in words(ask(bench))


def test_those_that_never_start_are_not(bench):
    bench.fill()
    foreign = bench.slurm.submit(gpus=4, user="bob", base_priority=10**6)
    bench.slurm.bar = lambda job: "PartitionTimeLimit" if str(job.raw_id) == foreign else ""
    bench.cycles(2)
    assert "not planned by slurm-ext" not in words(ask(bench))
    ours = bench.submit(gpus=4)
    bench.cycles(2)
    assert read_plan(bench.config.spool, int(ours)).foreign_ahead == 0
    bench.slurm.bar = lambda job: ""
    bench.cycles(2)
    assert read_plan(bench.config.spool, int(ours)).foreign_ahead == 1


def test_an_observed_partition_is_told(tmp_path):
    bench = Bench(tmp_path, act=[])
    _empty(bench)
    found = ask(bench)
    assert found.document.mode is Mode.OBSERVE
    text = words(found)
    assert "the daemon only observes partition main: it would run as submitted" in text
    assert "would carry this out" not in text


def test_a_silent_daemon_is_told(bench):
    _empty(bench)
    bench.slurm.advance(2000)
    found = ask(bench)
    assert not found.acts
    assert any("the daemon has been silent for 33 min" in note for note in found.notes)
    assert "no daemon is at work: it would run as submitted" in words(found)


def test_a_script_without_a_directive_is_slurms(bench):
    _empty(bench)
    # sbatch reads no option behind the first command.
    text = "#!/bin/bash\n#SBATCH -n4 --gpus-per-task=1\nsrun true\n#SBATCH --ft-gpus=auto\n"
    found = ask(bench, text)
    assert found.document is None
    assert "slurm-ext would leave it to Slurm: it has no --ft-* option" in words(found)
    assert "Alone   Slurm by itself expects to start it" in words(found)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--dependency=afterok:1", "would leave it to Slurm: it depends on afterok:1"),
        ("-H --hold", "would leave it to Slurm: its owner holds it"),
        ("--partition=main,other", "queued in 2 partitions"),
        ("--exclusive", "its shape is fixed (exclusive)"),
        ("--licenses=matlab:1", "it needs licences (matlab:1)"),
        ("hetjob", "heterogeneous"),
        ("--array=1-9", "Slurm takes no node list for a part of an array"),
        ("--begin=now+1hour", "--begin=now+1hour is left out"),
    ],
)
def test_what_keeps_a_script_from_being_planned(bench, line, told):
    _empty(bench)
    assert told in words(ask(bench, SCRIPT.replace("srun", f"#SBATCH {line}\nsrun")))


def test_no_time_limit_is_the_partitions(bench):
    bench.slurm.partitions["main"] = replace(bench.slurm.partitions["main"], max_time_s=7200.0)
    _empty(bench)
    found = ask(bench, SCRIPT.replace(" --time=120", ""))
    assert found.job.time_limit_s == 7200.0
    assert any("no --time" in note for note in found.notes)


def test_without_the_lua_module_nothing_is_seen_or_only_ordered(tmp_path):
    bench = Bench(tmp_path)
    bench.slurm.config["jobsubmitplugins"] = "(null)"
    _empty(bench)
    assert "leave it to Slurm: job_submit.lua is not set up" in words(ask(bench))
    bench.config = bench.config.model_copy(update={"read_comments": True})
    script = "#!/bin/bash\n#SBATCH --comment='ft: model=vit samples=36000 batch=256 gpus=auto'\n"
    found = ask(bench, script + "#SBATCH -n4 --gpus-per-task=1 --time=120\n")
    assert found.document.decision.verdict is Verdict.ORDER
    assert "job_submit.lua did not see its submission" in words(found)


def test_limits_refuse_counts(tmp_path):
    bench = Bench(tmp_path)
    bench.slurm.site_limits = {"qos:normal": Limits("QOS normal", max_gpus_per_job=4)}
    _empty(bench)
    text = words(ask(bench))
    assert "counts it may get: 1, 2, 4\n" in text
    assert "16 GPUs  no: QOS normal allows 4 GPUs per job" in text


# -- accepted, and never started -----------------------------------------------------------------


def _short(bench: Bench) -> None:
    bench.slurm.partitions["main"] = replace(bench.slurm.partitions["main"], max_time_s=1800.0)
    bench.cycles()


@pytest.mark.parametrize("script", [SCRIPT, SCRIPT.replace(" --ft-gpus=auto", "")])
def test_a_script_that_slurm_would_never_start_is_told_so_first(bench, script):
    _short(bench)
    found = ask(bench, script)
    headline, *rest = tell(found)
    assert "would be accepted, and never started: its time limit of 02:00:00 is above" in headline
    text = "\n".join(rest)
    assert "slurm-ext would leave it to Slurm: planned, it would keep GPUs idle" in text
    assert "Start " not in text
    assert "Alone " not in text
    assert "scontrol update" not in json.dumps(as_document(found))


def test_so_is_one_without_a_directive(bench):
    _short(bench)
    headline, *rest = tell(ask(bench, "#!/bin/bash\n#SBATCH -n4 --gpus-per-task=1 --time=120\n"))
    assert "would be accepted, and never started: " in headline
    assert any("leave it to Slurm: it has no --ft-* option" in line for line in rest)
    assert not any("expects to start it" in line for line in rest)


def test_where_another_size_mends_it_that_is_the_forecast(bench):
    bench.slurm.site_limits = {"qos:normal": Limits("qos normal", max_gpus_per_job=2)}
    bench.cycles()
    found = ask(bench)
    text = words(found)
    assert found.never == ""
    assert "would be accepted\n" in text
    assert "with 2 GPUs on n01 (4 submitted)" in text
    assert "Alone   Slurm by itself would never start it as submitted: qos normal allows 2" in text
    # A fixed size is not mended.
    fixed = ask(bench, SCRIPT.replace("=auto", "=requested"))
    assert "2 GPUs per job, it would take 4 (QOSMaxGRESPerJob)" in fixed.never


def test_nor_is_it_mended_where_the_daemon_only_observes(tmp_path):
    bench = Bench(tmp_path, act=[])
    bench.slurm.site_limits = {"qos:normal": Limits("qos normal", max_gpus_per_job=2)}
    bench.cycles()
    assert "it would take 4 (QOSMaxGRESPerJob)" in ask(bench).never


def test_what_slurm_would_fill_in_is_no_limit_that_is_broken(bench):
    bench.slurm.site_limits = {"qos:normal": Limits("qos normal", max_wall_s=3600.0)}
    bench.slurm.partitions["main"] = replace(
        bench.slurm.partitions["main"], max_time_s=7200.0, min_nodes=2
    )
    bench.cycles()
    assert "is above the 01:00:00 of qos normal" in ask(bench).never
    untimed = SCRIPT.replace(" --time=120", "")
    assert ask(bench, untimed).never == ""
    one = ask(bench, untimed.replace("-n4", "-N1 -n4").replace("=auto", "=requested"))
    assert "at most 1 node, below the 2 of partition main (PartitionNodeLimit)" in one.never
    assert ask(bench, untimed.replace("-n4", "-N1-2 -n4")).never == ""


def test_a_qos_that_is_not_known_may_allow_it(bench):
    bench.slurm.config["accountingstoragetype"] = "accounting_storage/slurmdbd"
    _short(bench)
    found = ask(bench, runner=Runner(account=None))
    assert found.never == ""
    assert any("unless its QOS, which could not be read, allows more" in n for n in found.notes)


# -- refusals ------------------------------------------------------------------------------------


def test_a_bad_directive_is_refused_without_asking_slurm(bench):
    _empty(bench)
    runner = Runner()
    found = ask(bench, SCRIPT.replace("=auto", "=3"), runner=runner)
    assert found.refused
    assert runner.ran == []
    assert "would be refused: --ft-gpus='3': the requested 4 GPUs are not in the list" in words(
        found
    )


def test_slurms_refusal_counts(bench):
    _empty(bench)
    said = "sbatch: error: no such account\nallocation failure: Invalid account\n"
    found = ask(bench, runner=Runner(Answer("", said, 1)))
    assert found.refused
    assert words(found).splitlines() == [
        f"{found.script}: would be refused: no such account",
        "  Invalid account",
    ]


# -- what cannot be read -------------------------------------------------------------------------


def test_without_slurm_there_are_estimates_and_no_promise(bench):
    _empty(bench)
    bench.slurm.inject("snapshot", Fault.FAIL)
    found = ask(bench)
    assert found.trial.accepted is None
    assert not found.where_known
    text = words(found)
    assert text.splitlines()[0] == (
        f"{found.script}: its options are right; whether Slurm would take it is not known:"
        " Slurm was not reachable"
    )
    assert "Unable to contact slurm controller" in text.splitlines()[1]
    assert as_document(found)["messages"][0] == "Slurm was not reachable"
    assert "Start" not in text
    assert "Place" not in text
    assert "nodes of 4 GPUs are assumed" in text
    for gpus in (1, 2, 4, 8, 16):
        assert f"{gpus:>4} GPU" in text
    assert "measured" in text


def test_without_slurm_and_without_a_table_the_time_limit_stands(bench):
    bench.config.table.unlink()
    bench.slurm.inject("snapshot", Fault.FAIL)
    found = ask(bench)
    assert [c.remaining_s.source for c in found.document.candidates] == [Source.DECLARED]
    assert any("throughput table" in note for note in found.notes)


def test_without_a_table_that_is_said(bench):
    bench.config.table.unlink()
    _empty(bench)
    found = ask(bench)
    assert any("throughput table" in note and "no such file" in note for note in found.notes)
    assert [c.gpus for c in found.document.candidates] == [4]


def test_without_the_spool_leases_are_still_recognised(tmp_path, bench):
    _some_wait(bench)
    expected = ask(bench).document
    bench.config.spool.rename(tmp_path / "away")
    found = ask(bench)
    assert any("could not be read" in note for note in found.notes)
    assert not found.acts
    assert (found.document.place, found.document.places) == (expected.place, expected.places)
    assert found.document.decision.configuration == expected.decision.configuration


def test_limits_and_comments_may_be_missing(bench):
    _some_wait(bench)
    expected = ask(bench).document
    bench.slurm.inject("limits", Fault.FAIL)
    bench.slurm.inject("admin_comments", Fault.FAIL)
    bench.slurm.inject("topology", Fault.FAIL)
    found = ask(bench)
    assert sum("could not be read and" in note for note in found.notes) == 3
    # The plan documents stand in for the directives of the others.
    assert (found.document.place, found.document.places) == (expected.place, expected.places)
    assert found.document.decision.configuration == expected.decision.configuration
    assert found.document.decision.waits_for == expected.decision.waits_for


class Private(FakeSlurm):
    """PrivateData=jobs: only one's own jobs are shown."""

    def _mine(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        return tuple(job for job in jobs if job.user == "nobody")

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        return replace(seen, jobs=self._mine(seen.jobs))


def test_jobs_that_slurm_hides_are_known_from_their_documents(bench):
    _some_wait(bench)
    expected = ask(bench).document
    bench.slurm.config["privatedata"] = "accounts,jobs"
    bench.slurm.__class__ = Private
    found = ask(bench)
    assert (found.document.place, found.document.places) == (expected.place, expected.places)
    assert found.document.decision.configuration == expected.decision.configuration


def test_an_unknown_account_is_said(bench):
    _empty(bench)
    found = ask(bench, runner=Runner(account=None))
    assert any("account and QOS are not known" in note for note in found.notes)


# -- sbatch's word -------------------------------------------------------------------------------


def trial(stderr: str, rc: int = 0) -> Trial:
    return try_out(Runner(Answer("", stderr, rc)), Path("job"), {})


def test_an_accepted_trial():
    said = f"sbatch: slurm-ext: this job is ordered but not resized: --exclusive\n{STARTS}"
    found = trial(said)
    assert found.accepted
    assert found.words == ("slurm-ext: this job is ordered but not resized: --exclusive",)
    assert (found.start_s, found.nodes, found.partition) == (1_700_000_060.0, "n01", "main")


def test_the_start_is_read_as_newer_releases_word_it():
    found = trial(STARTS.replace(" using", " a using"))  # so in 26.05.5
    assert (found.words, found.start_s, found.nodes) == ((), 1_700_000_060.0, "n01")


@pytest.mark.parametrize(
    "said",
    [
        "env: 'sbatch': No such file or directory\n",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller\n",
    ],
)
def test_a_trial_that_could_not_be_made_is_no_refusal(said):
    assert trial(said, 127 if said.startswith("env") else 1).accepted is None


def test_a_refusal_without_words_is_one():
    found = trial("", 1)
    assert found.accepted is False
    assert found.words


def test_the_users_clock_is_kept_for_times_in_the_script():
    runner = Runner()
    try_out(runner, Path("/a/job"), {"TZ": "Europe/Berlin"})
    try_out(runner, Path("/a/job"), {})
    assert runner.ran[0][:2] == ["env", "TZ=Europe/Berlin"]
    assert runner.ran[1][:3] == ["env", "-u", "TZ"]
    assert runner.ran[1][-3:] == ["sbatch", "--test-only", "/a/job"]


def test_what_slurm_fills_in():
    who, note = submitter(Runner(), "ann", 1, "ft")
    assert (who.account, who.qos, note) == ("research", "normal", "")


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def command(bench, monkeypatch):
    """``slurm-ext explain --script`` beside the bench's cluster."""
    config = bench.config.spool.parent / "config.yaml"
    config.write_text(
        yaml.safe_dump({"spool": str(bench.config.spool), "table": str(bench.config.table)})
    )
    monkeypatch.setattr(foresee, "open_backend", lambda _: bench.slurm)
    monkeypatch.setattr(foresee, "CommandRunner", lambda _: Runner())
    monkeypatch.setattr(foresee.time, "time", lambda: bench.now)
    script = bench.config.spool.parent / "job.sbatch"
    script.write_text(SCRIPT)
    return lambda *more: main(["explain", "--script", str(script), "--config", str(config), *more])


def test_the_command_as_text_and_as_json(bench, command, capsys):
    _empty(bench)
    assert command() == 0
    assert "would be accepted" in capsys.readouterr().out
    assert command("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accepted"] is True
    assert found["acts"] is True
    assert found["plan"]["decision"]["verdict"] == Verdict.START.value
    assert found["plan"]["decision"]["configuration"]["gpus"] == 16
    assert found["submitted"]["gpus"] == 4


def test_a_script_that_would_never_start_ends_with_one(bench, command, capsys):
    _short(bench)
    assert command() == 1
    assert "and never started" in capsys.readouterr().out
    assert command("--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["accepted"] is True
    assert "(PartitionTimeLimit)" in found["never_starts"]
    _empty(bench)
    bench.slurm.partitions["main"] = replace(bench.slurm.partitions["main"], max_time_s=None)
    assert command("--json") == 0
    assert json.loads(capsys.readouterr().out)["never_starts"] is None


def test_a_refused_script_ends_with_one(bench, command, capsys):
    _empty(bench)
    (bench.config.spool.parent / "job.sbatch").write_text(SCRIPT.replace("=auto", "=0"))
    assert command("--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["accepted"] is False
    assert "--ft-gpus" in found["messages"][0]
    assert found["plan"] is None


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_without_the_commands_of_slurm_it_says_that_slurm_was_not_reachable(
    bench, monkeypatch, capsys, tmp_path, more
):
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump({"spool": str(bench.config.spool), "table": str(bench.config.table)})
    )
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["explain", "--script", str(script), "--config", str(config), *more]) == 0
    told = capsys.readouterr().out
    assert "Slurm was not reachable" in told
    assert "cannot be started" in told
    assert "would be accepted" not in told


def test_a_missing_file_is_an_error(bench, command, capsys):
    (bench.config.spool.parent / "job.sbatch").unlink()
    assert command() == 1
    assert "job.sbatch: cannot be read" in capsys.readouterr().err


def test_the_json_form_is_json(bench):
    _some_wait(bench)
    assert json.loads(json.dumps(as_document(ask(bench))))["starts_known"] is True

"""`slurm-ext chain`: how far each task is, and what is refused while it can still be mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_ext.cli import chained
from slurm_ext.cli.main import main
from slurm_ext.domain.attempt import Attempt, Attempts, Cause
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.slurm.process import Answer
from slurm_ft.requeue.attempts import file_name, store
from slurm_ft.switch.chain import ChainState, Done, read_chain
from slurm_ft.switch.standing import End, Teller
from slurm_ft.train.layout import Wish

TASKS = """
common: {model: vit, depth: 4, frozen: backbone, global_batch: 8}
tasks:
  - {name: birds, steps: 4, quality: top1>=0.8}
  - {name: cars, steps: 4}
  - {name: deep, steps: 4, depth: 9}
  - {name: odd, steps: 4}
  - {name: planes, steps: 4}
"""


@pytest.fixture
def chain(tmp_path: Path) -> ChainState:
    (tmp_path / "tasks.yaml").write_text(TASKS)
    state = ChainState(tmp_path / "state", tmp_path / "ckpt")
    state.announce(tmp_path / "tasks.yaml")
    return state


def teller(chain: ChainState, ranks: int = 4, **wish: Any) -> Teller:
    return Teller(chain.folder, writes=True, attempt=0, ranks=ranks, wish=Wish(**wish), environ={})


def listed(chain: ChainState, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    main(["chain", "ls", str(chain.state_dir)])
    rows = capsys.readouterr().out.splitlines()[1:]
    return {row.split()[0]: " ".join(row.split()[2:]) for row in rows}


def half_way(chain: ChainState) -> Teller:
    """birds is done and missed its target, cars trains, two were left out or not written."""
    now = teller(chain)
    for name in ("birds", "odd", "cars"):
        chain.claims.begin(name)
        now.begins(name)
    chain.record(Done("birds", 4, {"top1": 0.7, "loss": 0.5}, 0, 0.0))
    now.outcomes({"deep": "deep: stages=9: too many"}, {"odd": "disk full"})
    return now


def test_each_task_is_shown_as_it_is(chain: ChainState, capsys: pytest.CaptureFixture[str]) -> None:
    half_way(chain)
    assert listed(chain, capsys) == {
        "birds": "done top1=0.7 loss=0.5; top1>=0.8 MISSED",
        "cars": "runs",
        "deep": "left out stages=9: too many",
        "odd": "failed disk full",
        "planes": "waits",
    }
    main(["chain", "ls", "--json", str(chain.state_dir)])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["birds"]["quality_kept"], rows["birds"]["done"]) == (False, True)
    assert (rows["cars"]["state"], rows["cars"]["quality_kept"]) == ("runs", None)


def test_before_anything_began_all_wait(
    chain: ChainState, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(listed(chain, capsys).values()) == {"waits"}


def test_the_task_before_is_saved_while_the_next_trains(
    chain: ChainState, capsys: pytest.CaptureFixture[str]
) -> None:
    now = teller(chain)
    for name in ("birds", "cars"):
        chain.claims.begin(name)
    now.begins("birds")
    assert listed(chain, capsys)["cars"] == "waits"
    now.begins("cars")
    shown = listed(chain, capsys)
    assert (shown["birds"], shown["cars"]) == ("ends", "runs")


@pytest.mark.parametrize(
    ("end", "cars", "planes"),
    [
        (End.LEFT, "stopped told to leave", "waits"),
        (End.FAILED, "stopped told to leave", "not reached"),
    ],
)
def test_nothing_runs_or_waits_in_a_job_that_has_ended(
    chain: ChainState,
    capsys: pytest.CaptureFixture[str],
    end: End,
    cars: str,
    planes: str,
) -> None:
    half_way(chain).ends(end, "told to leave")
    shown = listed(chain, capsys)
    assert (shown["cars"], shown["planes"]) == (cars, planes)


@pytest.mark.parametrize(("requeued", "planes"), [(True, "waits"), (False, "not reached")])
def test_a_chain_that_was_killed_is_known_by_its_jobs_attempts(
    chain: ChainState, capsys: pytest.CaptureFixture[str], requeued: bool, planes: str
) -> None:
    half_way(chain)
    attempt = Attempt(0, 1.0, 4, ended_s=9.0, cause=Cause.NODE_FAIL, requeued=requeued)
    store(chain.state_dir / file_name("7"), Attempts("7", (attempt,)))
    shown = listed(chain, capsys)
    assert (shown["cars"], shown["planes"]) == ("stopped node failure", planes)


class Slurm:
    """squeue with one answer."""

    def __init__(self, answer: Answer | None) -> None:
        self._answer = answer

    def run(self, argv: Any, **_: Any) -> Answer:
        assert argv[0] == "squeue"
        if self._answer is None:
            raise SlurmCommandError(list(argv), 1, "timed out")
        return self._answer


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (Answer("RUNNING None N/A 7\n", "", 0), None),
        (Answer("COMPLETING None N/A 7\n", "", 0), None),
        (Answer("PENDING BeginTime N/A 7\n", "", 0), chained.Gone(back=True)),
        (Answer("CONFIGURING None N/A 7\n", "", 0), chained.Gone(back=True)),
        (Answer("CANCELLED None N/A 7\n", "", 0), chained.Gone(back=False)),
        (Answer("RUNNING None N/A 7_1\nPENDING None N/A 7_2\n", "", 0), None),
        (Answer("", "", 0), chained.Gone(back=False)),
        (Answer("", "slurm_load_jobs error: Invalid job id specified", 1), chained.Gone(False)),
        (Answer("", "Unable to contact slurm controller", 1), None),
        (None, None),
    ],
)
def test_slurm_knows_of_jobs_that_were_killed_whole(
    chain: ChainState, answer: Answer | None, wanted: chained.Gone | None
) -> None:
    half_way(chain)
    assert chained.gone(chain, "7", Slurm(answer)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{name: t, global_batch: 30}", "4 ranks cannot train it: global_batch=30"),
        ("{name: t, global_batch: 8, depth: 1}", "1 blocks cannot be cut"),
        ("{name: t, global_batch: 8, output: /proc/nix}", "nothing can be written into /proc"),
        ("tasks:\n  - {name: t}", "lists tasks, and one is wanted here"),
        ("- {name: t}", "lists tasks, and one is wanted here"),
        ("name: t\nsteps: [1", "line 2: cannot be read"),
    ],
)
def test_what_cannot_run_is_refused_while_it_can_be_mended(
    chain: ChainState, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    teller(chain, stages=2)
    one = tmp_path / "one.yaml"
    one.write_text(text)
    assert main(["chain", "add", str(chain.state_dir), str(one)]) == 1
    assert words in capsys.readouterr().err
    assert len(chain.look(chain.given())[0]) == 5
    if "lists" not in words and "line" not in words:
        assert main(["chain", "add", "--unchecked", str(chain.state_dir), str(one)]) == 0


def test_a_relative_output_is_below_the_jobs_directory(
    chain: ChainState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    monkeypatch.chdir(jobs)
    chain.announce(tmp_path / "tasks.yaml")
    teller(chain)
    monkeypatch.chdir(tmp_path)
    (jobs / "taken").write_text("a file")
    one = tmp_path / "one.yaml"
    one.write_text("{name: t, global_batch: 8, output: taken/out}")
    assert main(["chain", "add", str(chain.state_dir), str(one)]) == 1
    assert f"nothing can be written into {jobs / 'taken'}" in capsys.readouterr().err


def test_outputs_are_compared_as_the_jobs_ranks_see_them(
    chain: ChainState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relative output is below the directory in which the job runs, and not where a task is
    added: one directory under two names is refused, and two of one name are not."""
    jobs, mine = tmp_path / "jobs", tmp_path / "mine"
    jobs.mkdir()
    mine.mkdir()
    file = tmp_path / "tasks.yaml"
    file.write_text("- {name: birds, output: out/birds}\n- {name: cars, output: out/cars}\n")
    monkeypatch.chdir(jobs)
    chain.announce(file)
    monkeypatch.chdir(mine)
    one = tmp_path / "one.yaml"
    add = ["chain", "add", str(chain.state_dir), str(one)]
    one.write_text(f"{{name: late, output: {jobs}/out/birds}}")
    assert main(add) == 1
    assert "is where the result of birds goes" in capsys.readouterr().err
    one.write_text(f"{{name: late, output: {mine}/out/birds}}")
    assert main(add) == 0
    one.write_text("{name: later, output: ../mine/out/birds}")
    assert main(add) == 1
    assert "is where the result of late goes" in capsys.readouterr().err
    assert main(["chain", "ls", str(chain.state_dir)]) == 0, capsys.readouterr().err
    # The chain's own rank 0 sees the same.
    monkeypatch.chdir(jobs)
    tasks, wrong = chain.look(read_chain(file))
    assert ([task.name for task in tasks], wrong) == (["birds", "cars", "late"], [])


def test_a_chains_file_is_read_as_the_jobs_ranks_read_it(
    chain: ChainState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From another directory its tasks' outputs must not become one."""
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "tasks.yaml"
    file.write_text(f"- {{name: birds, output: out}}\n- {{name: cars, output: {tmp_path}/out}}\n")
    monkeypatch.chdir(tmp_path / "jobs")
    chain.announce(file)
    monkeypatch.chdir(tmp_path)
    assert list(listed(chain, capsys)) == ["birds", "cars"]


def test_an_added_task_that_starts_cold_is_said_to(
    chain: ChainState, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands in common is not the added task's."""
    teller(chain)
    one = tmp_path / "one.yaml"
    one.write_text("{name: t, global_batch: 8}")
    assert main(["chain", "add", str(chain.state_dir), str(one)]) == 0
    said = capsys.readouterr().out
    assert "will start cold after planes: frozen is none and not backbone" in said
    one.write_text("{name: u, global_batch: 8}")
    assert main(["chain", "add", str(chain.state_dir), str(one)]) == 0
    assert "cold" not in capsys.readouterr().out


def test_a_task_is_taken_out(chain: ChainState, capsys: pytest.CaptureFixture[str]) -> None:
    half_way(chain)
    assert main(["chain", "rm", str(chain.state_dir), "planes"]) == 0
    assert "planes is taken out" in capsys.readouterr().out
    assert "planes" not in listed(chain, capsys)
    assert main(["chain", "rm", str(chain.state_dir), "cars"]) == 1
    assert "it has begun" in capsys.readouterr().err

"""A chain's file, what is appended to it, and what is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ext.cli.main import main
from slurm_ext.domain.errors import ConfigError
from slurm_ft.switch import chain as chain_module
from slurm_ft.switch.chain import ChainState, Done, read_chain, remaining, running_chain

TWO = """
common: {model: vit, depth: 2, global_batch: 8}
tasks:
  - {name: birds, seed: 1, steps: 4}
  - {name: cars, seed: 2, steps: 6, depth: 3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(TWO)
    return path


def test_shared_keys_stand_once_and_a_task_may_differ(file: Path) -> None:
    birds, cars = read_chain(file)
    assert (birds.name, birds.depth, birds.global_batch, birds.steps) == ("birds", 2, 8, 4)
    assert (cars.name, cars.depth, cars.seed) == ("cars", 3, 2)


def test_a_bare_list_is_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("- {name: a}\n- {name: b}\n")
    assert [task.name for task in read_chain(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tasks: []", "lists no tasks"),
        ("tasks: 3", "lists no tasks"),
        ("- 7", "task 1: is no mapping"),
        ("- {seed: 1}", "task 1: name=None"),
        ("- {name: a/b}", "name='a/b'"),
        ("- {name: a}\n- {name: a}", "task 2: name='a': is there twice"),
        ("- {name: a, layers: 3}", "task 1: layers: there is no such key"),
        ("common: [1]\ntasks: [{name: a}]", "common: is no mapping"),
        ("task: [{name: a}]", "task: there is no such key"),
        ("- {name: a", "cannot be read"),
        ("common: {name: a}\ntasks: [{seed: 1}]", "name=None"),
    ],
)
def test_an_unusable_file_is_one_clear_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_chain(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_appended_tasks_come_last_in_their_order(file: Path, tmp_path: Path) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    given = read_chain(file)
    assert chain.all_tasks(given) == given
    with pytest.raises(ConfigError, match="no chain has begun"):
        running_chain(tmp_path / "state")
    chain.announce(file)
    assert running_chain(tmp_path / "state").given() == given
    for name in ("zebras", "apples"):
        one = tmp_path / f"{name}.yaml"
        one.write_text(f"{{name: {name}, steps: 3}}")
        chain.append(one)
    assert [task.name for task in chain.all_tasks(given)] == ["birds", "cars", "zebras", "apples"]
    with pytest.raises(ConfigError, match="has a task of this name"):
        chain.append(tmp_path / "zebras.yaml")
    assert len(chain.all_tasks(given)) == 4
    assert not list((tmp_path / "state" / "chain.d").glob(".*")), "temporary files are left"


def test_done_tasks_are_not_trained_again_and_unfinished_ones_are(
    file: Path, tmp_path: Path
) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    tasks = read_chain(file)
    assert remaining(tasks, chain.done()) == tasks
    chain.record(Done("birds", 4, {"top1": 0.5}, 0, 1.0))
    assert [task.name for task in remaining(tasks, chain.done())] == ["cars"]
    chain.record(Done("cars", 5, {}, 1, 2.0))
    assert [task.name for task in remaining(tasks, chain.done())] == ["cars"]
    assert chain.done()["birds"].metrics == {"top1": 0.5}


def test_a_broken_record_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.record(Done("birds", 4, {}, 0, 1.0))
    path = tmp_path / "ckpt" / "chain" / "done-birds.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="done-birds"):
        chain.done()


def test_each_switch_has_a_file_of_its_own(tmp_path: Path) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    first = chain.next_timeline()
    first.parent.mkdir(parents=True)
    first.write_text("")
    assert chain.next_timeline() == chain.timeline_path(1)


def test_a_broken_append_stops_nobody_and_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    added = tmp_path / "state" / "chain.d"
    (added / "000001-bad.yaml").write_text("{name: bad, layers: 3}")
    (added / "000002-twice.yaml").write_text("{name: cars}")
    (added / "000003-good.yaml").write_text("{name: good}")
    tasks, wrong = chain.look(read_chain(file))
    assert [task.name for task in tasks] == ["birds", "cars", "good"]
    assert [problem.place.split("/")[-1].split(":")[0] for problem in wrong] == [
        "000001-bad.yaml",
        "000002-twice.yaml",
    ]
    with pytest.raises(ConfigError, match="000001-bad"):
        chain.all_tasks(read_chain(file))
    one_task(tmp_path)
    chain.append(tmp_path / "late.yaml")
    assert main(["chain", "ls", str(tmp_path / "state")]) == 1
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == [
        "birds",
        "cars",
        "good",
        "late",
    ]
    assert "000001-bad" in said.err
    assert "000002-twice" in said.err


def one_task(folder: Path, name: str = "late") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"{{name: {name}, steps: 3}}")
    return path


def test_a_chain_that_has_ended_takes_no_task_until_it_begins_again(
    file: Path, tmp_path: Path
) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    chain.close()
    with pytest.raises(ConfigError, match="this chain has ended"):
        chain.append(one_task(tmp_path))
    assert [task.name for task in chain.all_tasks(chain.given())] == ["birds", "cars"]
    chain.announce(file)
    chain.append(one_task(tmp_path))
    assert [task.name for task in chain.all_tasks(chain.given())] == ["birds", "cars", "late"]


@pytest.mark.parametrize("seen", [True, False])
def test_an_append_at_the_very_end_is_taken_up_or_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """The chain closes between the file's appearance and the look at whether it is closed."""
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    monkeypatch.setattr(chain_module, "_REOPEN_S", 0.3)
    write_once = chain_module.write_once

    def racing(path: Path, content: bytes) -> None:
        write_once(path, content)
        chain.close()
        if seen:
            assert "late" in [task.name for task in chain.all_tasks(chain.given())]
            chain.reopen()

    monkeypatch.setattr(chain_module, "write_once", racing)
    if seen:
        assert chain.append(one_task(tmp_path)).name == "late"
    else:
        with pytest.raises(ConfigError, match="this chain has ended"):
            chain.append(one_task(tmp_path))
    names = [task.name for task in chain.all_tasks(chain.given())]
    assert ("late" in names) is seen, "promised and not there, or the other way round"

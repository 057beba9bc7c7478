"""A chain's file, what is appended to it, and what is done."""

from __future__ import annotations

import os
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
        # A key without a value must not become a directory "None", nor a bare yes one "True".
        ("- {name: }", "task 1: name=None"),
        ("- {name: a, output: }", "task 1: output=None"),
        ("- {name: yes}", "task 1: name=True"),
        # Beside the tasks' directories: the chain's records, the files of a store.
        ("- {name: chain}", "name='chain'"),
        ("- {name: LATEST}", "name='LATEST'"),
        ("- {name: step-000000000001}", "name='step-000000000001'"),
        # Found on the first day, not when the ranks come to the task.
        ("- {name: a, seed: 99999999999999999999999}", "seed=99999999999999999999999"),
        ("- {name: a, weight_decay: .inf}", "weight_decay=inf"),
        # What a YAML reader takes without a word, or fails at with errors of its own.
        ("tasks: [{name: a}]\ntasks: [{name: b}]", "tasks stands twice"),
        ("- {name: a, steps: 3, steps: 4}", "steps stands twice"),
        ("- {name: 2020-13-45}", "month must be in 1..12"),
        ("tasks: " + "[" * 3000, "cannot be read"),
        ("- {name: a, output: out}\n- {name: b, output: ./out}", "the result of a goes"),
        ("common: {output: out}\ntasks: [{name: a}, {name: b}]", "the result of a goes"),
    ],
)
def test_an_unusable_file_is_one_clear_error(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_chain(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_two_results_do_not_share_a_directory_by_way_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    path = tmp_path / "t.yaml"
    path.write_text(
        f"- {{name: a, output: {tmp_path}/out/x}}\n- {{name: b, output: {tmp_path}/link/x}}"
    )
    with pytest.raises(ConfigError, match="the result of a goes"):
        read_chain(path)


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


def test_an_append_does_not_take_anothers_output_directory(file: Path, tmp_path: Path) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    one = tmp_path / "one.yaml"
    one.write_text(f"{{name: first, output: {tmp_path}/out}}")
    chain.append(one)
    one.write_text(f"{{name: second, output: {tmp_path}/./out}}")
    with pytest.raises(ConfigError, match="the result of first goes"):
        chain.append(one)
    # Written there by hand: left out, and the others are trained.
    place = tmp_path / "state" / "chain.d" / "000002-second.yaml"
    place.write_text(one.read_text())
    tasks, wrong = chain.look(read_chain(file))
    assert [task.name for task in tasks] == ["birds", "cars", "first"]
    assert ["000002-second.yaml" in str(problem) for problem in wrong] == [True]
    # What was seen once is not read again, and what was mended is.
    place.write_text(f"{{name: second, output: {tmp_path}/other}}")
    assert [task.name for task in chain.look(read_chain(file))[0]][-1] == "second"


def test_an_append_is_read_once(file: Path, tmp_path: Path) -> None:
    """A pipe gives its content once: what was checked must be what is kept."""
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    reader, writer = os.pipe()
    os.write(writer, b"{name: piped, steps: 3}")
    os.close(writer)
    assert chain.append(Path(f"/dev/fd/{reader}")).name == "piped"
    os.close(reader)
    assert chain.look([])[1] == []
    assert [task.name for task in chain.look([])[0]] == ["piped"]


def test_a_foreign_file_beside_the_appended_ones_stops_nobody(file: Path, tmp_path: Path) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    (tmp_path / "state" / "chain.d" / "1note.txt").write_text("mine")
    one = tmp_path / "one.yaml"
    one.write_text("{name: first}")
    chain.append(one)
    assert [task.name for task in chain.look([])[0]] == ["first"]


def test_hundreds_of_appended_tasks_are_not_read_again_between_two_tasks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(file)
    one = tmp_path / "one.yaml"
    for number in range(100):
        one.write_text(f"{{name: t{number}}}")
        chain.append(one)
    chain.look([])
    monkeypatch.setattr(chain_module, "read_task", lambda path: pytest.fail(f"{path} again"))
    other = [task.name for task in chain.look([])[0]]
    assert other == [f"t{number}" for number in range(100)]


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

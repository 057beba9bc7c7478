"""Who decides about a task that may begin and may be taken out: exactly one of the two."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slurm_ext.domain.errors import ConfigError
from slurm_ft.switch.chain import ChainState, Done, remaining
from slurm_ft.switch.claims import Claims


def test_whoever_comes_first_decides(tmp_path: Path) -> None:
    chain, user = Claims(tmp_path / "d"), Claims(tmp_path / "d")
    assert chain.begin("a")
    assert not user.remove("a")
    assert chain.begin("a"), "a task that goes on has begun already"
    assert user.remove("b")
    assert not chain.begin("b")
    assert user.remove("b")
    assert (chain.begun(), chain.removed()) == ({"a"}, {"b"})
    user.forget("b")
    user.forget("a")
    assert chain.begin("b")
    assert Claims(tmp_path / "d").begun() == {"a", "b"}


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    barrier, outcomes = threading.Barrier(8), list[tuple[str, bool]]()

    def decide(word: str) -> None:
        barrier.wait()
        outcomes.append((word, getattr(Claims(tmp_path), word)("task")))

    threads = [threading.Thread(target=decide, args=(w,)) for w in ("begin", "remove") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({word for word, won in outcomes if won}) == 1
    assert sum(won for _, won in outcomes) == 4


@pytest.fixture
def chain(tmp_path: Path) -> ChainState:
    (tmp_path / "tasks.yaml").write_text("- {name: a}\n- {name: b}\n")
    state = ChainState(tmp_path / "state", tmp_path / "ckpt")
    state.announce(tmp_path / "tasks.yaml")
    return state


def names(chain: ChainState) -> list[str]:
    return [task.name for task in remaining(chain.look(chain.given())[0], chain.done())]


def test_a_task_of_the_file_and_an_appended_one_are_taken_out(
    chain: ChainState, tmp_path: Path
) -> None:
    late = tmp_path / "late.yaml"
    for name in ("late", "other-late"):
        late.write_text(f"{{name: {name}}}")
        chain.append(late)
    chain.remove("b")
    late.write_text("{name: late, output: /proc/none}")
    chain.remove("late")
    assert names(chain) == ["a", "other-late"]
    # An appended one can come again, better; one of the file keeps its name.
    late.write_text("{name: late, steps: 7}")
    assert chain.append(late).steps == 7
    assert names(chain) == ["a", "other-late", "late"]
    late.write_text("{name: b}")
    with pytest.raises(ConfigError, match="has a task of this name"):
        chain.append(late)


def test_what_has_begun_is_done_or_is_not_there_cannot_be_taken_out(chain: ChainState) -> None:
    assert chain.claims.begin("a")
    chain.record(Done("b", 100, {}, 0, 0.0))
    for name, words in (("a", "it has begun"), ("b", "or is done"), ("c", "no task of this name")):
        with pytest.raises(ConfigError, match=words):
            chain.remove(name)
    assert names(chain) == ["a"]

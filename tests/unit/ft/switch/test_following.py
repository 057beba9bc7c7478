"""Which task comes next, as rank 0 decides and all ranks are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_ext.domain.errors import ConfigError
from slurm_ft.session.comms.solo import SoloComm
from slurm_ft.switch.chain import ChainState, Done
from slurm_ft.switch.following import Following, UnwrittenError
from slurm_ft.train.shared import says
from slurm_ft.train.task import Task, make_task, values_of

THREE = "- {name: a, steps: 2}\n- {name: b, steps: 2, depth: 9}\n- {name: c, steps: 2}\n"


class FarComm(SoloComm):
    """A rank that is not the first: it sees only what was told."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self._told = told

    @property
    def rank(self) -> int:
        return 1

    def broadcast(self, value: Any, limit_s: float | None = None) -> Any:
        return self._told


@pytest.fixture
def chain(tmp_path: Path) -> ChainState:
    (tmp_path / "tasks.yaml").write_text(THREE)
    state = ChainState(tmp_path / "state", tmp_path / "ckpt")
    state.announce(tmp_path / "tasks.yaml")
    return state


def following(chain: ChainState, unfit: str = "") -> Following:
    def why(task: Task) -> str:
        return "too deep" if task.name == unfit else ""

    return Following(chain, chain.given(), SoloComm(), why)


def name(task: Task | None) -> str | None:
    return None if task is None else task.name


def test_tasks_follow_in_order_and_the_last_one_closes_the_chain(chain: ChainState) -> None:
    order = following(chain)
    a = order.after(None)
    assert name(a) == "a"
    b = order.after(a)
    assert name(b) == "b"
    # The same answer again, for a task that starts only now.
    assert name(order.last(a)) == "b"
    assert not chain.closed
    c = order.after(b)
    assert name(c) == "c"
    assert order.last(c) is None
    assert chain.closed
    order.check_all_trained()


def test_a_task_whose_record_is_on_its_way_is_not_begun_again(
    chain: ChainState, tmp_path: Path
) -> None:
    """An appended task that is trained, and whose file then becomes unreadable."""
    late = tmp_path / "late.yaml"
    late.write_text("{name: late, steps: 2}")
    chain.append(late)
    for task in ("a", "b"):
        chain.record(Done(task, 2, {}, 0, 0.0))
    order = following(chain)
    c = order.after(None)
    present = order.after(c)
    assert (name(c), name(present)) == ("c", "late")
    (tmp_path / "state" / "chain.d" / "000001-late.yaml").write_text("{")
    # Neither c nor late has a record yet.
    assert order.last(present) is None
    with pytest.raises(ConfigError, match="000001-late"):
        order.check_all_trained()


def test_what_cannot_run_here_is_left_out_and_named_at_the_end(chain: ChainState) -> None:
    order = following(chain, unfit="b")
    a = order.after(None)
    assert name(order.after(a)) == "c"
    with pytest.raises(ConfigError, match="b: too deep"):
        order.check_all_trained()


def test_a_broken_record_is_an_error_on_every_rank(chain: ChainState, tmp_path: Path) -> None:
    chain.record(Done("a", 2, {}, 0, 0.0))
    (tmp_path / "ckpt" / "chain" / "done-a.json").write_text("{")
    with pytest.raises(ConfigError, match="done-a"):
        following(chain).after(None)
    far = Following(chain, [], FarComm({"task": None, "error": "done-a is broken"}), lambda _: "")
    with pytest.raises(ConfigError, match="done-a is broken"):
        far.after(None)


def test_other_ranks_need_not_see_the_file(chain: ChainState) -> None:
    task = make_task({"name": "far", "quality": "top1>=0.1234567891", "model": "vit"}, "here")
    far = Following(
        chain,
        [],
        FarComm(
            {"task": values_of(task), "error": "", "try": [], "before": {"far": 7}, "total": 9}
        ),
        lambda _: "",
    )
    assert far.after(None) == task
    assert (far.before(task), far.total_steps) == (7, 9)


def test_the_chain_is_one_row_of_steps(chain: ChainState, tmp_path: Path) -> None:
    order = following(chain, unfit="b")
    a = order.after(None)
    assert a is not None
    c = order.after(a)
    assert c is not None
    assert (order.before(a), order.before(c), order.total_steps) == (0, 2, 4)
    late = tmp_path / "late.yaml"
    late.write_text("{name: late, steps: 5}")
    chain.append(late)
    order.after(c)
    assert order.total_steps == 9


@pytest.mark.parametrize("quality", ["", "loss<=1e-7", "top1>=0.30000000000000004"])
def test_a_task_crosses_to_other_ranks_as_it_is(quality: str) -> None:
    task = make_task(
        {"name": "t", "quality": quality, "learning_rate": 0.1 + 0.2, "frozen": "2"}, "here"
    )
    assert make_task(values_of(task), "there") == task


# --- outputs, what is taken out, what is not written ----------------------------------------------


def test_outputs_are_tried_once_and_the_first_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "tasks.yaml").write_text(
        "- {name: a, output: good}\n- {name: b, output: bad}\n- {name: c, output: fine}\n"
    )
    chain = ChainState(tmp_path / "state", tmp_path / "ckpt")
    chain.announce(tmp_path / "tasks.yaml")
    tried: list[str] = []

    def trial(output: str) -> str:
        tried.append(output)
        return "no such mount" if output == "bad" else ""

    order = Following(chain, chain.given(), SoloComm(), lambda _: "", trial)
    a = order.first()
    assert name(a) == "a"
    assert tried == ["good", "bad", "fine"]
    assert order.left_out == {"b": "b: rank 0: no such mount"}, "said before its turn comes"
    late = tmp_path / "late.yaml"
    late.write_text("{name: late, output: elsewhere}")
    chain.append(late)
    c = order.after(a)
    assert name(c) == "c"
    assert name(order.after(c)) == "late"
    assert tried == ["good", "bad", "fine", "elsewhere"]
    assert order.left_out == {"b": "b: rank 0: no such mount"}
    with pytest.raises(ConfigError, match="b: rank 0: no such mount"):
        order.check_all_trained()


def test_a_task_that_begins_cannot_be_taken_out_and_the_other_way_round(chain: ChainState) -> None:
    order = following(chain)
    a = order.first()
    assert a is not None
    with pytest.raises(ConfigError, match="it has begun"):
        chain.remove("a")
    b = order.after(a)
    assert b is not None
    chain.remove("b")
    assert not order.begins(b)
    c = order.last(a)
    assert name(c) == "c"
    with pytest.raises(ConfigError, match="it has begun"):
        chain.remove("c")
    assert order.total_steps == 4, "what was taken out is no part of the row of steps"


def test_a_task_whose_result_is_not_written_is_not_begun_again_and_named(
    chain: ChainState,
) -> None:
    order = following(chain, unfit="b")
    a = order.first()
    assert a is not None
    order.unwritten(a, "the result of a is not written: disk full")
    c = order.after(a)
    assert name(c) == "c"
    assert order.last(c) is None
    with pytest.raises(UnwrittenError, match=r"b: too deep; the result of a .*is complete"):
        order.check_all_trained()
    # The next start finds it with all of its steps, and only its result is missing.
    assert name(following(chain, unfit="b").first()) == "a"


def test_what_happens_to_all_ranks_is_said_by_one(
    chain: ChainState, caplog: pytest.LogCaptureFixture
) -> None:
    """A log line when it happens, and the error in the end: it is raised on all of them."""
    (a, *_) = chain.given()
    far = Following(chain, chain.given(), FarComm("the result of a is not written"), lambda _: "")
    far.unwritten(a, "the result of a is not written")
    assert not caplog.text
    following(chain).unwritten(a, "the result of a is not written")
    assert "the result of a is not written" in caplog.text
    with pytest.raises(UnwrittenError) as caught:
        far.check_all_trained()
    assert says(caught.value, {})
    assert says(caught.value, {"RANK": "0"})
    assert not says(caught.value, {"RANK": "1"})
    # What a rank finds by itself nobody else says.
    assert says(UnwrittenError("mine"), {"RANK": "1"})


def test_without_links_tasks_are_trained_all_the_same(
    chain: ChainState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.symlink", refused)
    assert name(following(chain).first()) == "a"
    assert "that a has begun is not noted" in caplog.text

"""One process for many updates: whose error is it?"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.action import Action, ActionKind
from slurm_ext.domain.errors import SlurmCommandError
from slurm_ext.slurm.process import Answer, CommandRunner
from slurm_ext.slurm.scontrol import MAX_LINE, apply_updates, update_words


class Scripted(CommandRunner):
    """Answers like scontrol: errors by job id; ends after ``dies_after`` lines."""

    def __init__(self, errors: dict[str, str] | None = None, dies_after: int = 10**9) -> None:
        super().__init__()
        self.errors = errors or {}
        self.dies_after = dies_after
        self.calls: list[tuple[str, ...]] = []
        self.updates: list[str] = []
        self.limits: list[float | None] = []

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        check: bool = True,
    ) -> Answer:
        self.calls.append(tuple(argv))
        self.limits.append(timeout_s)
        lines = stdin.splitlines() if len(argv) == 1 else [" ".join(argv[1:])]
        told = []
        for line in lines[: self.dies_after]:
            match = re.match(r"update JobId=(\S+)", line)
            if match is None:
                told.append(f"invalid keyword: {line}")
                continue
            self.updates.append(line)
            if match[1] in self.errors:
                told.extend(self.errors[match[1]].split("|"))
        rc = int(bool(told))
        return Answer("scontrol: \n", "".join(f"{line}\n" for line in told), rc)


def factor(job_id: str, value: int = 1) -> Action:
    return Action(ActionKind.FACTOR, job_id, (("SiteFactor", str(value)),), "test")


@given(st.lists(st.booleans(), max_size=30))
def test_each_error_belongs_to_its_update(fails: list[bool]) -> None:
    actions = [factor(str(100 + i)) for i in range(len(fails))]
    errors = {str(100 + i): f"Bad thing {i}|Request aborted" for i, bad in enumerate(fails) if bad}
    runner = Scripted(errors)
    results = apply_updates(runner, actions)
    assert [r.action for r in results] == actions
    assert [not r.ok for r in results] == fails
    for i, result in enumerate(results):
        assert result.message == (f"Bad thing {i}; Request aborted" if fails[i] else "")
    assert len(runner.calls) == (1 if actions else 0)


def test_a_job_id_that_looks_like_an_answer_is_never_sent() -> None:
    runner = Scripted()
    for job_id in ("5\nupdate JobId=6 Priority=1", "5 Priority=1", "", "5_[1-3", "*", "JobId=5"):
        [result] = apply_updates(runner, [factor(job_id)])
        assert not result.ok
        assert "not sent" in result.message
    assert runner.calls == []


@pytest.mark.parametrize(
    "field",
    [
        ("Comment", "two words"),
        ("Comment", "a\nupdate JobId=1 Priority=9"),
        ("Comment", 'quo"te'),
        ("Comment", "back\\slash"),
        ("Nice=1 Priority", "1"),
        ("", "1"),
    ],
)
def test_what_scontrol_would_split_is_never_sent(field: tuple[str, str]) -> None:
    runner = Scripted()
    action = Action(ActionKind.SHAPE, "5", (("SiteFactor", "1"), field), "test")
    results = apply_updates(runner, [factor("4"), action, factor("6")])
    assert [r.ok for r in results] == [True, False, True]
    assert [u.split()[1] for u in runner.updates] == ["JobId=4", "JobId=6"]


@given(st.text(max_size=40), st.text(max_size=40))
def test_an_update_is_always_one_line_of_whole_words(keyword: str, value: str) -> None:
    action = Action(ActionKind.SHAPE, "5", ((keyword, value),), "test")
    try:
        words = update_words(action)
    except ValueError:
        return
    line = " ".join(words)
    assert line.split() == words == line.splitlines()[0].split()
    assert len(words) == 3


@pytest.mark.parametrize("job_id", ["5", "5_7", "5_[1-3,9]", "12+1"])
def test_every_form_of_a_job_id_is_sent(job_id: str) -> None:
    runner = Scripted()
    assert apply_updates(runner, [factor(job_id)])[0].ok
    assert runner.updates == [f"update JobId={job_id} SiteFactor=1"]


def test_an_empty_value_clears_a_field() -> None:
    runner = Scripted()
    apply_updates(runner, [Action(ActionKind.RESTORE, "5", (("ReqNodeList", ""),), "")])
    assert runner.updates == ["update JobId=5 ReqNodeList="]


def test_a_process_that_dies_half_way_leaves_nobody_guessing() -> None:
    with pytest.raises(SlurmCommandError, match="after 2 of 5 updates"):
        apply_updates(Scripted(dies_after=5), [factor(str(i)) for i in range(1, 6)])


@pytest.mark.parametrize(
    "message",
    [
        "slurm_update error: Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation for job 3",
        "Zero Bytes were transmitted or received for job 3",
    ],
)
def test_an_unreachable_controller_is_not_a_refusal(message: str) -> None:
    with pytest.raises(SlurmCommandError):
        apply_updates(Scripted({"3": message}), [factor("2"), factor("3")])


def test_a_line_longer_than_scontrol_s_buffer_goes_alone_and_in_order() -> None:
    tasks = ",".join(str(i) for i in range(0, 4000, 2))
    runner = Scripted()
    results = apply_updates(runner, [factor("1"), factor(f"7_[{tasks}]"), factor("2")])
    assert [r.ok for r in results] == [True, True, True]
    assert [u.split()[1][:9] for u in runner.updates] == ["JobId=1", "JobId=7_[", "JobId=2"]
    assert len(runner.calls) == 3
    assert len(runner.updates[1]) > MAX_LINE


def test_the_time_limit_grows_with_the_number_of_updates() -> None:
    runner = Scripted()
    apply_updates(runner, [factor(str(i)) for i in range(1, 1001)])
    assert runner.limits[0] is not None
    assert runner.limits[0] > runner.timeout_s + 10

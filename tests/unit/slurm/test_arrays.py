"""What squeue prints for an array and what scontrol takes for exactly it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.slurm.arrays import Records, exact_id
from slurm_ext.slurm.rows import SEPARATOR


@pytest.mark.parametrize(
    ("printed", "wanted", "tasks"),
    [
        ("123", "123", 1),
        ("123_4", "123_4", 1),
        ("12+1", "12+1", 1),
        ("7_[3]", "7_3", 1),
        ("7_[1-5,7]", "7_[1-5,7]", 6),
        ("7_[1-9:2%3]", "7_[1,3,5,7,9]", 5),
        ("7_[0-10%2]", "7_[0-10]", 11),
        ("7_[1-7:3,20]", "7_[1,4,7,20]", 4),
    ],
)
def test_exact_id(printed: str, wanted: str, tasks: int) -> None:
    assert exact_id(printed) == (wanted, tasks)


@pytest.mark.parametrize(
    "printed",
    ["14_[1,3-5,8,11-12,15,20...]", "14_[1,3-5,8", "7_[]", "7_[5-1]", "7_[1-9:0]", "7_[a]", "[1]"],
)
def test_an_expression_that_slurm_cut_off_is_refused(printed: str) -> None:
    """By default Slurm cuts expressions after 64 characters: writing half an array splits it."""
    with pytest.raises(ValueError, match="array expression"):
        exact_id(printed)


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 40), st.integers(1, 9)),
        min_size=1,
        max_size=8,
    )
)
def test_it_names_the_same_tasks(items: list[tuple[int, int, int]]) -> None:
    expression = ",".join(f"{low}-{low + span}:{step}" for low, span, step in items)
    job_id, count = exact_id(f"9_[{expression}%5]")
    wanted = [t for low, span, step in items for t in range(low, low + span + 1, step)]
    got: list[int] = []
    for item in job_id.removeprefix("9_").strip("[]").split(","):
        low, _, high = item.partition("-")
        got.extend(range(int(low), int(high or low) + 1))
    assert got == wanted
    assert count == len(wanted)


def rows_of(*cells: tuple[str, str, str]) -> list[str]:
    return [SEPARATOR.join(row) for row in cells]


def test_a_task_that_was_touched_by_itself_stays_a_row_of_its_own() -> None:
    """One row for all tasks would give the held task the state of the others, and hide its id."""
    rows = rows_of(
        ("9", "RUNNING", "7_1"),
        ("8", "JobHeldUser", "7_3"),
        ("7", "None", "7_2"),
        ("12", "None", "12+0"),
        ("7", "None", "7_10"),
        ("7", "None", "7_4"),
        ("7", "None", "7_5"),
        ("13", "None", "13"),
    )
    assert Records(rows, 2).rows() == rows_of(
        ("9", "RUNNING", "7_1"),
        ("8", "JobHeldUser", "7_3"),
        ("7", "None", "7_[2,4-5,10]"),
        ("12", "None", "12+0"),
        ("13", "None", "13"),
    )


def test_rows_of_one_number_that_are_no_tasks_are_kept() -> None:
    rows = rows_of(("5", "5", "a"), ("5", "5", "b"), ("6", "6_1", "c"), ("6", "6", "d"))
    assert sorted(Records(rows, 1).rows()) == sorted(rows)


def tasks_of(array: int, *tasks: int) -> list[str]:
    return rows_of(*((str(array), f"{array}_{task}", "x") for task in tasks))


def test_the_last_task_of_a_record_with_a_step_is_asked_for_again() -> None:
    """``squeue -r`` prints 0-18:3 without 18, and 6-30:3 without 30 (24.11.5 and 26.05.5)."""
    rows = [
        *tasks_of(7, 0, 3, 6, 9, 12, 15),
        *tasks_of(40, 6, 9, 12, 15, 18, 21, 24, 27),
        *rows_of(("41", "40_0", "x"), ("42", "40_3", "x")),
        # No step: a short reach, other distances, neighbours, and a whole row with one.
        *tasks_of(50, 1, 3, 5, 7, 9),
        *tasks_of(60, 0, 10, 30),
        *tasks_of(70, *range(1, 41)),
        *tasks_of(80, 0, 2, 4, 6, 8, 10),
    ]
    found = Records(rows, 1)
    doubtful = found.doubtful()
    assert doubtful == {"7": 18, "40": 30, "80": 12}
    plain = ["7_[0-18:3%2]", "40_[0,3,6,9,12,15,18,21,24,27,30]", "40_5", "80_[0,2,4,6,8,10]"]
    found.complete(doubtful, plain)
    assert [row.split(SEPARATOR)[1] for row in found.rows()] == [
        "7_[0,3,6,9,12,15,18]",
        "40_[6,9,12,15,18,21,24,27,30]",
        "40_0",
        "40_3",
        "50_[1,3,5,7,9]",
        "60_[0,10,30]",
        "70_[1-40]",
        "80_[0,2,4,6,8,10]",
    ]


def test_the_next_task_may_have_a_record_of_its_own() -> None:
    rows = [*tasks_of(7, 0, 3, 6, 9), *rows_of(("8", "7_12", "held"))]
    assert Records(rows, 1).doubtful() == {}


@given(st.dictionaries(st.integers(0, 60), st.integers(1, 4), min_size=1))
def test_records_name_each_task_once(raw_of: dict[int, int]) -> None:
    rows = [SEPARATOR.join((str(raw), f"9_{task}", "x")) for task, raw in raw_of.items()]
    found: dict[int, int] = {}
    for row in Records(rows, 1).rows():
        raw, name, _ = row.split(SEPARATOR)
        job_id, count = exact_id(name)
        before = len(found)
        for item in job_id.removeprefix("9_").strip("[]").split(","):
            low, _, high = item.partition("-")
            found.update({task: int(raw) for task in range(int(low), int(high or low) + 1)})
        assert len(found) - before == count
    assert found == raw_of

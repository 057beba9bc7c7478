"""No text may forge a row or hide one, and no cut may pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.rows import SEPARATOR, RowFormat, new_mark

FORM = RowFormat(("JobID", "State", "Account"), "end0123")
plain = st.text(st.characters(blacklist_characters=SEPARATOR), max_size=20)
anything = st.text(max_size=60)


def printed(rows: list[tuple[str, str, str]]) -> str:
    return "".join(SEPARATOR.join(row) + f"{SEPARATOR}{FORM.mark}\n" for row in rows)


def test_the_argument_gives_full_width_columns() -> None:
    assert FORM.argument == "JobID:\x1f,State:\x1f,Account:\x1fend0123"


def test_marks_are_fresh_and_plain() -> None:
    marks = {new_mark() for _ in range(100)}
    assert len(marks) == 100
    assert all(mark.isalnum() and len(mark) >= 16 for mark in marks)


@given(st.lists(st.tuples(plain, plain, anything)))
def test_whatever_the_last_column_holds_rows_stay_apart(rows: list[tuple[str, str, str]]) -> None:
    back = [tuple(FORM.fields(row, "squeue")) for row in FORM.split(printed(rows), "squeue")]
    assert back == rows


@given(st.lists(st.tuples(plain, plain, anything), min_size=1), st.data())
def test_a_cut_inside_a_row_is_noticed(
    rows: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    text = printed(rows)
    ends = {len(printed(rows[:count])) for count in range(len(rows) + 1)}
    at = data.draw(st.integers(1, len(text) - 1))
    if at in ends:
        assert len(FORM.split(text[:at], "squeue")) < len(rows)
    else:
        with pytest.raises(SourceMissingError, match="cut off"):
            FORM.split(text[:at], "squeue")


def test_a_row_that_lacks_columns_is_refused() -> None:
    [row] = FORM.split(f"1{SEPARATOR}PENDING{SEPARATOR}{FORM.mark}\n", "squeue")
    with pytest.raises(SourceMissingError, match="2 of 3 columns"):
        FORM.fields(row, "squeue")


def test_a_user_who_types_an_old_mark_changes_nothing() -> None:
    text = printed([("1", "PENDING", f"x{SEPARATOR}endffff\n2{SEPARATOR}RUNNING{SEPARATOR}root")])
    [row] = FORM.split(text, "squeue")
    assert FORM.fields(row, "squeue")[0] == "1"

"""What squeue prints for an array and what scontrol takes for exactly it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.slurm.arrays import exact_id


@pytest.mark.parametrize(
    ("printed", "wanted", "tasks"),
    [
        ("123", "123", 1),
        ("123_4", "123_4", 1),
        ("12+1", "12+1", 1),
        ("7_[3]", "7_[3]", 1),
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
    for item in job_id.removeprefix("9_[").removesuffix("]").split(","):
        low, _, high = item.partition("-")
        got.extend(range(int(low), int(high or low) + 1))
    assert got == wanted
    assert count == len(wanted)

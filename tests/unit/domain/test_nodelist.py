"""Folded node lists, with the width of every number kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ext.domain.errors import DataError
from slurm_ext.domain.nodelist import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("b04-[09-10]", ("b04-09", "b04-10")),
        ("n[1-3,07],login", ("n1", "n2", "n3", "n07", "login")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("c1", ("c1",)),
        ("(null)", ()),
        ("", ()),
        ("None assigned", ()),
        ("n1,n1", ("n1",)),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1", "n1]", "n[2-1]", "n[a]", "n[1-999999999]", "n1,,n2", "n[[1]]", "n[]"]
)
def test_malformed_names_the_value(text: str) -> None:
    with pytest.raises(DataError) as err:
        expand(text)
    assert repr(text) in str(err.value)


@given(
    st.sets(
        st.builds(
            lambda prefix, number, width: prefix + str(number).zfill(width),
            st.sampled_from(["n", "b04-", "gpu", "r1n"]),
            st.integers(0, 200),
            st.integers(1, 4),
        ),
        max_size=40,
    )
)
def test_fold_and_expand_are_inverse(names: set[str]) -> None:
    assert set(expand(fold(names))) == names


def test_fold_is_short() -> None:
    assert fold(["n03", "n01", "n02", "n07", "login"]) == "login,n[01-03,07]"

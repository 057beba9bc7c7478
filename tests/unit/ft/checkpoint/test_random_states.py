"""Random states and positions of a rank, and what must not be unpickled."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from slurm_ft.checkpoint import random_states
from slurm_ft.checkpoint.errors import CheckpointError
from slurm_ft.checkpoint.layout import examine
from slurm_ft.checkpoint.loading import distrust
from tests.unit.ft.checkpoint.written import save


def test_python_and_numpy_go_on_where_they_were(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    random.gauss(0, 1)  # leaves half a pair in the state
    numpy.random.standard_normal()
    random_states.write(tmp_path, 3, random_states.capture(), {"at": 1})
    expected = (random.gauss(0, 1), random.random(), numpy.random.standard_normal(3).tolist())
    random.seed(1)
    numpy.random.seed(1)
    states, position = random_states.read(tmp_path, random_states.file_name(3))
    assert position == {"at": 1}
    assert set(random_states.apply(states, "here")) >= {"python", "numpy"}
    found = (random.gauss(0, 1), random.random(), numpy.random.standard_normal(3).tolist())
    assert found == expected


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 9}', '{"version":1,"states":1,"position":{}}']
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-00000.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"rank-00000\.json: cannot be read"):
        random_states.read(tmp_path, "rank-00000.json")


def test_states_that_do_not_fit_are_an_error_with_the_place() -> None:
    with pytest.raises(CheckpointError, match=r"there: .*cannot be used"):
        random_states.apply({"python": [3, "AAAA", None]}, "there")
    with pytest.raises(CheckpointError, match=r"there: .*cannot be used"):
        random_states.apply({}, "there")


def test_only_what_is_ours_alone_may_be_unpickled(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (complete,) = examine(tmp_path).complete
    assert distrust(complete) is None
    (complete.path / "data").chmod(0o664)
    assert "may be changed by others" in (distrust(complete) or "")
    (complete.path / "data").chmod(0o644)
    complete.path.chmod(0o777)
    assert "may be changed by others" in (distrust(complete) or "")
    complete.path.chmod(0o755)
    os.rename(complete.path / "data", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", complete.path / "data")
    assert "may be changed by others" in (distrust(complete) or "")
    if os.geteuid() == 0:
        os.chown(complete.path, 12345, 12345)
        assert "belongs to user 12345" in (distrust(complete) or "")


def test_files_written_with_a_lax_umask_are_still_ours_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(before)
    (complete,) = examine(tmp_path).complete
    assert distrust(complete) is None

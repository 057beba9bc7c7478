"""The optional pyslurm adapter: when it is taken, and what it reads.

pyslurm itself needs the Slurm of its own release; where it is installed beside one, the live
contract runs against it. Here a stand-in module with its published attributes is used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slurm_ext.domain.errors import SourceMissingError
from slurm_ext.slurm.process import CommandRunner
from slurm_ext.slurm.pyslurm_backend import PyslurmBackend, load_pyslurm
from tests.fakes.commands import FakeCommands

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"


class RPCError(Exception):
    pass


def job(job_id: int, **changes: object) -> SimpleNamespace:
    fields: dict[str, object] = {
        "array_id": None,
        "array_task_id": None,
        "array_tasks_waiting": None,
        "heterogeneous_id": 0,
        "heterogeneous_offset": 0,
        "admin_comment": None,
        "comment": None,
    }
    return SimpleNamespace(id=job_id, **{**fields, **changes})


def install(monkeypatch: pytest.MonkeyPatch, version: str, fails: bool = False) -> None:
    def load() -> dict[int, SimpleNamespace]:
        if fails:
            raise RPCError("Unable to contact slurm controller")
        return {
            3: job(3, admin_comment='{"ft":1}', comment="mine"),
            8: job(8, array_id=8, array_tasks_waiting="1-9:2", admin_comment="array"),
            9: job(9, array_id=8, array_task_id=0, admin_comment="task"),
            13: job(13, heterogeneous_id=12, heterogeneous_offset=1),
        }

    module = ModuleType("pyslurm")
    module.__version__ = version  # type: ignore[attr-defined]
    module.RPCError = RPCError  # type: ignore[attr-defined]
    module.Jobs = SimpleNamespace(load=load)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyslurm", module)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandRunner:
    monkeypatch.setenv("PATH", FakeCommands(tmp_path, DATA / "24.11").path())
    return CommandRunner(timeout_s=5)


def test_comments_by_the_ids_of_the_queue(
    runner: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "24.11.0")
    backend = PyslurmBackend(runner)
    ids = ["3", "8_[1,3,5,7,9]", "8_0", "12+1", "4000000"]
    assert backend.admin_comments(ids) == {
        "3": '{"ft":1}',
        "8_[1,3,5,7,9]": "array",
        "8_0": "task",
        "12+1": "",
    }
    assert backend.user_comments(["3", "8_0"]) == {"3": "mine", "8_0": ""}
    assert backend.admin_comments([]) == {}
    backend.close()


@pytest.mark.parametrize("version", ["25.11.2", "24.5.0", "24", ""])
def test_another_release_is_refused_with_the_fix(
    runner: CommandRunner, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, version)
    with pytest.raises(SourceMissingError, match=r"does not fit Slurm 24\.11; install"):
        PyslurmBackend(runner)


def test_where_it_is_not_installed_it_says_so(
    runner: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    with pytest.raises(SourceMissingError, match="not installed"):
        PyslurmBackend(runner)


def test_a_failed_call_is_missing_never_empty(
    runner: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "24.11.0", fails=True)
    backend = PyslurmBackend(runner)
    with pytest.raises(SourceMissingError, match="Unable to contact"):
        backend.admin_comments(["3"])
    backend.close()


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "24.5.1")
    assert load_pyslurm((24, 5)) is sys.modules["pyslurm"]

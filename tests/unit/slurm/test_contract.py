"""The contract of ``Backend`` over the in-memory Slurm and over recorded answers of a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_ext.domain.job import ShapeKind
from slurm_ext.slurm.backend import Backend
from slurm_ext.slurm.cli_backend import CliBackend
from tests.fakes.commands import FakeCommands
from tests.fakes.contract import ReadContract, WriteContract
from tests.fakes.slurm import FakeSlurm

DATA = Path(__file__).resolve().parents[2] / "data" / "slurm"
RECORDED_AT = 1795979420.0  # when the answers in data/slurm/24.11 were printed


@dataclass
class FakeWorld:
    backend: FakeSlurm

    def submit(
        self,
        *,
        gpus: int,
        nodes: int = 1,
        kind: ShapeKind = ShapeKind.LAUNCHER_PER_NODE,
        admin_comment: str = "",
        array: range | None = None,
    ) -> str:
        return self.backend.submit(
            gpus=gpus, nodes=nodes, kind=kind, admin_comment=admin_comment, array=array or ()
        )

    def cancel(self, job_id: str) -> None:
        self.backend.cancel(job_id)

    def hold(self, job_id: str) -> None:
        self.backend.hold(job_id)

    def let(self, condition: Callable[[], bool], what: str) -> None:
        self.backend.advance_until(condition, limit_s=30)


class TestFake(ReadContract, WriteContract):
    @pytest.fixture
    def world(self) -> FakeWorld:
        return FakeWorld(FakeSlurm(nodes=2, gpus_per_node=4))

    @pytest.fixture
    def backend(self) -> Backend:
        slurm = FakeSlurm(nodes=4)
        slurm.submit(gpus=8, nodes=2)
        slurm.submit(gpus=4, kind=ShapeKind.RANK_PER_GPU)
        slurm.submit(gpus=2, nodes=1, array=range(1, 9))
        slurm.advance(1)
        slurm.submit(gpus=4, begin_s=slurm.now + 500)
        slurm.hold(slurm.submit(gpus=4))
        return slurm


class TestRecordedCommands(ReadContract):
    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        commands = FakeCommands(tmp_path, DATA / "24.11")
        monkeypatch.setenv("PATH", commands.path())
        # A user's or a site's own settings must not change what the commands print.
        monkeypatch.setenv("SQUEUE_FORMAT", "%i")
        monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
        monkeypatch.setenv("SLURM_CLUSTERS", "other")
        backend = CliBackend(clock=lambda: RECORDED_AT)
        yield backend
        backend.close()

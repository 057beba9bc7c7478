"""A daemon beside a fake Slurm, for the tests of the shell: one place that sets it up."""

from __future__ import annotations

from pathlib import Path

from slurm_ext.control.config import Config
from slurm_ext.control.cycle import Engine, Report
from slurm_ext.domain.directive import Directive, GpuRequest, GpuRequestKind, RequestedShape
from slurm_ext.domain.job import ShapeKind
from slurm_ext.estimate.measurement import Key, Measurement
from slurm_ext.estimate.table import TableWriter
from tests.fakes.slurm import FakeSlurm

ALL = ["order", "lease", "resize", "pin"]
BATCH = 256
RATE = {1: 100.0, 2: 190.0, 4: 360.0, 8: 680.0, 16: 1200.0}


class Bench:
    """One fake cluster, one configuration, and as many daemons one after the other as needed."""

    def __init__(self, tmp_path: Path, *, nodes: int = 4, act: list[str] | None = None, **keys):
        self.slurm = FakeSlurm(nodes=nodes, gpu_type="v100")
        (tmp_path / "run").mkdir(exist_ok=True)
        self.config = Config(
            partitions={"main": {"act": ALL if act is None else act}},
            table=tmp_path / "table.sqlite",
            journal=tmp_path / "var" / "journal.sqlite",
            spool=tmp_path / "spool",
            heartbeat=tmp_path / "run" / "beat",
            cycle_s=5,
            grace_s=5,
            **keys,
        )
        with TableWriter(self.config.table) as table:
            table.add(
                Measurement(
                    Key(
                        "vit",
                        "v100",
                        gpus,
                        -(-gpus // 4),
                        (4,) * (gpus // 4) or (gpus,),
                        BATCH // gpus,
                    ),
                    rate,
                    memory_gb=8.0,
                    source="test",
                )
                for gpus, rate in RATE.items()
            )
        self.engine = self.start()

    @property
    def now(self) -> float:
        return self.slurm.now

    def start(self, **options) -> Engine:
        """A new daemon, as after a restart."""
        self.engine = Engine(self.config, self.slurm, clock=lambda: self.slurm.now, **options)
        return self.engine

    def submit(
        self, gpus: int = 4, samples: int = 36_000, *, auto: bool = True, **fields: object
    ) -> str:
        """A job that trains ``samples`` with one rank per GPU; its grace is what Lua gives it."""
        directive = Directive(
            model="vit",
            samples=samples,
            batch_min=BATCH,
            batch_max=BATCH,
            gpus=GpuRequest(GpuRequestKind.AUTO if auto else GpuRequestKind.REQUESTED),
            shape=ShapeKind.RANK_PER_GPU,
            req=RequestedShape(gpus=gpus, ntasks=gpus, gpus_per_task=1),
        )
        values: dict[str, object] = {
            "gpus": gpus,
            "kind": ShapeKind.RANK_PER_GPU,
            "nodes": 1,
            "run_s": lambda count: samples / RATE.get(count, 100.0 * count),
            "time_limit_s": 7200.0,
            "admin_comment": f"site=x ft:{directive.to_json()}",
            "begin_s": self.now + 5 if auto else None,
            **fields,
        }
        return self.slurm.submit(**values)  # type: ignore[arg-type]

    def fill(self) -> str:
        """Occupy every GPU for a very long time with a job that runs already."""
        gpus = sum(node.gpus for node in self.slurm.nodes.values())
        job = self.submit(
            gpus, 10**9, auto=False, nodes=len(self.slurm.nodes), time_limit_s=30 * 86400.0
        )
        self.slurm.start(job)
        return job

    def cycles(self, number: int = 1) -> list[Report]:
        """Run cycles with Slurm's time between them."""
        reports = []
        for _ in range(number):
            reports.append(self.engine.cycle())
            self.slurm.advance(self.config.cycle_s)
        return reports

"""The simulator beside a real Slurm: calibrated on one recorded workload, judged on another.

    python -m tests.bench.real_vs_sim [CALIBRATE.json JUDGE.json] [--json FILE]

A record is what ``ci/demo --records FILE`` writes: when each job of a replay on a real Slurm was
submitted, when and where it started, when it ended. Two variants are in it: plain Slurm, simulated
by EASY backfilling with the limits that Slurm had (whole minutes of real time), and slurm-ext,
simulated by the policy that the daemon ran with the weights that it had. Two delays are found by a
grid on the first record (`slurm_ext.sim.overhead.calibrate`: the beat of decisions, and how long
GPUs stay taken after a job), a third is read off the stamps; the second record was not looked at
for any of them. Exit code 1 where average JCT or makespan is more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_ext.domain.policy import Policy
from slurm_ext.estimate.remaining import EFFICIENCY_FLOOR
from slurm_ext.optimize.objective import Weights
from slurm_ext.policy.backfill import Backfill
from slurm_ext.policy.titan import TitanConfig, TitanPolicy
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import replay
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.jobs import Rules, build_jobs
from slurm_ext.sim.library import find_workload, starter_truth
from slurm_ext.sim.model import Run, SimJob
from slurm_ext.sim.overhead import Agreement, Overhead, agreement, calibrate, launch_seconds
from slurm_ext.sim.workload import read_workload

RECORDS = Path(__file__).parents[1] / "data" / "replay"
CALIBRATE, JUDGE = RECORDS / "FM-1-vit-large.json", RECORDS / "FM-1.5-vit-large.json"
VARIANTS = ("plain", "slurm_ext")
# What must hold on the record that was not calibrated on.
WITHIN = 0.10
# What is tried, in real seconds: slurmctld starts queued jobs at whole seconds, the daemon of the
# replay looks four times a second, and a job's GPUs are free when its epilog and its RPC are over.
CYCLES_S = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
EPILOGS_S = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
_MINUTE_S = 60.0
# A waiting job of the daemon's default weights, in the real seconds that the daemon lives in.
_PATIENCE_S = Weights().patience_s
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Record:
    """One replay on a real Slurm; times are seconds of the workload."""

    workload: str
    jobs: int | None
    nodes: int
    gpus_per_node: int
    scale: float
    seed: int
    runs: Mapping[str, tuple[Run, ...]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A variant: its overhead, and how far the simulation is off without it and with it."""

    variant: str
    overhead: Overhead
    fitted: Agreement
    ideal: Agreement
    judged: Agreement
    real_avg_jct_h: float
    real_makespan_h: float


def read_record(path: Path) -> Record:
    """A record of ``ci/demo --records``."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    meta = document["meta"]
    runs = {
        variant: tuple(
            Run(
                job_id=row["job_id"],
                submit_s=row["submit_s"],
                start_s=row["start_s"],
                end_s=row["end_s"],
                gpus=sum(row["nodes"].values()),
                seats=row["nodes"],
                error_free_s=0.0,
            )
            for row in document[variant]
        )
        for variant in VARIANTS
        if variant in document
    }
    return Record(
        workload=meta["workload"],
        jobs=meta["jobs"],
        nodes=meta["nodes"],
        gpus_per_node=meta["gpus_per_node"],
        scale=meta["time_scale"],
        seed=meta["seed"],
        runs=runs,
    )


class Twin:
    """One variant of a record, to be simulated."""

    def __init__(self, record: Record, variant: str) -> None:
        self.real = record.runs[variant]
        self.scale = record.scale
        self._hardware = Hardware(record.nodes, record.gpus_per_node)
        ours = variant == "slurm_ext"
        self._policy = _daemons_policy(record.scale) if ours else Backfill()
        rules = Rules(
            gpus_per_node=record.gpus_per_node,
            limit_step_s=_MINUTE_S * record.scale,
            seed=record.seed,
            efficiency_floor=EFFICIENCY_FLOOR if ours else 0.0,
        )
        workload = read_workload(find_workload(record.workload), record.jobs)
        built = build_jobs(workload, starter_truth(), self._hardware, rules)
        real = {run.job_id: run for run in self.real}
        width = len(str(len(built) - 1))
        named = (replace(job, job_id=f"ft-{i:0{width}d}") for i, job in enumerate(built))
        self.jobs: tuple[SimJob, ...] = tuple(
            replace(
                job,
                # Submitted when it was submitted, which on a busy machine is a little late.
                submit_s=real[job.job_id].submit_s,
                candidates=tuple(replace(c, job_ids=(job.job_id,)) for c in job.candidates),
            )
            for job in named
        )

    def simulate(self, overhead: Overhead) -> tuple[Run, ...]:
        """The runs under an overhead, each from when its program begins, as in the stamps."""
        costs = Costs(overhead=overhead)
        found = replay(self.jobs, self._hardware, self._policy, costs)
        return tuple(replace(run, start_s=run.start_s + overhead.launch_s) for run in found.runs)

    def launch_s(self) -> float:
        """What a run takes beyond its own time."""
        times = {job.job_id: job.true_run_s for job in self.jobs}
        return launch_seconds(self.real, lambda run: times[run.job_id][run.gpus])

    def fit(self, cycles_s: Sequence[float], epilogs_s: Sequence[float]) -> Overhead:
        """The overhead under which the simulated starts are nearest to the real ones, of a grid in
        real seconds."""
        return calibrate(
            self.real,
            self.simulate,
            [each * self.scale for each in cycles_s],
            [each * self.scale for each in epilogs_s],
            Overhead(launch_s=self.launch_s()),
        )


def _daemons_policy(scale: float) -> Policy:
    """The policy as the daemon ran it: its times are real seconds, and the waiting limit was
    scaled by the replay. When the records were made, a small start was never declined."""
    weights = Weights(patience_s=_PATIENCE_S * scale)
    return TitanPolicy(TitanConfig(weights=weights, waiting_limit_s=_DAY_S, hold_out=None))


def compare(
    first: Record,
    second: Record,
    cycles_s: Sequence[float] = CYCLES_S,
    epilogs_s: Sequence[float] = EPILOGS_S,
) -> list[Finding]:
    """Calibrate on the first record, judge on the second."""
    found = []
    for variant in VARIANTS:
        known, unseen = Twin(first, variant), Twin(second, variant)
        overhead = known.fit(cycles_s, epilogs_s)
        real = unseen.real
        jct = sum(run.end_s - run.submit_s for run in real) / len(real)
        span = max(run.end_s for run in real) - min(run.submit_s for run in real)
        found.append(
            Finding(
                variant=variant,
                overhead=overhead,
                fitted=agreement(known.real, known.simulate(overhead)),
                ideal=agreement(real, unseen.simulate(Overhead())),
                judged=agreement(real, unseen.simulate(overhead)),
                real_avg_jct_h=jct / 3600,
                real_makespan_h=span / 3600,
            )
        )
    return found


def misses(findings: Sequence[Finding]) -> list[str]:
    """What must hold and does not."""
    return [
        f"{found.variant}: {what} is {error:+.1%} off, more than {WITHIN:.0%}"
        for found in findings
        for what, error in (
            ("average JCT", found.judged.avg_jct_error),
            ("makespan", found.judged.makespan_error),
        )
        if abs(error) > WITHIN
    ]


def show(first: Record, second: Record, findings: Sequence[Finding]) -> None:
    print(
        f"Calibrated on {first.workload} ({len(first.runs['plain'])} jobs), judged on "
        f"{second.workload} ({len(second.runs['plain'])} jobs), one real second is "
        f"{second.scale:g} s of the workload. Errors are simulated / real - 1."
    )
    print(
        f"{'variant':11}{'beat s':>8}{'epilog s':>9}{'launch s':>9}  {'':22}"
        f"{'average JCT':>12}{'makespan':>10}{'p90 of start error':>20}"
    )
    for found in findings:
        real = f"{found.real_avg_jct_h:10.3f} h{found.real_makespan_h:8.2f} h"
        print(f"{found.variant:11}{'':26}  {'really':22}{real}")
        over = found.overhead
        for name, each, cells in (
            ("no overhead", found.ideal, f"{'0':>8}{'0':>9}{'0':>9}"),
            (
                "calibrated",
                found.judged,
                f"{over.cycle_s:8.0f}{over.epilog_s:9.0f}{over.launch_s:9.1f}",
            ),
            ("(where it was fitted)", found.fitted, " " * 26),
        ):
            print(
                f"{'':11}{cells}  {name:22}{each.avg_jct_error:+12.1%}{each.makespan_error:+10.1%}"
                f"{each.p90_start_error_s:18.0f} s"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if len(args.records) not in (0, 2):
        parser.error("give two records: the one to calibrate on, then the one to judge on")
    first, second = (read_record(path) for path in args.records or (CALIBRATE, JUDGE))
    findings = compare(first, second)
    show(first, second, findings)
    if args.json:
        rows = [
            {
                "variant": found.variant,
                "cycle_s": found.overhead.cycle_s,
                "epilog_s": found.overhead.epilog_s,
                "launch_s": found.overhead.launch_s,
                "avg_jct_error": found.judged.avg_jct_error,
                "makespan_error": found.judged.makespan_error,
                "p90_start_error_s": found.judged.p90_start_error_s,
                "avg_jct_error_without": found.ideal.avg_jct_error,
                "makespan_error_without": found.ideal.makespan_error,
            }
            for found in findings
        ]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    missed = misses(findings)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Titan's experiment with 320 jobs on 16 x 4 GPUs, on a sample of our own.

    python -m tests.bench.paper320 [--samples N] [--json FILE]

The paper's jobs are not published; what is known of them is that there are 320, of 5 minutes to
10 hours, and what came out. Our sample: model, GPU count and batch of each job are drawn from the
published titan_fm workloads, run times between 5 minutes and 10 hours, arrivals uniform over a day;
the two free parameters (how much shorter jobs are more frequent, and the length of the day) are
such that SRTF comes near what was published for it. Everything else is then measured.

Costs of every start: 30 s of checkpoint and a cold switch of 29 s; with the pipeline switch 5 s in
its place where ranks of the same model have just ended on all of the job's GPUs (published for
ViT-Large on 4 GPUs; 46 and 22 s become 6 and 7 s on 8 and 2). A job that is restarted on more GPUs
pays the cold switch in both cases. Merging is `slurm_ext.sim.merging`, with half of the smaller
task's work saved, and once as the published program charges it: all of it.

The published signs: merging shortens JCT and makespan, and without it the makespan is SRTF's;
without the switch JCT suffers and the makespan does not. Exit code 1 where a mechanism of ours does
harm: an average JCT that is longer with merging or with the switch than without, by more than the
samples differ.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from slurm_ext.domain.policy import Policy
from slurm_ext.policy.srtf import SrtfPolicy
from slurm_ext.policy.titan import GROWING, TitanPolicy
from slurm_ext.sim.build import Terms, build
from slurm_ext.sim.costs import Costs
from slurm_ext.sim.engine import replay, seats_overlap
from slurm_ext.sim.hardware import Hardware
from slurm_ext.sim.library import THROUGHPUT, find_workload
from slurm_ext.sim.merging import Merging
from slurm_ext.sim.model import Schedule, SimJob
from slurm_ext.sim.summary import Summary, summarise
from slurm_ext.sim.trace import TraceJob
from slurm_ext.sim.truth import CHECKPOINT_S, Truth, consolidated, read_curves
from slurm_ext.sim.workload import read_workload
from tests.bench.titan_fm_data import WORKLOADS

HARDWARE = Hardware(nodes=16, gpus_per_node=4)
JOBS = 320
SHORTEST_S, LONGEST_S = 300.0, 36_000.0
# Run times have a density of t ** -POWER: chosen, with the day, so that SRTF is near the published.
POWER = 1.37
DAY_S = 21 * 3600.0
COLD_S, PIPELINE_S = 29.0, 5.0
MODELS = ("vit", "vit-large", "roberta-base")
DENSITIES = (0.5, 1.0, 1.5, 2.0)
HOUR = 3600.0
# (average JCT, makespan) in hours, as published.
PAPER = {
    "srtf": (1.68, 33.09),
    "full": (1.04, 29.01),
    "no merging": (1.23, 33.11),
    "no switch": (1.16, 29.01),
}
# Replays that differ by less than this do not differ.
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: a policy, whether there is a pipeline switch, and how merging is charged."""

    name: str
    policy: Policy
    switch: bool
    merging: Merging | None


@dataclass(frozen=True, slots=True)
class Row:
    """A setting over all samples; means."""

    name: str
    found: tuple[Summary, ...]
    merged: float

    def mean(self, field: str) -> float:
        """Mean of one number over the samples."""
        return fmean(getattr(each, field) for each in self.found)

    @property
    def jct_h(self) -> float:
        """Average JCT, hours."""
        return self.mean("avg_jct_s") / HOUR

    @property
    def makespan_h(self) -> float:
        """Makespan, hours."""
        return self.mean("makespan_s") / HOUR


def settings() -> list[Setting]:
    """What is compared. SRTF as published has neither; the last touches no running job."""
    grow, stay = TitanPolicy(GROWING), TitanPolicy()
    half = Merging(saved=0.5)
    return [
        Setting("srtf", SrtfPolicy(), False, None),
        Setting("full", grow, True, half),
        Setting("no merging", grow, True, None),
        Setting("no switch", grow, False, half),
        Setting("neither", grow, False, None),
        Setting("full, all saved", grow, True, Merging(saved=1.0)),
        Setting("full, 1 in 4 fails", grow, True, Merging(saved=0.5, failed=0.25)),
        Setting("nothing restarted", stay, True, None),
    ]


@cache
def truth() -> Truth:
    """True run times with the switch cost of this experiment."""
    return Truth(read_curves(THROUGHPUT, "V100"), dict.fromkeys(MODELS, COLD_S))


@cache
def _shapes() -> tuple[tuple[str, int, int], ...]:
    """(model, GPUs, batch) of every published job."""
    return tuple(
        (job.model, job.gpus, job.batch_size)
        for name in WORKLOADS
        for job in read_workload(find_workload(name))
    )


def sample(seed: int) -> tuple[TraceJob, ...]:
    """320 jobs; equal seeds give equal jobs."""
    draw = random.Random(seed)
    low, high = SHORTEST_S ** (1 - POWER), LONGEST_S ** (1 - POWER)
    arrivals = sorted(draw.uniform(0.0, DAY_S) for _ in range(JOBS))
    rows = []
    for index, submit_s in enumerate(arrivals):
        model, gpus, batch = draw.choice(_shapes())
        run_s = (low + draw.random() * (high - low)) ** (1 / (1 - POWER))
        placement = consolidated(gpus, HARDWARE.gpus_per_node)
        start_s = truth().start_up_s(model)
        per_sample_s = truth().run_s(model, batch, 1.0, placement) - start_s
        rows.append(
            TraceJob(
                job_id=f"s{index:03}",
                submit_s=submit_s - arrivals[0],
                duration_s=None,
                gpus=gpus,
                model=model,
                batch=batch,
                samples=(run_s - start_s) / per_sample_s,
            )
        )
    return tuple(rows)


def costs(switch: bool) -> Costs:
    """What starts cost, with and without the pipeline switch."""
    return Costs(
        checkpoint_s=CHECKPOINT_S,
        cold_switch_s={("", ""): COLD_S},
        pipeline_switch_s={("", ""): PIPELINE_S} if switch else None,
    )


@cache
def jobs_of(seed: int, density: float) -> tuple[SimJob, ...]:
    """The jobs of a sample that arrive ``density`` times as fast."""
    built = build(sample(seed), HARDWARE, {"": truth()}, costs(False), Terms(density=density))
    if built.left_out:
        raise SystemExit(f"sample {seed}: {built.left_out[0]}")
    return built.jobs


def run(setting: Setting, seed: int, density: float = 1.0) -> Schedule:
    """One replay, checked."""
    jobs = jobs_of(seed, density)
    found = replay(jobs, HARDWARE, setting.policy, costs(setting.switch), merging=setting.merging)
    if problem := seats_overlap(found.runs, HARDWARE):
        raise SystemExit(f"{setting.name}: {problem}")
    if sorted(r.job_id for r in found.runs if r.cause == "done") != [j.job_id for j in jobs]:
        raise SystemExit(f"{setting.name}: a job is lost or was done twice")
    return found


def rows_of(seeds: Sequence[int], density: float = 1.0, most: int | None = None) -> list[Row]:
    """Every setting on every sample; the first setting is what the others are compared with."""
    bases = {}
    rows = []
    for setting in settings()[:most]:
        summaries, merged = [], 0
        for seed in seeds:
            schedule = run(setting, seed, density)
            base = bases.setdefault(seed, schedule)
            summaries.append(summarise(schedule, base))
            merged += sum(r.gpus == 0 and r.cause == "done" for r in schedule.runs)
        rows.append(Row(setting.name, tuple(summaries), merged / len(seeds)))
    return rows


def change(one: Row, other: Row, field: str) -> tuple[float, float]:
    """How much less ``one`` is than ``other``, as a share, sample by sample: mean and its standard
    error. A replay is chaotic: one job in another seat moves all that follow."""
    each = [
        1 - getattr(a, field) / getattr(b, field)
        for a, b in zip(one.found, other.found, strict=True)
    ]
    error = stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0
    return fmean(each), error


@dataclass(frozen=True, slots=True)
class Sign:
    """A published sign, and what ours is: the change, its error, and whether they agree."""

    words: str
    change: float
    error: float
    expected: bool

    @property
    def verdict(self) -> str:
        """Yes, no, or unclear where the change is within two standard errors of what decides."""
        if self.expected:
            if abs(self.change) <= 2 * self.error:
                return "unclear"
            return "yes" if self.change > 0 else "no"
        return "yes" if abs(self.change) <= max(NOISE, 2 * self.error) else "no"


# Words, what is compared with what, in which number, and whether the first is to be less.
_FULL, _PLAIN, _AS_CHARGED = "full", "no merging", "full, all saved"
_SIGNS = (
    ("full has a shorter average JCT than SRTF", _FULL, "srtf", "avg_jct_s", True),
    ("merging shortens the average JCT", _FULL, _PLAIN, "avg_jct_s", True),
    ("merging shortens the makespan", _FULL, _PLAIN, "makespan_s", True),
    ("merging as the author charges it: JCT", _AS_CHARGED, _PLAIN, "avg_jct_s", True),
    ("merging as the author charges it: makespan", _AS_CHARGED, _PLAIN, "makespan_s", True),
    ("without merging the makespan is SRTF's", _PLAIN, "srtf", "makespan_s", False),
    ("the switch shortens the average JCT", _FULL, "no switch", "avg_jct_s", True),
    ("the switch leaves the makespan as it is", _FULL, "no switch", "makespan_s", False),
)


def signs(rows: Sequence[Row]) -> list[Sign]:
    """The published signs, and whether ours are the same."""
    by = {row.name: row for row in rows}
    return [
        Sign(words, *change(by[one], by[other], field), expected)
        for words, one, other, field, expected in _SIGNS
    ]


def misses(rows: Sequence[Row]) -> list[str]:
    """Mechanisms that do harm, beyond what chance does."""
    by = {row.name: row for row in rows}
    found = []
    for one, other in (("full", "no merging"), ("full", "no switch"), ("full", "srtf")):
        less, error = change(by[one], by[other], "avg_jct_s")
        if less < -max(NOISE, 2 * error):
            found.append(f"average JCT of {one!r} is {-less:.1%} longer than of {other!r}")
    return found


def show(rows: Sequence[Row]) -> None:
    print(
        f"{'':20}{'avg JCT h':>10}{'paper':>7}{'/srtf':>7}{'paper':>7}{'makespan':>10}{'paper':>7}"
        f"{'p99 h':>8}{'starts':>8}{'merged':>8}{'helped':>8}{'hurt':>7}"
    )
    base = rows[0]
    for row in rows:
        jct, span = PAPER.get(row.name, (math.nan, math.nan))
        known = row.name in PAPER
        print(
            f"{row.name:20}{row.jct_h:10.3f}{_or_dash(known, jct, 2)}{row.jct_h / base.jct_h:7.3f}"
            f"{_or_dash(known, jct / PAPER['srtf'][0], 3)}{row.makespan_h:10.2f}"
            f"{_or_dash(known, span, 2)}{row.mean('p99_jct_s') / HOUR:8.2f}"
            f"{row.mean('starts_per_job'):8.2f}{row.merged:8.0f}"
            f"{row.mean('share_better_than_srtf'):8.1%}{row.mean('share_worse_than_srtf'):7.1%}"
        )


def _or_dash(known: bool, value: float, digits: int) -> str:
    return f"{value:7.{digits}f}" if known else f"{'-':>7}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--samples", type=int, default=10, metavar="N", help="samples (default: 10)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    seeds = range(args.samples)
    rows = rows_of(seeds)
    print(f"320 jobs on 16x4 GPUs, means over {args.samples} samples, all decide on events")
    show(rows)
    print("\nsigns as published? (shorter by, and the standard error over the samples)")
    found = signs(rows)
    for sign in found:
        print(f"  {sign.verdict:9}{sign.words:44}{sign.change:+7.1%} +- {sign.error:.1%}")
    print("\narrivals faster or slower: jobs 10 % faster and 10 % slower than under SRTF")
    print("(published: 18 to 20 % helped, 6 to 11 % hurt)")
    dense = {}
    for density in DENSITIES:
        srtf, full = rows_of(seeds[:2], density, most=2)
        dense[density] = {
            "srtf_avg_jct_h": srtf.jct_h,
            "full_avg_jct_h": full.jct_h,
            "helped": full.mean("share_better_than_srtf"),
            "hurt": full.mean("share_worse_than_srtf"),
        }
        print(
            f"  density {density:3g}: average JCT {srtf.jct_h:6.3f} -> {full.jct_h:6.3f} h, helped "
            f"{dense[density]['helped']:.1%}, hurt {dense[density]['hurt']:.1%}"
        )
    if args.json:
        document = {
            "rows": {row.name: [each.as_dict() for each in row.found] for row in rows},
            "signs": {
                sign.words: {
                    "verdict": sign.verdict,
                    "change": sign.change,
                    "standard_error": sign.error,
                }
                for sign in found
            },
            "density": {str(key): value for key, value in dense.items()},
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    missed = misses(rows)
    for line in missed:
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
